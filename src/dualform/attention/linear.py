"""Linear attention: a finite feature map in place of the exponential kernel (Katharopoulos et al. 2020)."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .expansion import Expansion, feature_map, ratio
from .heads import MultiHead
from .norm import KeyNorm, statistics_of
from .pairs import Pairs

CHUNK = 64
"""Tokens that are written out at once where it is causal."""


@dataclass(frozen=True)
class Linear:
    r"""Weights in proportion to :math:`\varphi(q_i)^\top\varphi(k_j)`, φ = elu + 1, in time that grows with the length
    alone.

    With a normalisation φ sees normalised queries and keys. Where that is causal each query has keys of its own, and
    time grows with the square of the length.
    """

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """Through sums of key times value. There are no weights to drop, so outputs are dropped."""
        if norm is not None and pairs.causal:
            return self.expansion((), q, pairs, norm).outputs(dropout)
        k = pairs.k
        if norm is not None:
            statistics = statistics_of(pairs)
            q, k = norm(q, statistics), norm(k, statistics)
        q, k = feature_map(q), feature_map(k)
        if pairs.empty is not None:
            k = k.masked_fill(pairs.empty[:, None, :, None], 0.0)
        if not pairs.causal:
            found = through_state(q, k, pairs.v)
        elif pairs.own is None:
            found = through_prefixes(q, k, pairs.v)
        else:
            found = through_windows(q, k, pairs)
        return F.dropout(found, dropout, dropout > 0)

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """With normalised queries and keys; where it is causal, each query has keys of its own."""
        k = pairs.keys
        if norm is not None:
            statistics = statistics_of(pairs)
            q = norm(q, statistics)
            if pairs.causal:
                k, statistics = k.unsqueeze(-3), (statistics[0].unsqueeze(-2), statistics[1].unsqueeze(-2))
            k = norm(k, statistics)
        return Expansion(heads, "elu", q, k, pairs.hidden(q.shape[-2]), pairs)


def through_state(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b m d"], v: Float[Tensor, "*b m e"]
) -> Float[Tensor, "*b n e"]:
    r"""The primal layer itself, after φ: every query sees every key.

    .. math:: h_i = \frac{W\varphi(q_i)}{z^\top\varphi(q_i)},\quad
        W = \sum_j v_j\varphi(k_j)^\top,\quad z = \sum_j\varphi(k_j)
    """
    return ratio(q @ (k.mT @ v), q @ k.sum(-2).unsqueeze(-1))


def through_prefixes(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b n d"], v: Float[Tensor, "*b n e"]
) -> Float[Tensor, "*b n e"]:
    """Each query sees the keys up to its own: chunks before its own as sums, its own chunk written out."""
    length = q.shape[-2]
    q, k, v = (blocks(each, CHUNK) for each in (q, k, v))  # c chunk d
    state, z = (each[..., :-1, :, :] for each in running_sums(k, v))
    near = (q @ k.mT).tril()
    found = ratio(q @ state + near @ v, q @ z + near.sum(-1, keepdim=True))
    return found.flatten(-3, -2)[..., :length, :]


def through_windows(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b w d"], pairs: Pairs) -> Float[Tensor, "*b n e"]:
    """Each query sees the windows that are complete by then, and its own token."""
    assert pairs.own is not None
    own_k, own_v = pairs.own
    length, scale = q.shape[-2], pairs.windows.scale
    mine = (q * feature_map(own_k)).sum(-1, keepdim=True)
    late = blocks(F.pad(q, (0, 0, 1, 0)), scale)  # query i stands behind (i + 1) // scale windows
    seen = (each[..., : late.shape[-3], :, :] for each in running_sums(k.unsqueeze(-2), pairs.v.unsqueeze(-2)))
    top, bottom = ((late @ each).flatten(-3, -2)[..., 1 : length + 1, :] for each in seen)
    return ratio(top + mine * own_v, bottom + mine)


def running_sums(
    k: Float[Tensor, "*b c s d"], v: Float[Tensor, "*b c s e"]
) -> tuple[Float[Tensor, "*b c+1 d e"], Float[Tensor, "*b c+1 d 1"]]:
    """State and normaliser before each block of keys and, last, behind all of them."""
    state, z = (k.mT @ v).cumsum(-3), k.sum(-2).unsqueeze(-1).cumsum(-3)
    front = (0, 0, 0, 0, 1, 0)
    return F.pad(state, front), F.pad(z, front)


def blocks(x: Float[Tensor, "*b n d"], size: int) -> Float[Tensor, "*b c s d"]:
    """Cut a sequence into blocks, the last one filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


class LinearAttention(MultiHead):
    """Multi-head linear attention with the feature map elu + 1."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(width, heads, Linear(), dropout=dropout, bias=bias)
