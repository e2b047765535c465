r"""How close a query-key matrix is to the one that separates its selections, compared with random matrices.

.. math:: \text{efficiency} = \frac{\mu(W)}{\|W\|}\,\|W_{mm}\| \in (0, 1],\qquad \mu(W) = \min_{i,t}\,(x_{\alpha_i} - x_{it})^\top W z_i

The efficiency is the margin per norm of W, divided by the largest possible. The selections of many queries constrain W
so much that an untrained matrix, too, has a high cosine with the separating matrix of *its* selections, although its
efficiency is low. So a cosine only means something when compared with that of random matrices. Reference: Tarzanagh et
al. (2023), arXiv 2308.16898.
"""  # noqa: E501

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..separation import Separation


class Bounds(NamedTuple):
    """Lower and upper bound of a number that comes from a problem solved up to a gap."""

    low: float
    high: float

    def __str__(self) -> str:
        low, high = (f"{bound:.3g}" for bound in self)
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
        """The spectrum of a matrix."""
        singular = torch.linalg.svdvals(W)
        shares = singular / singular.sum().clamp(min=1e-300)
        ratio = float(singular.sum() / singular.norm().clamp(min=1e-300))
        rank = int((singular > 1e-3 * singular[0]).sum())
        return cls(singular, rank, float(torch.special.entr(shares).sum().exp()), ratio)


@dataclass(frozen=True)
class Alignment:
    """A matrix compared with its separating matrix, in the norm of the separation.

    ``cosine`` compares the two matrices. ``inside`` is the cosine of the part of W that these tokens and queries depend
    on, and ``seen`` the relative norm of that part (both NaN where the part was not found). ``moved`` is the cosine of
    the change by training, if the initial weights are known.
    """

    separation: Separation
    efficiency: Bounds
    cosine: float
    inside: float
    seen: float
    moved: float | None = None


@dataclass(frozen=True)
class Null:
    """Cosines and efficiencies of random matrices on the same inputs, each for its own selections."""

    cosines: Float[Tensor, " r"]
    efficiencies: Float[Tensor, " r"]
    left_out: int = 0
    """The number of random matrices whose separation was not solved in time."""

    @property
    def cosine(self) -> float:
        """The mean cosine; NaN without random matrices."""
        return float(self.cosines.mean()) if len(self.cosines) else math.nan

    @property
    def efficiency(self) -> float:
        """The mean efficiency; NaN without random matrices."""
        return float(self.efficiencies.mean()) if len(self.efficiencies) else math.nan

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest cosine."""
        if not len(self.cosines):
            return (math.nan, math.nan)
        return float(self.cosines.min()), float(self.cosines.max())


def align(
    W: Float[Tensor, "x z"],
    separation: Separation,
    part: Float[Tensor, "x z"] | None,
    start: Float[Tensor, "x z"] | None,
) -> Alignment | None:
    """Compare a matrix with a separation; ``part`` is its projection onto the tokens' span. None if infeasible."""
    if not separation.feasible:
        return None
    cosine, inside, share_seen = cosine_of(W, separation.W), math.nan, math.nan
    if part is not None:
        inside, share_seen = cosine_of(part, separation.W), min(1.0, float(part.norm() / W.norm().clamp(min=1e-300)))
    moved = None if start is None else cosine_of(W - start, separation.W)
    return Alignment(separation, efficiency(W, separation), cosine, inside, share_seen, moved)


def efficiency(W: Float[Tensor, "x z"], separation: Separation) -> Bounds:
    """The margin per norm of W, divided by the largest possible one, which is known up to the separation's gap."""
    size = float(W.norm() if separation.norm == "frobenius" else torch.linalg.matrix_norm(W, "nuc"))
    margin = float(separation.problem.margins(W).min()) / size if size else 0.0
    high = min(1.0, max(0.0, margin * separation.upper))
    return Bounds(min(high, max(0.0, margin * separation.lower)), high)


def cosine_of(a: Float[Tensor, "x z"], b: Float[Tensor, "x z"]) -> float:
    """⟨A, B⟩ / (‖A‖ ‖B‖); 0 where A or B is 0."""
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-300))


def random_like(W: Float[Tensor, "x z"], rank: int, seed: int) -> Float[Tensor, "x z"]:
    """A random matrix of the shape of W: a product of two normally distributed matrices, which gives it the rank."""
    generator = torch.Generator().manual_seed(seed)
    x, z = W.shape
    if rank >= min(x, z):
        return torch.randn(x, z, generator=generator, dtype=W.dtype)
    left, right = (torch.randn(rank, size, generator=generator, dtype=W.dtype) for size in (x, z))
    return left.mT @ right


def untied_queries(logits: Float[Tensor, "c m"]) -> Int[Tensor, " u"]:
    """The queries with a unique best token. Where two tokens tie, for example equal ones, nothing is selected."""
    best = logits.topk(2, 1).values
    apart, spread = best[:, 0] - best[:, 1], best[:, 0] - logits.masked_fill(logits.isinf(), torch.inf).amin(1)
    return ((apart > 1e-12 * spread) & (apart > 1e-14 * best[:, 0].abs())).nonzero().squeeze(1)
