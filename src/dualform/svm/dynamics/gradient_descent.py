r"""Gradient descent on one attention layer, and where its weights converge (Tarzanagh et al. 2023, arXiv 2308.16898).

.. math:: f(X, z) = h\big(X^\top \mathrm{softmax}(X W z)\big),\qquad L(W) = \frac1n\sum_i \log(1 + e^{-Y_i f(X_i, z_i)})

With s the softmax, o its output and g_t = ∇h(o)ᵀx_t, the gradient is a sum over tokens whose coefficients add up to 0:

.. math:: \nabla L = \frac1n\sum_i \ell'(Y_i f_i) Y_i \sum_t s_{it}(g_{it} - \bar g_i)\, x_{it} z_i^\top

As the softmax saturates, s vanishes for all tokens but one, α, and so does g_α − ḡ. Here the coefficient of α is minus
the sum of the others, whose probabilities are stored as logarithms and divided by the largest of them. So the direction
stays accurate long after the gradient itself would be rounding noise. All trials run as one batch of tensors.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.errors import SizeError

from .output_heads import OutputHead

WeightMatrices = Float[Tensor, "r d d"]


class DescentSamples(NamedTuple):
    """Trials (axis r) of n samples with T tokens, a query and a label ±1 each."""

    tokens: Float[Tensor, "r n T d"]
    queries: Float[Tensor, "r n d"]
    labels: Float[Tensor, "r n"]


class KeyQueryFactors(NamedTuple):
    """W = K Qᵀ."""

    K: Float[Tensor, "r d m"]
    Q: Float[Tensor, "r d m"]

    @property
    def product(self) -> WeightMatrices:
        """W."""
        return self.K @ self.Q.mT


@dataclass(frozen=True)
class Descent:
    """The result of gradient descent: the final weights, and W, its norm and the loss at the recorded steps."""

    end: WeightMatrices | KeyQueryFactors
    steps: tuple[int, ...]
    path: list[WeightMatrices] = field(repr=False)
    """W at each of these steps."""
    norms: Float[Tensor, "s r"]
    losses: Float[Tensor, "s r"]

    @property
    def W(self) -> WeightMatrices:
        """The weights at the end."""
        return self.end.product if isinstance(self.end, KeyQueryFactors) else self.end


def logits(samples: DescentSamples, W: WeightMatrices) -> Float[Tensor, "r n T"]:
    """x_tᵀ W z."""
    return torch.einsum("rntd,rde,rne->rnt", samples.tokens, W, samples.queries)


def selected(samples: DescentSamples, W: WeightMatrices) -> Int[Tensor, "r n"]:
    """The token that each sample attends to most."""
    return logits(samples, W).argmax(-1)


def loss(samples: DescentSamples, head: OutputHead, W: WeightMatrices) -> Float[Tensor, " r"]:
    """The mean logistic loss of each trial."""
    o = torch.einsum("rnt,rntd->rnd", logits(samples, W).softmax(-1), samples.tokens)
    return torch.nn.functional.softplus(-samples.labels * head.value(o)).mean(1)


def gradient(
    samples: DescentSamples, head: OutputHead, W: WeightMatrices
) -> tuple[WeightMatrices, Float[Tensor, " r"]]:
    """The gradient of the loss as (G, log c), where the gradient is c·G: a form that avoids cancellation."""
    log_s = logits(samples, W).log_softmax(-1)
    s = log_s.exp()
    o = torch.einsum("rnt,rntd->rnd", s, samples.tokens)
    g = torch.einsum("rntd,rnd->rnt", samples.tokens, head.gradient(o))
    best = log_s.argmax(-1, keepdim=True)
    beyond = g - g.gather(-1, best)  # g_t − g_α
    apart = beyond - (s * beyond).sum(-1, keepdim=True)  # g_t − ḡ
    unselected = torch.ones_like(log_s, dtype=torch.bool).scatter(-1, best, False)
    largest = log_s.masked_fill(~unselected, -torch.inf).amax((1, 2))
    parts = torch.where(unselected, (log_s - largest[:, None, None]).exp() * apart, 0.0)
    parts = parts.scatter(-1, best, -parts.sum(-1, keepdim=True))
    slope = -torch.sigmoid(-samples.labels * head.value(o)) * samples.labels / samples.labels.shape[1]
    direction = torch.einsum("rn,rnt,rntd,rne->rde", slope, parts, samples.tokens, samples.queries)
    return direction, largest


def descend(
    samples: DescentSamples,
    head: OutputHead,
    start: WeightMatrices | KeyQueryFactors,
    steps: int,
    *,
    rate: float = 0.1,
    normalised: bool = True,
    decay: float = 0.0,
    watch: Iterable[int] = (),
) -> Descent:
    """Full-batch gradient descent on W, or on K and Q, whichever ``start`` holds.

    ``normalised``: each matrix moves by a step of norm ``rate`` against its gradient. ``decay`` times the squared norm
    of the matrices is added to the loss; the paper's code trains K and Q with 2.2e-16, which matters once the softmax
    is saturated. ``watch``: steps to record.
    """
    _check_shapes(samples, start)
    wanted = sorted({*watch, steps})
    path, norms, losses = [], [], []
    now = start
    for step in range(steps + 1):
        W = now.product if isinstance(now, KeyQueryFactors) else now
        if step in wanted:
            path.append(W)
            norms.append(W.flatten(1).norm(dim=1))
            losses.append(loss(samples, head, W))
        if step == steps:
            break
        G, log_scale = gradient(samples, head, W)
        move = _unit_norm if normalised else lambda matrix, c=log_scale: matrix * c.exp()[:, None, None]
        shrink = 2 * decay * (-log_scale).clamp(max=600).exp()[:, None, None]
        if isinstance(now, KeyQueryFactors):
            K, Q = G @ now.Q + shrink * now.K, G.mT @ now.K + shrink * now.Q
            now = KeyQueryFactors(now.K - rate * move(K), now.Q - rate * move(Q))
        else:
            now = now - rate * move(G + shrink * now)
    return Descent(now, tuple(wanted), path, torch.stack(norms), torch.stack(losses))


def _unit_norm(G: Float[Tensor, "r d m"]) -> Float[Tensor, "r d m"]:
    norm = G.flatten(1).norm(dim=1)[:, None, None]
    return G / torch.where(norm > 0, norm, 1.0)


def regularisation_path(
    samples: DescentSamples,
    head: OutputHead,
    radii: Iterable[float],
    starts: Iterable[WeightMatrices | KeyQueryFactors],
    *,
    steps: int = 2000,
) -> list[WeightMatrices]:
    r"""The W of lowest loss under a norm constraint, for each radius R: the best that any start leads to.

    The constraint is :math:`\|W\|_F \le R` for W, and :math:`\|K\|_F^2 + \|Q\|_F^2 \le 2R` for its factors, which
    bounds the nuclear norm of K Qᵀ by R. If a separation is feasible, the loss falls along its ray, so the minimum lies
    on the sphere; it is found by descent on the sphere with decreasing steps.
    """
    starts, path = list(starts), []
    for radius in radii:
        best, lowest = None, None
        for start in starts:
            W = _on_sphere(samples, head, start, radius, steps)
            reached = loss(samples, head, W)
            better = torch.ones_like(reached, dtype=torch.bool) if lowest is None else reached < lowest
            best = W if best is None else torch.where(better[:, None, None], W, best)
            lowest = reached if lowest is None else torch.where(better, reached, lowest)
        if best is None:
            raise SizeError("a regularisation path needs a start: give at least one W, or one pair of factors.")
        path.append(best)
    return path


def _on_sphere(
    samples: DescentSamples, head: OutputHead, start: WeightMatrices | KeyQueryFactors, radius: float, steps: int
) -> WeightMatrices:
    """Descent on a sphere. Factors are concatenated to (r, d, 2m), on the sphere of radius √(2R)."""
    factors, size = isinstance(start, KeyQueryFactors), radius
    now = start
    if isinstance(start, KeyQueryFactors):
        now, size = torch.cat([start.K, start.Q], -1), math.sqrt(2 * radius)
    assert isinstance(now, Tensor)
    now = size * _unit_norm(now)
    for step in range(steps):
        K, Q = now.chunk(2, -1) if factors else (now, now)
        G, _ = gradient(samples, head, K @ Q.mT if factors else now)
        way = torch.cat([G @ Q, G.mT @ K], -1) if factors else G
        now = size * _unit_norm(now - size * 0.5 / (1 + step) ** 0.75 * _unit_norm(way))
    if not factors:
        return now
    K, Q = now.chunk(2, -1)
    return K @ Q.mT


def favours_all(
    samples: DescentSamples, head: OutputHead, W: WeightMatrices, chosen: Int[Tensor, "r n"]
) -> Bool[Tensor, " r"]:
    """Whether a gradient step raises the chosen token's logit more than every other's, in all samples of a trial."""
    G, _ = gradient(samples, head, W)
    rise = -logits(samples, G)
    gain = rise.gather(-1, chosen.unsqueeze(-1)) - rise
    unchosen = torch.ones_like(gain, dtype=torch.bool).scatter(-1, chosen.unsqueeze(-1), False)
    return ((gain > 0) | ~unchosen).all(-1).all(-1)


def cosine(a: WeightMatrices, b: WeightMatrices) -> Float[Tensor, " r"]:
    """⟨A, B⟩ / (‖A‖ ‖B‖), trial by trial."""
    return torch.nn.functional.cosine_similarity(a.flatten(1), b.flatten(1), dim=1)


def _check_shapes(samples: DescentSamples, start: WeightMatrices | KeyQueryFactors) -> None:
    trials, n, _, d = samples.tokens.shape
    matrices = start if isinstance(start, KeyQueryFactors) else (start,)
    if samples.queries.shape != (trials, n, d) or samples.labels.shape != (trials, n):
        raise SizeError(
            f"tokens {tuple(samples.tokens.shape)} want queries {(trials, n, d)} and labels {(trials, n)}, but these "
            f"are {tuple(samples.queries.shape)} and {tuple(samples.labels.shape)}."
        )
    if any(matrix.shape[:2] != (trials, d) for matrix in matrices):
        raise SizeError(
            f"weights {[tuple(matrix.shape) for matrix in matrices]} do not fit {trials} trials of width {d}."
        )
