"""The calls that the user makes: of the whole model, or of modules inside it where the loop calls these directly.

At first all modules have hooks. After the first backward pass it is known which modules the user calls, and only these
keep their hooks.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import Hook, is_opaque, uncompiled

Shapes = tuple[tuple[int, ...], ...]


class ModelCall:
    """One call by the user: the module, the shapes of its tensors, and the recorded calls inside it so far."""

    __slots__ = ("calls", "inputs", "outputs", "path")

    def __init__(self, path: str, inputs: Shapes) -> None:
        self.path, self.inputs = path, inputs
        self.outputs: Shapes = ()
        self.calls: Counter[str] = Counter()


class ModelCalls:
    """Watches the outermost calls. ``began(gradients, by_user)`` is called at the beginning of each; ``by_user`` is
    False inside a backward pass. ``ended`` is called with the arguments and the output of each call in which
    a recorded layer ran.
    """

    def __init__(
        self, model: nn.Module, began: Callable[[bool, bool], None], ended: Callable[..., None],
        interruptions: Callable[[], int],
    ) -> None:  # fmt: skip
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
    def _before(self, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._depth and (is_opaque(module) or self._is_again(path)):
            return
        if self._depth and self._interrupted != self._interruptions():
            self.break_off()
        self._depth += 1
        if self._depth == 1:
            self._interrupted = self._interruptions()
            self.current = ModelCall(path, shapes_of(args, kwargs)) if torch.is_grad_enabled() else None
            if self.current is None:
                self._without_gradients.add(path)
            self._began(self.current is not None, torch._C._current_graph_task_id() == -1)

    @uncompiled
    def _after(self, path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not self._depth or (self._depth == 1 and self._is_again(path)):
            return
        self._depth -= 1
        if self._depth:
            return
        call, self.current = self.current, None
        if call is not None and call.calls:
            self.last = call
            self._called.add(path)
            call.outputs = shapes_of((output,), {})
            if output is not None:
                self._ended(call, module, args, kwargs, output)


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
