"""The data types that several folders share: layers, parameters, transitions, marks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

DType = Literal["float16", "float32", "float64"]
Keep = Literal["slots", "keys", "ledger", "keys+ledger", "nothing"]
Score = Literal["weight", "abs", "contribution"]
Order = Literal["largest", "smallest", "magnitude"]
Per = Literal["example", "visit", "slot"]


@dataclass(frozen=True)
class ClassNames:
    """The names of the classes, and the noted columns whose whole numbers are classes. Tables for people use them."""

    names: tuple[str, ...] = ()
    columns: frozenset[str] = frozenset(["label"])

    def named(self, column: str | None, value: Any) -> Any:
        """The name of a class if a value of a column is one, else the value itself."""
        is_class = column in self.columns and isinstance(value, int) and not isinstance(value, bool)
        return self.names[value] if is_class and 0 <= value < len(self.names) else value

    def among(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of several columns, classes by their names."""
        return {column: self.named(column, value) for column, value in values.items()}


class Transition(NamedTuple):
    r"""One optimiser step of one parameter, as a linear map with scalar coefficients.

    .. math:: \begin{bmatrix} W_s \\ M_s \end{bmatrix} =
        \begin{bmatrix} ww & wm & wg \\ mw & mm & mg \end{bmatrix}
        \begin{bmatrix} W_{s-1} \\ M_{s-1} \\ g_s \end{bmatrix} +
        \begin{bmatrix} wp \\ mp \end{bmatrix} P_s (pw\, W_{s-1} + pm\, M_{s-1} + pg\, g_s)

    W is the parameter, M its buffer in the optimiser, g the gradient as the optimiser finds it. P is a linear map that
    all examples share (Adam: a division entry by entry); the SGD family has none.
    """

    ww: float = 1.0
    wm: float = 0.0
    mw: float = 0.0
    mm: float = 1.0
    wg: float = 0.0
    mg: float = 0.0
    wp: float = 0.0
    mp: float = 0.0
    pw: float = 0.0
    pm: float = 0.0
    pg: float = 0.0


@dataclass(frozen=True)
class ModuleInfo:
    """One use of a recorded linear map: its name, its biases, and the path of the module that applies it."""

    name: str
    biases: tuple[str, ...]
    path: str


@dataclass(frozen=True)
class Piece:
    """The columns that a parameter has in the matrix of a layer; ``transposed`` if it holds their transpose."""

    parameter: str
    begin: int
    end: int
    transposed: bool = False


@dataclass(frozen=True)
class LayerInfo:
    """A recorded linear map: a matrix, the parameters it is made of, and all modules that use it.

    A key has ``d_in`` numbers, an error ``d_out``. A grouped convolution has several ``parts``: part p of the error
    belongs to part p of the key, and the matrix is (d_out, d_in / parts). The keys of an embedding are ``indexed``:
    each is the index of the only entry that is 1.
    """

    name: str
    kind: str
    pieces: tuple[Piece, ...]
    d_in: int
    d_out: int
    modules: tuple[ModuleInfo, ...]
    keep: Keep
    batch_dim: int = 0
    parts: int = 1
    indexed: bool = False

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The names of the parameters that make up the matrix."""
        return tuple(piece.parameter for piece in self.pieces)

    @cached_property
    def biases(self) -> tuple[str, ...]:
        """The names of its biases."""
        return tuple(dict.fromkeys(bias for module in self.modules for bias in module.biases))

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its weights and its biases."""
        return self.weights + self.biases

    @property
    def width(self) -> int:
        """The number of columns of the matrix."""
        return self.d_in // self.parts

    @property
    def in_ledger(self) -> bool:
        """Whether a ledger explains its parameters."""
        return self.keep in ("ledger", "keys+ledger")

    @property
    def key_size(self) -> int:
        """The number of stored numbers of a key."""
        return 1 if self.indexed else self.d_in


@dataclass(frozen=True)
class ParameterInfo:
    """A tensor of the model: a recorded weight or bias, one that only a ledger explains, or a part of the rest.

    The rest is stored as snapshots; ``reason`` says why a tensor belongs to it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    rule: str | None
    reason: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        """The number of its entries."""
        return math.prod(self.shape)

    @property
    def by_slots(self) -> bool:
        """Whether it can be rebuilt from slots."""
        return self.kind in ("weight", "bias")


@dataclass(frozen=True)
class ParameterSplit:
    """A parameter as a sum, in float64: what is left of the initial weights, and what each group put into it."""

    initial: Float[Tensor, "..."]
    groups: Float[Tensor, "..."]

    @property
    def total(self) -> Float[Tensor, "..."]:
        """The parameter itself."""
        return self.initial + self.groups.sum(0)


@dataclass(frozen=True)
class Ended:
    """How a recording ended after a complete step, and the exception if it was interrupted."""

    how: Literal["closed", "interrupted", "unknown"]
    step: int
    by: str = ""


@dataclass(frozen=True)
class Mark:
    """An event during recording that the memory does not explain."""

    kind: str
    name: str
    first_step: int
    times: int
    message: str
