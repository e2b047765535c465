r"""How close a query-key matrix is to the one that separates what it selects, and how close chance alone would be.

.. math:: \text{efficiency} = \frac{\mu(W)}{\|W\|}\,\|W_{mm}\| \in (0, 1],\qquad \mu(W) = \min_{i,t}\,(x_{\alpha_i} - x_{it})^\top W z_i

The margin per norm of W, beside the largest there is. The selections of many queries pin W down, so that an untrained
matrix, too, has a high cosine with the separating matrix of what *it* selects; its efficiency is low. So a cosine says
something beside that of random matrices only. Reference: Tarzanagh et al. (2023), arXiv 2308.16898.
"""  # noqa: E501

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..separation import Separation


class Bounds(NamedTuple):
    """What a number is at least and at most, where a problem is not solved to the end."""

    low: float
    high: float

    def __str__(self) -> str:
        low, high = (f"{each:.3g}" for each in self)
        return low if low == high else f"{low}–{high}"


class Spectrum(NamedTuple):
    """Singular values of a matrix, the largest first.

    ``rank`` counts those above 1e-3 of the largest, ``effective`` is exp of the entropy of their shares, ``ratio`` the
    nuclear norm beside the Frobenius norm: 1 for rank one, √rank where all are alike.
    """

    singular: Float[Tensor, " r"]
    rank: int
    effective: float
    ratio: float

    @classmethod
    def of(cls, W: Float[Tensor, "x z"]) -> "Spectrum":
        """Of a matrix."""
        singular = torch.linalg.svdvals(W)
        shares = singular / singular.sum().clamp(min=1e-300)
        ratio = float(singular.sum() / singular.norm().clamp(min=1e-300))
        rank = int((singular > 1e-3 * singular[0]).sum())
        return cls(singular, rank, float(torch.special.entr(shares).sum().exp()), ratio)


@dataclass(frozen=True)
class Alignment:
    """A matrix beside its separating matrix: in one norm, which the separation says.

    ``cosine`` is that of both as they are; ``inside`` of the part that these tokens and queries can see (``seen`` says
    how much of W that is; neither is a number where it was not found); ``moved`` of what training added to the first
    weights, if those are known.
    """

    separation: Separation
    efficiency: Bounds
    cosine: float
    inside: float
    seen: float
    moved: float | None = None


@dataclass(frozen=True)
class Null:
    """The same for random matrices on the same inputs, each at what it selects itself."""

    cosines: Float[Tensor, " r"]
    efficiencies: Float[Tensor, " r"]
    left_out: int = 0
    """Random matrices whose separation was not solved in time."""

    @property
    def cosine(self) -> float:
        """The mean cosine; not a number where there are none."""
        return float(self.cosines.mean()) if len(self.cosines) else math.nan

    @property
    def efficiency(self) -> float:
        """The mean efficiency."""
        return float(self.efficiencies.mean()) if len(self.efficiencies) else math.nan

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest cosine."""
        if not len(self.cosines):
            return (math.nan, math.nan)
        return float(self.cosines.min()), float(self.cosines.max())


def align(
    W: Float[Tensor, "x z"], found: Separation, part: Float[Tensor, "x z"] | None, start: Float[Tensor, "x z"] | None
) -> Alignment | None:
    """A matrix beside a separation; ``part`` is what the tokens can see of it. None where nothing separates them."""
    if not found.feasible:
        return None
    cosine, inside, seen = cosine_of(W, found.W), math.nan, math.nan
    if part is not None:
        inside, seen = cosine_of(part, found.W), min(1.0, float(part.norm() / W.norm().clamp(min=1e-300)))
    moved = None if start is None else cosine_of(W - start, found.W)
    return Alignment(found, efficiency(W, found), cosine, inside, seen, moved)


def efficiency(W: Float[Tensor, "x z"], found: Separation) -> Bounds:
    """The margin per norm of W, beside the largest. W itself separates, which also bounds the optimum."""
    size = float(W.norm() if found.norm == "frobenius" else torch.linalg.matrix_norm(W, "nuc"))
    each = float(found.problem.margins(W).min()) / size if size else 0.0
    high = min(1.0, max(0.0, each * found.upper))
    return Bounds(min(high, max(0.0, each * found.lower)), high)


def cosine_of(a: Float[Tensor, "x z"], b: Float[Tensor, "x z"]) -> float:
    """⟨A, B⟩ / (‖A‖ ‖B‖); 0 where one of them is."""
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-300))


def random_like(W: Float[Tensor, "x z"], rank: int, seed: int) -> Float[Tensor, "x z"]:
    """An untrained matrix of a shape and rank: the product of two that are drawn from a normal distribution."""
    made = torch.Generator().manual_seed(seed)
    x, z = W.shape
    if rank >= min(x, z):
        return torch.randn(x, z, generator=made, dtype=W.dtype)
    left, right = (torch.randn(rank, size, generator=made, dtype=W.dtype) for size in (x, z))
    return left.mT @ right


def untied(logits: Float[Tensor, "c m"]) -> Int[Tensor, " u"]:
    """Queries with one best token: where two of them tie, as where both are the same, nothing is selected."""
    best = logits.topk(2, 1).values
    apart, spread = best[:, 0] - best[:, 1], best[:, 0] - logits.masked_fill(logits.isinf(), torch.inf).amin(1)
    return ((apart > 1e-12 * spread) & (apart > 1e-14 * best[:, 0].abs())).nonzero().squeeze(1)
