r"""Descent as the released code does it: the gradient is formed by subtraction, and an ε stands beside its norm.

.. math:: W \leftarrow W - \eta\, G / (\|G\|_F + \varepsilon),\qquad \varepsilon = 2.2\cdot 10^{-16}

Once the masked weights are near ε, g_t − ḡ is rounding and the steps become short: training comes to a halt, at a norm
where the library's own ``descend`` goes on. K and Q, which have steps of their own, are pulled to zero by
ε(‖K‖² + ‖Q‖²) in the loss.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dualform.svm.dynamics.gradient_descent import (
    Descent,
    DescentSamples,
    KeyQueryFactors,
    WeightMatrices,
    logits,
    loss,
)
from dualform.svm.dynamics.output_heads import OutputHead

from .settings import DECAY, RATE


def descend_as_released(
    samples: DescentSamples,
    head: OutputHead,
    start: WeightMatrices | KeyQueryFactors,
    steps: int,
    *,
    watch: Iterable[int] = (),
) -> Descent:
    """The same as ``descend``, in the arithmetic of the released code."""
    wanted, now = sorted({*watch, steps}), start
    path: list[WeightMatrices] = []
    for step in range(steps + 1):
        W = now.product if isinstance(now, KeyQueryFactors) else now
        if step in wanted:
            path.append(W)
        if step == steps:
            break
        G = cancelling_gradient(samples, head, W)
        if isinstance(now, KeyQueryFactors):
            K, Q = G @ now.Q + 2 * DECAY * now.K, G.mT @ now.K + 2 * DECAY * now.Q
            now = KeyQueryFactors(now.K - RATE * shortened(K), now.Q - RATE * shortened(Q))
        else:
            now = now - RATE * shortened(G)
    norms, losses = [W.flatten(1).norm(dim=1) for W in path], [loss(samples, head, W) for W in path]
    return Descent(now, tuple(wanted), path, torch.stack(norms), torch.stack(losses))


def cancelling_gradient(samples: DescentSamples, head: OutputHead, W: WeightMatrices) -> WeightMatrices:
    """∇L with g_t − ḡ as a difference of numbers that become equal."""
    s = logits(samples, W).softmax(-1)
    o = torch.einsum("rnt,rntd->rnd", s, samples.tokens)
    g = torch.einsum("rntd,rnd->rnt", samples.tokens, head.gradient(o))
    parts = s * (g - (s * g).sum(-1, keepdim=True))
    slope = -torch.sigmoid(-samples.labels * head.value(o)) * samples.labels / samples.labels.shape[1]
    return torch.einsum("rn,rnt,rntd,rne->rde", slope, parts, samples.tokens, samples.queries)


def shortened(G: Tensor) -> Tensor:
    """Of length 1, or less where the gradient is as small as ε."""
    return G / (G.flatten(1).norm(dim=1)[:, None, None] + DECAY)
