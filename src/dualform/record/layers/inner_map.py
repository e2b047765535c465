"""Finds the linear map inside a module that runs a forward pass of its own: a subclass, or a patched instance.

Such a module need not be the map of its parent class: BART's positions add an offset to their index, Gemma's embedding
scales its output, others drop out their input or return a tuple. Its forward pass is therefore watched for the one
functional call that takes the module's own weight (``F.linear``, ``F.embedding``, a convolution). What goes into that
call is the key, and the gradient at what comes out of it is the error; what happens before and after does not matter.
Where no call takes the weight itself (it is standardised or quantised first), that is reported.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..hooks import Hook
from .protocol import AfterForward, ErrorPoint, ModuleCall, Node, OnCall, OnUnseen, point_of

COMPILED = "it runs a forward pass of its own inside torch.compile, where the functional call of its map cannot be seen"

ADDITIONS = frozenset(
    {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
)  # fmt: skip


class InnerCall(NamedTuple):
    """A functional call with a module's own weight, and whether it added the module's own bias."""

    call: ModuleCall
    point: ErrorPoint
    biased: bool


class InnerCalls(TorchFunctionMode):
    """Watches one forward pass of a module; only the thread that runs it is affected."""

    def __init__(self, kind: "InnerMapKind", module: nn.Module) -> None:
        super().__init__()
        self.kind, self.module = kind, module
        self.seen: set[str] = set()
        """Names of the module's parameters that entered the map."""
        self._calls: list[tuple[ModuleCall, list[ErrorPoint], Tensor]] = []

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Let a function run as it is, and tell of it where it is the module's map."""
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        inner = self.kind.inner(self.module, function, args, kwargs, output)
        if inner is not None:
            self.seen |= {"weight", "bias"} if inner.biased else {"weight"}
            self._calls.append((inner.call, [inner.point], output))
        elif function in ADDITIONS and len(args) == 2 and not kwargs:
            self._add(args, output)
        return output

    def tell(self, watch: OnCall) -> None:
        """Tell of all calls of the map."""
        for call, points, _ in self._calls:
            watch(call, points)

    def _add(self, summands: tuple, output: Tensor) -> None:
        """Something is added. The bias, added to the output of the map as it is, has the same error as that; but its
        gradient is made at the sum, earlier in the backward pass, so the sum becomes a second point.
        """
        bias = self.module._parameters.get("bias")
        if bias is None or all(each is not bias for each in summands):
            return
        for _, points, product in self._calls:
            if any(each is product for each in summands):
                self.seen.add("bias")
                points.append(point_of(output))


class InnerMapKind(AfterForward):
    """A kind with one weight, whose modules are looked at from outside if they are plain, else from inside."""

    def is_plain(self, module: nn.Module) -> bool:
        """Whether a module runs the forward pass of the class that its kind stands for, and nothing else."""
        raise NotImplementedError

    def inner(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict, output: Any) -> InnerCall | None:
        """What a functional call was, if it is the map of a module with the module's own weight."""
        raise NotImplementedError

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Look at inputs and outputs; inside the forward pass where the module has one of its own."""
        if self.is_plain(module) and not torch.nn.modules.module._global_forward_hooks:
            return super().attach(module, watch, unseen)
        passes = ForwardPasses(self, watch, unseen)
        return [
            module.register_forward_pre_hook(Hook(passes.begin), with_kwargs=True),
            module.register_forward_hook(Hook(passes.end), prepend=True, with_kwargs=True, always_call=True),
        ]


class ForwardPasses:
    """The forward passes of one module that are being watched, in each thread the innermost last."""

    def __init__(self, kind: InnerMapKind, watch: OnCall, unseen: OnUnseen | None) -> None:
        self.kind, self.watch, self.unseen = kind, watch, unseen
        self._running = threading.local()

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A forward pass begins."""
        if torch.compiler.is_compiling():
            _tell_compiled(module, self.unseen)
            return
        running = self._running.__dict__.setdefault("passes", [])
        running.append(InnerCalls(self.kind, module) if torch.is_grad_enabled() else None)
        if running[-1] is not None:
            running[-1].__enter__()

    def end(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """It is over, with an output or with an error."""
        if torch.compiler.is_compiling():
            return
        running = self._running.__dict__.get("passes")
        calls = running.pop() if running else None
        if calls is None:
            return
        calls.__exit__(None, None, None)
        calls.tell(self.watch)
        if self.unseen is not None and output is not None:
            missing = [name for name in ("weight", "bias") if name not in calls.seen]
            if names := [name for name in missing if _reaches(output, (args, kwargs), module._parameters.get(name))]:
                self.unseen(names, _reason(module, names))


def _tell_compiled(module: nn.Module, unseen: OnUnseen | None) -> None:
    if unseen is not None:
        unseen([name for name, each in module._parameters.items() if each is not None], COMPILED)


_tell_compiled._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess] # runs as it stands


def _reason(module: nn.Module, names: Sequence[str]) -> str:
    cls = f"{type(module).__module__}.{type(module).__qualname__}"
    if "weight" in names:
        return (
            f"{cls} runs a forward pass of its own, in which no functional call takes the weight itself (it is "
            "computed from the weight, as in quantisation-aware training or weight standardisation?), so its linear "
            "map is not known"
        )
    return f"{cls} runs a forward pass of its own, which adds the bias elsewhere than to the output of its linear map"


def _reaches(output: Any, inputs: Any, parameter: Tensor | None) -> bool:
    """Whether an output depends on a parameter through what happened since the inputs."""
    if parameter is None or not parameter.requires_grad:
        return False
    border = {tensor.grad_fn for tensor in _tensors(inputs)}
    ahead: list[Node | None] = [tensor.grad_fn for tensor in _tensors(output)]
    looked_at: set[Node | None] = {None, *border}
    while ahead:
        node = ahead.pop()
        if node is None or node in looked_at:
            continue
        looked_at.add(node)
        if getattr(node, "variable", None) is parameter:
            return True
        ahead += [following for following, _ in node.next_functions]
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def owner_of_forward(module: nn.Module, name: str = "forward") -> type | None:
    """The class whose method a module runs; None where the instance was given a function of its own."""
    if name in vars(module):
        return None
    return next(cls for cls in type(module).__mro__ if name in vars(cls))


def transposed(matrix: Any) -> Tensor | None:
    """The matrix of which this one is the transposed view (``W.T``, ``W.t()``, ``W.mT``)."""
    base = matrix._base if isinstance(matrix, Tensor) else None
    if base is None or base.ndim != 2 or matrix.ndim != 2 or matrix.storage_offset() != base.storage_offset():
        return None
    turned = matrix.shape == base.shape[::-1] and matrix.stride() == base.stride()[::-1]
    return base if turned else None
