"""``nn.MultiheadAttention``: its projections run inside one function, where a function mode of torch sees them.

Nothing is replaced: the mode belongs to the thread that runs the forward pass, and is active only during that pass.
"""

import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from dualform.errors import UnsupportedLayer

from ..hooks import Hook
from .linear import LINEAR
from .protocol import ErrorPoint, LinearMap, MapInputs, MapRows, OnCall, OnUnseen, argument, keep_input, point_of

ProjectionCall = tuple[Tensor, Tensor, Tensor]
"""Input, weight and output of a linear projection."""

MapUseOfCall = tuple[int, int, Tensor]
"""One projection of a call: the number of its map, the first row of the map's weight that it uses, and its input."""


class Projections(TorchFunctionMode):
    """Collects the linear projections of one forward pass of a module: all calls of ``F.linear`` with its weights.

    The mode lies below all other modes of its thread (:meth:`begin`). So these are called exactly as they are without
    recording: they see ``F.multi_head_attention_forward``, and not the functions inside it.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        self.calls: list[ProjectionCall] = []

    def begin(self) -> None:
        """Put this mode below all other modes of the thread."""
        above = [_pop_mode() for _ in range(_len_torch_function_stack())]
        for mode in (self, *reversed(above)):
            _push_mode(mode)

    def end(self) -> None:
        """Take this mode out of the thread's modes."""
        modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
        for mode in reversed(modes):
            if mode is not self:
                _push_mode(mode)

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Call a function, and collect the call if it is a projection."""
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:
                if types:  # of tensor subclasses: the function is theirs first, and most call it again
                    return _call_subclass(function, types, args, kwargs)
                return _without_dispatch(function)(*args, **kwargs)
        output = function(*args, **kwargs)
        if function is LINEAR:
            x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
            if any(weight is parameter or weight._base is parameter for parameter in self.weights):
                self.calls.append((x, weight, output))
        return output


def _without_dispatch(function: Any) -> Callable:
    """A copy of a function of torch that does not ask for modes first. If it did, it would be handed to the mode
    whole, again and again, and what it calls would not be seen.
    """
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _call_subclass(function: Callable, types: Sequence[type], args: tuple, kwargs: dict) -> Any:
    """What torch does with tensor subclasses, once no mode is left: the first one that knows the function runs it."""
    for cls in types:
        result = cls.__torch_function__(function, types, args, kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if result is not NotImplemented:
            return result
    raise TypeError(f"no tensor subclass of {types} implements torch.nn.functional.{function.__name__}")


def _refuse_compiled() -> None:
    raise UnsupportedLayer(
        "an nn.MultiheadAttention inside torch.compile hides its projections. Train it without compiling, or leave it "
        "to the rest (snapshots, unattributed) with keep={'name': 'nothing'}."
    )


_refuse_compiled._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess] # runs uncompiled


class MultiheadCall:
    """The rows of each projection, time first. A projection of the query alone fills some columns of the errors."""

    def __init__(self, module: nn.MultiheadAttention, uses: Sequence[MapUseOfCall], batch: int) -> None:
        self.module, self.batch, self._uses = module, batch, uses

    def inputs(self) -> Sequence[MapInputs]:
        """The input of each projection."""
        time = -1 if self.batch else 0
        return [MapInputs(number, x.reshape(time, self.batch, x.shape[-1])) for number, _, x in self._uses]

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """The rows of each projection."""
        rows = []
        for (number, begin, _), key, error in zip(self._uses, self.inputs(), errors, strict=True):
            if error is not None:
                error = error.reshape(*key.rows.shape[:-1], error.shape[-1])
                width = 3 * self.module.embed_dim
                if number == 0 and self.module.in_proj_weight is not None and error.shape[-1] < width:
                    error = F.pad(error, (begin, width - begin - error.shape[-1]))
            rows.append(MapRows(number, key.rows, error))
        return rows

    def shape(self, output: Tensor) -> Tensor:
        """Time first."""
        return output.unflatten(0, (-1 if self.batch else 0, self.batch))


def _trained_projections(
    module: nn.MultiheadAttention, calls: Sequence[ProjectionCall]
) -> tuple[list[MapUseOfCall], list[ErrorPoint]]:
    """The projections that are trained, and where their errors will arrive."""
    uses, points = [], []
    for x, weight, output in calls:
        place = _map_and_row(module, weight)
        if place is not None and output.requires_grad:
            uses.append((*place, keep_input(x, output.dtype, weight.requires_grad)))
            points.append(point_of(output))
    return uses, points


def _map_and_row(module: nn.MultiheadAttention, weight: Tensor) -> tuple[int, int] | None:
    """The number of the map whose weight this is, and the first row of that weight that it begins with."""
    base = weight if weight._base is None else weight._base
    for number, parameter in enumerate(_weights(module)):
        if base is parameter:
            return number, (weight.storage_offset() - parameter.storage_offset()) // parameter.shape[1]
    return None


def _weights(module: nn.MultiheadAttention) -> list[Tensor]:
    packed = module.in_proj_weight is not None
    first = [module.in_proj_weight] if packed else [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    return [*first, module.out_proj.weight]  # pyright: ignore[reportReturnType]


class MultiheadKind:
    """The projections of query, key and value (one map where they have one weight), and that of the output."""

    name, batch_dim = "multihead", 1

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """One map where the weights are packed, else three; and the output. Three maps share one bias vector, so that
        one belongs to the rest.
        """
        assert isinstance(module, nn.MultiheadAttention)
        width, out = module.embed_dim, module.out_proj
        biases = () if out.bias is None else ("out_proj.bias",)
        last = LinearMap((("out_proj.weight", width),), biases, width, width, name="out_proj")
        if module.in_proj_weight is not None:
            biases = () if module.in_proj_bias is None else ("in_proj_bias",)
            return (LinearMap((("in_proj_weight", width),), biases, width, 3 * width, name="in_proj"), last)
        sizes = {"q_proj": width, "k_proj": module.kdim, "v_proj": module.vdim}
        return (*(LinearMap(((f"{n}_weight", size),), (), size, width, name=n) for n, size in sizes.items()), last)

    def refusal(self, module: nn.Module) -> str | None:
        """Every module of this class can be recorded."""
        return None

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Collect its projections, from before its forward pass to after it."""
        passes = AttentionPasses(watch)
        return [
            module.register_forward_pre_hook(Hook(passes.begin), with_kwargs=True),
            module.register_forward_hook(Hook(passes.end), prepend=True, with_kwargs=True, always_call=True),
        ]


class AttentionPasses:
    """The forward passes of one module that are under way, in each thread the innermost last."""

    def __init__(self, watch: OnCall) -> None:
        self.watch, self._running = watch, threading.local()

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A forward pass begins. Without gradients torch may take its fused path, which any mode would bar; where a
        parameter is trained it never does, with or without a mode.
        """
        assert isinstance(module, nn.MultiheadAttention)
        if torch.compiler.is_compiling():
            _refuse_compiled()
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        running = self._running.__dict__.setdefault("passes", [])
        running.append(Projections(_weights(module)) if trained else None)
        if running[-1] is not None:
            running[-1].begin()

    def end(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """It is over, with an output or with an error."""
        running = self._running.__dict__.get("passes")
        projections = running.pop() if running else None
        if projections is None:
            return
        projections.end()
        assert isinstance(module, nn.MultiheadAttention)
        if projections.calls and output is not None:
            query: Tensor = argument(args, kwargs, 0, "query")
            batch = 1 if query.ndim == 2 else query.shape[0 if module.batch_first else 1]
            uses, points = _trained_projections(module, projections.calls)
            if uses:
                self.watch(MultiheadCall(module, uses, batch), points)
