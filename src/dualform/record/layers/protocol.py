"""The interface of a layer kind: its linear maps, and for each call of a module where their errors will arrive."""

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
    """One linear map of a module: which parameters form its matrix, and which are added to its output.

    ``weights`` are the parameters' names in the module, with the number of columns that each fills. ``name``
    distinguishes the maps of one module; it is empty where there is only one.
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
    """Where in the backward pass an error arrives: a node of autograd's graph, and the number of its gradient."""

    node: Node
    number: int


class MapInputs(NamedTuple):
    """Inputs of one map in one call, with the leading axes of the call."""

    map: int
    rows: Tensor


class MapRows(NamedTuple):
    """Inputs and errors of one map in one call, with the leading axes of the call. Without an error none arrived."""

    map: int
    key: Tensor
    error: Tensor | None


@runtime_checkable
class ModuleCall(Protocol):
    """One call of a module, between its forward and its backward pass.

    It must not refer to autograd's graph: hooks in the graph refer to the call, and a reference cycle would stay in
    memory, with the inputs of its batch, until Python's garbage collector runs.
    """

    def inputs(self) -> Sequence[MapInputs]:
        """The inputs of the call's maps."""
        ...

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """The inputs with their errors, given the errors at all points of the call (None where none arrived)."""
        ...

    def shape(self, output: Tensor) -> Tensor:
        """Bring a map's output, given with one line per row, into the shape that the module gives it."""
        ...


CallAndPoints = tuple[ModuleCall, Sequence[ErrorPoint]]
"""A call, and where its errors will arrive."""

OnCall = Callable[[ModuleCall, Sequence[ErrorPoint]], None]
"""Called for every call of a module that may become slots."""

OnUnseen = Callable[[Sequence[str], str], None]
"""Called with parameters (by their names in the module) that a forward pass used outside of the linear map, and the
reason.
"""


@runtime_checkable
class LayerKind(Protocol):
    """A kind of layer: knows the linear maps of its modules and captures their calls."""

    @property
    def name(self) -> str:
        """The name of the kind, as the manifest stores it."""
        ...

    @property
    def batch_dim(self) -> int | None:
        """The axis of the rows that counts examples; None where it depends on the input."""
        ...

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """The linear maps that a module applies."""
        ...

    def refusal(self, module: nn.Module) -> str | None:
        """Why a module of this kind cannot be recorded, as the end of a sentence; None where it can."""
        ...

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Register hooks that report the module's calls, and uses outside of its map; returns their handles."""
        ...


class AfterForward:
    """A kind whose calls can be captured from the inputs and outputs of a forward pass."""

    def attach(self, module: nn.Module, watch: OnCall, unseen: OnUnseen | None = None) -> list[Any]:
        """Register a hook that sees inputs and outputs."""
        return [module.register_forward_hook(Hook(partial(self._after, watch)), prepend=True, with_kwargs=True)]

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> CallAndPoints | None:
        """Capture a forward pass; None if no gradient will arrive."""
        raise NotImplementedError

    @uncompiled
    def _after(self, watch: OnCall, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if torch.is_grad_enabled() and (captured := self.call(module, args, kwargs, output)) is not None:
            watch(*captured)


def point_of(output: Tensor) -> ErrorPoint:
    """Where in the backward pass the error of an output arrives.

    A view shares its history with its base, and an in-place activation after the layer rewrites the history of the
    view, while the base keeps the node of the layer.
    """
    base = output._base
    tensor = output if base is None or base.numel() != output.numel() else base
    assert tensor.grad_fn is not None
    return ErrorPoint(tensor.grad_fn, tensor.output_nr)


def argument(args: tuple, kwargs: dict, place: int, name: str) -> Any:
    """An argument of a forward pass, passed by position or by name; None where it is missing."""
    return args[place] if len(args) > place else kwargs.get(name)


def keep_input(x: Tensor, dtype: torch.dtype, owned: bool) -> Tensor:
    """An input as the layer uses it, which will not change until the backward pass.

    Autograd makes sure of that where it needs the input for the weight's gradient (``owned``); elsewhere it is copied.
    Under autocast the layer multiplies a cast of its input, in the precision of its output.
    """
    x = x.detach()
    if x.is_floating_point() and x.dtype is not dtype:
        return x.to(dtype)
    return x if owned else x.clone()
