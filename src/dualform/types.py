"""The nouns that cross folders."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

DType = Literal["float16", "float32", "float64"]
Keep = Literal["slots", "keys", "nothing"]
Score = Literal["weight", "abs", "contribution"]
Order = Literal["largest", "smallest", "magnitude"]


class Transition(NamedTuple):
    r"""What one optimiser step does to one parameter, given its gradient: linear, with scalar coefficients.

    .. math:: \begin{bmatrix} W_s \\ M_s \end{bmatrix} =
        \begin{bmatrix} ww & wm \\ mw & mm \end{bmatrix} \begin{bmatrix} W_{s-1} \\ M_{s-1} \end{bmatrix} +
        \begin{bmatrix} wg \\ mg \end{bmatrix} g_s

    W is the parameter, M the one buffer that the optimiser keeps of it, g the gradient as the optimiser finds it.
    """

    ww: float = 1.0
    wm: float = 0.0
    mw: float = 0.0
    mm: float = 1.0
    wg: float = 0.0
    mg: float = 0.0


@dataclass(frozen=True)
class ModuleInfo:
    """One module that applies a recorded linear map: its name, and its bias (a parameter's name) if it has one."""

    name: str
    bias: str | None


@dataclass(frozen=True)
class LayerInfo:
    """One recorded linear map: a weight and all modules that use it (several where weights are tied)."""

    name: str
    weight: str
    d_in: int
    d_out: int
    modules: tuple[ModuleInfo, ...]
    keep: Keep
    batch_dim: int = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its weight and its biases."""
        return tuple(dict.fromkeys([self.weight, *(module.bias for module in self.modules if module.bias)]))

    @property
    def numbers_a_row(self) -> int:
        """What is kept of one row that goes through it: its input, and its error if errors are kept."""
        return self.d_in + (self.d_out if self.keep == "slots" else 0)


@dataclass(frozen=True)
class ParameterInfo:
    """One tensor of the model: a recorded weight or bias, or a part of the rest (kept as snapshots)."""

    name: str
    kind: Literal["weight", "bias", "rest"]
    shape: tuple[int, ...]
    dtype: str
    rule: str | None


@dataclass(frozen=True)
class Mark:
    """Something that was noticed while recording and that the memory does not explain."""

    kind: str
    name: str
    first_step: int
    times: int
    message: str
