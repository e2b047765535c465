"""Scalar functions of an attention layer's output, and their gradients."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class OutputHead(Protocol):
    """A function of the attention's output. All axes before the last are trials and samples."""

    def value(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n"]:
        """h(o)."""
        ...

    def gradient(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        """∇h(o)."""
        ...


@dataclass(frozen=True)
class LinearHead:
    """h(o) = vᵀo, with v fixed: a token's score does not depend on the others."""

    v: Float[Tensor, "r d"]

    def value(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n"]:
        """vᵀo."""
        return (o * self.v.unsqueeze(1)).sum(-1)

    def gradient(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        """v everywhere."""
        return self.v.unsqueeze(1).expand_as(o)


@dataclass(frozen=True)
class ReluHead:
    """h(o) = 1ᵀ ReLU(Vᵀo): it may prefer a mixture of tokens."""

    V: Float[Tensor, "r d k"]

    def value(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n"]:
        """1ᵀ ReLU(Vᵀo)."""
        return (o @ self.V).relu().sum(-1)

    def gradient(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        """The columns of V that are active."""
        return (o @ self.V > 0).to(o.dtype) @ self.V.mT


@dataclass(frozen=True)
class QuadraticHead:
    """h(o) = vᵀo − λ‖o‖²: the larger λ, the more tokens are mixed."""

    v: Float[Tensor, "r d"]
    weight: float

    def value(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n"]:
        """vᵀo − λ‖o‖²."""
        return (o * self.v.unsqueeze(1)).sum(-1) - self.weight * o.square().sum(-1)

    def gradient(self, o: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        """v − 2λo."""
        return self.v.unsqueeze(1) - 2 * self.weight * o
