"""The calls that the user makes: of the whole model, or of modules inside it where the loop calls these directly.

At first all modules have hooks. After the first backward pass it is known which modules the user calls, and only these
keep their hooks. Should the user call another one later, a recorded layer inside it tells; where no layer is recorded,
every other module keeps a hook that does nothing inside the calls of those.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..hooks import Hook, is_opaque, uncompiled

NUMBERS = count()

Shapes = tuple[tuple[int, ...], ...]


class ModelCall:
    """One call by the user: the module, the shapes of its tensors, and the recorded calls inside it so far."""

    __slots__ = ("calls", "generators", "inputs", "modes", "number", "outputs", "path")

    def __init__(self, path: str, inputs: Shapes) -> None:
        self.path, self.inputs = path, inputs
        self.outputs: Shapes = ()
        self.number = next(NUMBERS)
        """Calls are counted in their order."""
        self.calls: Counter[str] = Counter()
        self.generators: tuple[Tensor, Tensor] | None = None
        """The states of torch's generator before and after it, where a run is recorded to be run again …"""
        self.modes: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        """… and the modules in evaluation mode, and the parameters that take no gradient."""


@runtime_checkable
class CallWatcher(Protocol):
    """Is told of every call by the user that may be followed by a backward pass."""

    def call_begins(self, call: ModelCall) -> None:
        """The call is about to run."""
        ...

    def call_ends(self, call: ModelCall, output: Any) -> None:
        """The call has run."""
        ...


class ModelCalls:
    """Watches the outermost calls. ``began(gradients, by_user)`` is called at the beginning of each; ``by_user`` is
    False inside a backward pass. ``ended`` is called with the arguments of each call in which a recorded layer ran.
    """

    def __init__(
        self, model: nn.Module, began: Callable[[bool, bool], None], ended: Callable[..., None],
        interruptions: Callable[[], int], watcher: CallWatcher | None = None, *, alone: bool = False,
    ) -> None:  # fmt: skip
        self._watcher, self._alone = watcher, alone
        self._model, self._began, self._ended, self._interruptions = model, began, ended, interruptions
        self._interrupted = 0
        self.current: ModelCall | None = None
        self.last: ModelCall | None = None
        """The last call that is over."""
        self._depth = 0
        self._called: set[str] = {""}
        self._without_gradients: set[str] = set()
        """Modules called without gradients: in an evaluation, or before activation checkpointing calls them again."""
        self._handles: dict[str, list[Any]] = {}
        self._settled = False

    def hook(self) -> "ModelCalls":
        """Watch all modules."""
        if self._alone and self._settled:
            self.remove()
        self._settled = False
        for path, module in self._model.named_modules():
            if path not in self._handles:
                self._handles[path] = [
                    module.register_forward_pre_hook(Hook(partial(self._before, path)), with_kwargs=True),
                    module.register_forward_hook(Hook(partial(self._after, path)), with_kwargs=True, always_call=True),
                ]
        return self

    def remove(self) -> None:
        """Remove all hooks."""
        for path in list(self._handles):
            self._unhook(path)

    def settle(self) -> None:
        """A backward pass is over: watch only the modules that the user has called so far."""
        if not self._settled and not self._depth:
            self._settled = True
            for path in [path for path in self._handles if path not in self._called]:
                self._unhook(path)
                if self._alone:
                    hook = Hook(partial(self._look_out, path))
                    module = self._model.get_submodule(path)
                    self._handles[path] = [module.register_forward_pre_hook(hook, with_kwargs=True)]

    def break_off(self) -> None:
        """Assume that no call is under way: an interrupt may end one without running its hooks."""
        self._depth, self.current = 0, None

    def _unhook(self, path: str) -> None:
        for handle in self._handles.pop(path):
            handle.remove()

    def number(self, name: str) -> int | None:
        """The number of this call of a module inside the user's call; None where no watched call is under way."""
        call = self.current
        if call is None:
            self.hook()  # the user calls a module for the first time: find out which one
            return None
        number = call.calls[name]
        call.calls[name] = number + 1
        return number

    def _is_again(self, path: str) -> bool:
        """Whether a call repeats an earlier one: activation checkpointing inside a backward pass."""
        return torch._C._current_graph_task_id() != -1 and path not in self._without_gradients

    @uncompiled
    def _look_out(self, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A module is called that the user has not called so far: watch all modules again, if this is the user."""
        if self._depth and self._interrupted == self._interruptions():
            return
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and not is_opaque(module):
            self.hook()
            self._before(path, module, args, kwargs)

    @uncompiled
    def _before(self, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._depth and (is_opaque(module) or self._is_again(path)):
            return
        if self._depth and self._interrupted != self._interruptions():
            self.break_off()
        self._depth += 1
        if self._depth == 1:
            self._interrupted = self._interruptions()
            if torch.is_grad_enabled():
                self.current = ModelCall(path, () if self._alone else shapes_of(args, kwargs))
            else:
                self.current = None
                self._without_gradients.add(path)
            by_user = torch._C._current_graph_task_id() == -1
            self._began(self.current is not None, by_user)
            if self._watcher is not None and self.current is not None and by_user:
                self._watcher.call_begins(self.current)

    @uncompiled
    def _after(self, path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not self._depth or (self._depth == 1 and self._is_again(path)):
            return
        self._depth -= 1
        if self._depth:
            return
        call, self.current = self.current, None
        if self._watcher is not None and call is not None and torch._C._current_graph_task_id() == -1:
            self._watcher.call_ends(call, output)
        if call is not None and call.calls:
            self.last = call
            self._called.add(path)
            call.outputs = () if self._alone else shapes_of((output,), {})
            if output is not None:
                self._ended(call, module, args, kwargs)


def shapes_of(args: tuple, kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes of all tensors among the arguments of a call, in nested containers too."""
    shapes: list[tuple[int, ...]] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            shapes.append(tuple(value.shape))
        elif isinstance(value, tuple | list):
            shapes += shapes_of(tuple(value), {})
        elif isinstance(value, Mapping):
            shapes += shapes_of(tuple(value.values()), {})
    return tuple(shapes)
