"""Linear attention: a finite feature map in place of the exponential kernel (Katharopoulos et al. 2020)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .core import MultiHead, Padding, see_that_they_fit


def feature_map(x: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """elu(x) + 1: positive, so that the normaliser is."""
    return F.elu(x) + 1


def linear_attention(
    q: Float[Tensor, "b H n d"], k: Float[Tensor, "b H m d"], v: Float[Tensor, "b H m e"], *, padding: Padding = None,
    causal: bool = False,
) -> Float[Tensor, "b H n e"]:  # fmt: skip
    r"""Attention with the kernel :math:`\varphi(q)^\top\varphi(k)`, in time that grows with the length alone.

    .. math:: h_i = \frac{W\varphi(q_i)}{z^\top\varphi(q_i)},\quad
        W = \sum_j v_j\varphi(k_j)^\top,\quad z = \sum_j\varphi(k_j)

    ``q`` and ``k`` come before φ. Causal: the sums run over the tokens up to i.
    """
    see_that_they_fit(q, k, causal)
    q, k = feature_map(q), feature_map(k)
    if padding is not None:
        k = k.masked_fill(padding[:, None, :, None], 0.0)
    if not causal:
        state, z = k.mT @ v, k.sum(-2).unsqueeze(-1)  # d e, d 1
        return q @ state / (q @ z).clamp(min=TINY)
    pairs = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)  # n d e
    top = (q.unsqueeze(-2) @ pairs).squeeze(-2)
    return top / (q * k.cumsum(-2)).sum(-1, keepdim=True).clamp(min=TINY)


TINY = 1e-12
"""The least that a normaliser counts as: a query that sees no key gives zeros."""


class LinearAttention(MultiHead):
    """Multi-head linear attention with the feature map elu + 1."""

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """What each head gives, before the heads are merged."""
        q, k, v = self.projected(x, x if context is None else context)
        return F.dropout(linear_attention(q, k, v, padding=padding, causal=causal), self.dropout, self.training)
