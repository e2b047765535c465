"""``nn.MultiheadAttention``: its projections run inside one function, where they are seen by watching that function."""

import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualform.errors import UnsupportedLayer

from ..hooks import Hook
from .linear import LINEAR
from .protocol import ErrorPoint, LinearMap, MapInputs, MapRows, OnCall, OnUnseen, argument, keep_input, point_of

ProjectionCall = tuple[Tensor, Tensor, Tensor]
"""Input, weight and output of one."""


class Projections(TorchFunctionMode):
    """Sees the linear projections of one forward pass of a module: all calls of ``F.linear`` with a weight of it.

    Only functions that the thread of this forward pass calls are seen, and only while it runs.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        self.seen: list[ProjectionCall] = []

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Let a function run as it is, and note it if it is a projection."""
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:
                return _opened(function)(*args, **kwargs)
        output = function(*args, **kwargs)
        if function is LINEAR:
            x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
            if any(weight is own or weight._base is own for own in self.weights):
                self.seen.append((x, weight, output))
        return output


def _opened(function: Any) -> Callable:
    """The same code, but the functions that it calls can be seen: its own check for modes would hide them."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _refuse_compiled() -> None:
    raise UnsupportedLayer(
        "an nn.MultiheadAttention inside torch.compile hides its projections. Train it without compiling, or leave it "
        "to the rest (snapshots, unattributed) with keep={'name': 'nothing'}."
    )


_refuse_compiled._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess] # runs as it stands


class MultiheadCall:
    """The rows of each projection, time first. A projection of the query alone fills a part of the errors."""

    def __init__(self, module: nn.MultiheadAttention, uses: Sequence[tuple[int, int, Tensor]], batch: int) -> None:
        self.module, self.batch, self._uses = module, batch, uses

    def inputs(self) -> Sequence[MapInputs]:
        """What each projection was given."""
        time = -1 if self.batch else 0
        return [MapInputs(number, x.reshape(time, self.batch, x.shape[-1])) for number, _, x in self._uses]

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """The rows of each projection."""
        found = []
        for (number, begin, _), key, error in zip(self._uses, self.inputs(), errors, strict=True):
            if error is not None:
                error = error.reshape(*key.rows.shape[:-1], error.shape[-1])
                width = 3 * self.module.embed_dim
                if number == 0 and self.module.in_proj_weight is not None and error.shape[-1] < width:
                    error = F.pad(error, (begin, width - begin - error.shape[-1]))
            found.append(MapRows(number, key.rows, error))
        return found

    def shape(self, output: Tensor) -> Tensor:
        """Time first."""
        return output.unflatten(0, (-1 if self.batch else 0, self.batch))


def _uses(
    module: nn.MultiheadAttention, seen: Sequence[ProjectionCall]
) -> tuple[list[tuple[int, int, Tensor]], list[ErrorPoint]]:
    """The projections that are trained: map, first row and input of each; and where their errors will show."""
    uses, points = [], []
    for x, weight, output in seen:
        place = _place(module, weight)
        if place is not None and output.requires_grad:
            uses.append((*place, keep_input(x, output.dtype, weight.requires_grad)))
            points.append(point_of(output))
    return uses, points


def _place(module: nn.MultiheadAttention, weight: Tensor) -> tuple[int, int] | None:
    """To which map a weight belongs, and from which row of it."""
    base = weight if weight._base is None else weight._base
    for number, own in enumerate(_weights(module)):
        if base is own:
            return number, (weight.storage_offset() - own.storage_offset()) // own.shape[1]
    return None


def _weights(module: nn.MultiheadAttention) -> list[Tensor]:
    packed = module.in_proj_weight is not None
    first = [module.in_proj_weight] if packed else [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    return [*first, module.out_proj.weight]  # pyright: ignore[reportReturnType]


class MultiheadKind:
    """The projections of query, key and value (one map where they have one weight), and that of the output."""

    name, batch_dim = "multihead", 1

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """Its maps. With separate weights, the bias that they share in parts belongs to the rest."""
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
        """Nothing stands against it."""
        return None

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Watch the functions that it calls, from before its forward pass to after it."""
        passes = AttentionPasses(watch)
        return [
            module.register_forward_pre_hook(Hook(passes.begin), with_kwargs=True),
            module.register_forward_hook(Hook(passes.end), prepend=True, with_kwargs=True, always_call=True),
        ]


class AttentionPasses:
    """The forward passes of one module that are being watched, in each thread the innermost last."""

    def __init__(self, watch: OnCall) -> None:
        self.watch, self._running = watch, threading.local()

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A forward pass begins. Without gradients torch may take a fast path, which a mode would bar."""
        assert isinstance(module, nn.MultiheadAttention)
        if torch.compiler.is_compiling():
            _refuse_compiled()
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        running = self._running.__dict__.setdefault("passes", [])
        running.append(Projections(_weights(module)) if trained else None)
        if running[-1] is not None:
            running[-1].__enter__()

    def end(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """It is over, with an output or with an error."""
        running = self._running.__dict__.get("passes")
        projections = running.pop() if running else None
        if projections is None:
            return
        projections.__exit__(None, None, None)
        assert isinstance(module, nn.MultiheadAttention)
        if projections.seen and output is not None:
            query: Tensor = argument(args, kwargs, 0, "query")
            batch = 1 if query.ndim == 2 else query.shape[0 if module.batch_first else 1]
            uses, points = _uses(module, projections.seen)
            if uses:
                self.watch(MultiheadCall(module, uses, batch), points)
