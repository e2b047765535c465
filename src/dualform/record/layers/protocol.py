"""What a layer kind tells: its linear maps, and for each call of a module where the errors of these maps will show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..hooks import Hook, uncompiled

Node = torch.autograd.graph.Node


@dataclass(frozen=True)
class LinearMap:
    """One linear map of a module: which of its parameters make the matrix, and which are added to the output.

    ``weights`` are the parameters' names in the module and the columns that each fills, ``name`` tells the maps of one
    module apart (empty where it has only this one).
    """

    weights: tuple[tuple[str, int], ...]
    biases: tuple[str, ...]
    d_in: int
    d_out: int
    name: str = ""
    transposed: bool = False
    parts: int = 1
    indexed: bool = False


class ErrorPoint(NamedTuple):
    """A place in the backward pass where an error shows: a node of autograd's graph, and which of its gradients."""

    node: Node
    number: int


class MapInputs(NamedTuple):
    """Inputs of one map in one call, with the leading axes of the call."""

    map: int
    rows: Tensor


class MapRows(NamedTuple):
    """Inputs and errors of one map in one call, with the leading axes of the call; no errors where none came."""

    map: int
    key: Tensor
    error: Tensor | None


@runtime_checkable
class ModuleCall(Protocol):
    """One call of a module, in between its forward and its backward step.

    It holds nothing of autograd's graph: hooks in the graph hold the call, and a ring would stay in memory, with the
    inputs of its batch, until Python looks for rings.
    """

    def inputs(self) -> Sequence[MapInputs]:
        """The inputs of its maps."""
        ...

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """The same with their errors, from those at all its points (None where none came)."""
        ...

    def shape(self, output: Tensor) -> Tensor:
        """An output of a map, one line a row, in the shape that the module gives it."""
        ...


CallAndPoints = tuple[ModuleCall, Sequence[ErrorPoint]]
"""A call, and where its errors will show."""

OnCall = Callable[[ModuleCall, Sequence[ErrorPoint]], None]
"""Told of every call that may become slots."""

OnUnseen = Callable[[Sequence[str], str], None]
"""Told of parameters of a module (by their names in it) that its forward pass used outside of its linear map, and why
that is not known.
"""


@runtime_checkable
class LayerKind(Protocol):
    """A kind of layer."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def batch_dim(self) -> int | None:
        """The axis of its rows that counts examples, where that does not depend on the input."""
        ...

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """The linear maps that a module applies."""
        ...

    def refusal(self, module: nn.Module) -> str | None:
        """Why a module of this kind cannot be recorded, if so: the end of a sentence."""
        ...

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Put hooks in place that tell of the module's calls, and of uses that are none; returns their handles."""
        ...


class AfterForward:
    """A kind whose calls can be told from what goes into a forward pass and what comes out."""

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Look at inputs and outputs."""
        return [module.register_forward_hook(Hook(partial(self._after, watch)), prepend=True, with_kwargs=True)]

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> CallAndPoints | None:
        """What a forward pass was; None if no gradient will come back."""
        raise NotImplementedError

    @uncompiled
    def _after(self, watch: OnCall, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if torch.is_grad_enabled() and (found := self.call(module, args, kwargs, output)) is not None:
            watch(*found)


def point_of(output: Tensor) -> ErrorPoint:
    """The step of the backward pass that takes an output's error.

    A view shares its history with its base, and an in-place activation after the layer rewrites the history of the
    view: the base keeps the one that counts.
    """
    base = output._base
    kept = output if base is None or base.numel() != output.numel() else base
    assert kept.grad_fn is not None
    return ErrorPoint(kept.grad_fn, kept.output_nr)


def argument(args: tuple, kwargs: dict, place: int, name: str) -> Any:
    """An argument of a forward pass, given by place or by name; None where it is not given."""
    return args[place] if len(args) > place else kwargs.get(name)


def keep_input(x: Tensor, dtype: torch.dtype, owned: bool) -> Tensor:
    """An input as the layer uses it, so that it stays as it is until the backward pass.

    Autograd sees to that where it needs the input for the weight's gradient (``owned``). Under autocast the layer
    multiplies a cast of its input, in the precision of its output.
    """
    x = x.detach()
    if x.is_floating_point() and x.dtype is not dtype:
        return x.to(dtype)
    return x if owned else x.clone()
