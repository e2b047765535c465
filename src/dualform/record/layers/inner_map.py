"""Finds the linear map inside a module with its own forward pass: a subclass, or an instance that was patched.

Such a module need not be the map of its parent class: BART's positions add an offset to their index, Gemma's embedding
scales its output, others apply dropout to their input or return a tuple. A function mode therefore watches the forward
pass for the one functional call that takes the module's own weight (``F.linear``, ``F.embedding``, a convolution). The
input of that call is the key, and the gradient at its output is the error; the operations before and after do not
matter. If no call takes the weight itself (because it is standardised or quantised first), that is reported.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..hooks import Hook
from .protocol import AfterForward, ErrorPoint, ModuleCall, Node, OnCall, OnUnseen, point_of

COMPILED = "it has its own forward pass inside torch.compile, where the functional call of its map cannot be seen"

ADDITIONS = frozenset(
    {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
)  # fmt: skip


class InnerCall(NamedTuple):
    """A functional call with a module's own weight; ``biased`` if the call also added the module's own bias."""

    call: ModuleCall
    point: ErrorPoint
    biased: bool


class InnerCalls(TorchFunctionMode):
    """Collects the calls of a module's map during one forward pass; only the thread that runs it is affected."""

    def __init__(self, kind: "InnerMapKind", module: nn.Module) -> None:
        super().__init__()
        self.kind, self.module = kind, module
        self.used: set[str] = set()
        """Names of the module's parameters that the map used."""
        self._calls: list[tuple[ModuleCall, list[ErrorPoint], Tensor]] = []

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Call a function, and collect the call if it is the module's map."""
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        inner = self.kind.inner(self.module, function, args, kwargs, output)
        if inner is not None:
            self.used |= {"weight", "bias"} if inner.biased else {"weight"}
            self._calls.append((inner.call, [inner.point], output))
        elif function in ADDITIONS and len(args) == 2 and not kwargs:
            self._see_addition(args, output)
        return output

    def report(self, watch: OnCall) -> None:
        """Pass all calls of the map on to ``watch``."""
        for call, points, _ in self._calls:
            watch(call, points)

    def _see_addition(self, summands: tuple, output: Tensor) -> None:
        """Two tensors were added. If they are the map's output and the bias, both have the same error. But the bias
        gets its gradient at the sum, earlier in the backward pass, so the sum becomes a second point.
        """
        bias = self.module._parameters.get("bias")
        if bias is None or all(summand is not bias for summand in summands):
            return
        for _, points, product in self._calls:
            if any(summand is product for summand in summands):
                self.used.add("bias")
                points.append(point_of(output))


class InnerMapKind(AfterForward):
    """A kind with one weight. Plain modules are recorded from outside, all others from inside their forward pass."""

    def is_plain(self, module: nn.Module) -> bool:
        """Whether a module runs exactly the forward pass of the class that the kind stands for."""
        raise NotImplementedError

    def inner(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict, output: Any) -> InnerCall | None:
        """Capture a functional call, if it is the module's map with the module's own weight."""
        raise NotImplementedError

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Register hooks: for inputs and outputs, or for a mode inside the forward pass if the module has its own."""
        if self.is_plain(module) and not torch.nn.modules.module._global_forward_hooks:
            return super().attach(module, watch, unseen)
        passes = ForwardPasses(self, watch, unseen)
        return [
            module.register_forward_pre_hook(Hook(passes.begin), with_kwargs=True),
            module.register_forward_hook(Hook(passes.end), prepend=True, with_kwargs=True, always_call=True),
        ]


class ForwardPasses:
    """The forward passes of one module that are under way, in each thread the innermost last."""

    def __init__(self, kind: InnerMapKind, watch: OnCall, unseen: OnUnseen | None) -> None:
        self.kind, self.watch, self.unseen = kind, watch, unseen
        self._running = threading.local()

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A forward pass begins."""
        if torch.compiler.is_compiling():
            _report_compiled(module, self.unseen)
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
        calls.report(self.watch)
        if self.unseen is not None and output is not None:
            missing = [name for name in ("weight", "bias") if name not in calls.used]
            if names := [name for name in missing if _reaches(output, (args, kwargs), module._parameters.get(name))]:
                self.unseen(names, _reason(module, names))


def _report_compiled(module: nn.Module, unseen: OnUnseen | None) -> None:
    if unseen is not None:
        unseen([name for name, parameter in module._parameters.items() if parameter is not None], COMPILED)


_report_compiled._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess] # runs uncompiled


def _reason(module: nn.Module, names: Sequence[str]) -> str:
    cls = f"{type(module).__module__}.{type(module).__qualname__}"
    if "weight" in names:
        return (
            f"{cls} has its own forward pass, in which no functional call takes the weight itself (perhaps the matrix "
            "is computed from the weight, as in quantisation-aware training or weight standardisation), so its linear "
            "map is not known"
        )
    return f"{cls} has its own forward pass, which adds the bias elsewhere than to the output of its linear map"


def _reaches(output: Any, inputs: Any, parameter: Tensor | None) -> bool:
    """Whether an output depends on a parameter through operations after the inputs."""
    if parameter is None or not parameter.requires_grad:
        return False
    border = {tensor.grad_fn for tensor in _tensors(inputs)}
    ahead: list[Node | None] = [tensor.grad_fn for tensor in _tensors(output)]
    visited: set[Node | None] = {None, *border}
    while ahead:
        node = ahead.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
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
    """The class whose method a module runs; None where the instance has a function of its own."""
    if name in vars(module):
        return None
    return next(cls for cls in type(module).__mro__ if name in vars(cls))


def transposed(matrix: Any) -> Tensor | None:
    """The matrix W, if this one is a transposed view of it (``W.T``, ``W.t()``, ``W.mT``)."""
    base = matrix._base if isinstance(matrix, Tensor) else None
    if base is None or base.ndim != 2 or matrix.ndim != 2 or matrix.storage_offset() != base.storage_offset():
        return None
    is_transposed = matrix.shape == base.shape[::-1] and matrix.stride() == base.stride()[::-1]
    return base if is_transposed else None
