"""Linear attention: a finite feature map in place of the exponential kernel (Katharopoulos et al. 2020)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .expansion import Expansion, feature_map, products, query_features, ratio
from .heads import MultiHead
from .masked_attention import wide
from .norm import KeyNorm, statistics_of
from .pairs import Pairs

CHUNK = 64
"""The number of tokens per block in causal attention."""


@dataclass(frozen=True)
class LinearKernel:
    r"""Weights in proportion to :math:`\varphi(q_i)^\top\varphi(k_j)`, φ = elu + 1, in time linear in the length.

    With a normalisation, φ is applied to normalised queries and keys. If that is causal, each query has keys of its
    own, and time grows with the square of the length.
    """

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """The outputs from sums of keys times values. There are no weights, so dropout is applied to the outputs."""
        with torch.autocast(q.device.type, enabled=False):  # sums over all tokens need float32
            output = self._outputs(wide(q), pairs, norm).to(pairs.v.dtype)
        return F.dropout(output, dropout, dropout > 0)

    def _outputs(self, q: Tensor, pairs: Pairs, norm: KeyNorm | None) -> Tensor:
        if norm is not None and pairs.causal:
            return query_by_query(q, pairs, norm)
        k, v = wide(pairs.k), wide(pairs.v)
        if norm is not None:
            statistics = statistics_of(pairs)
            q, k = norm(q, statistics), norm(k, statistics)
        q, k = query_features(q), feature_map(k)
        if pairs.empty is not None:
            k = k.masked_fill(pairs.empty[:, None, :, None], 0.0)
        if not pairs.causal:
            return through_state(q, k, v)
        return through_prefixes(q, k, v) if pairs.own is None else through_windows(q, k, v, pairs)

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """The expansion with normalised queries and keys; if causal, each query has keys of its own."""
        k = pairs.keys
        if norm is not None:
            statistics = statistics_of(pairs)
            q, k = norm(q, statistics), norm.keys(k, statistics)
        return Expansion(heads, "elu", q, k, pairs.hidden(q.shape[-2]), pairs)


def through_state(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b m d"], v: Float[Tensor, "*b m e"]
) -> Float[Tensor, "*b n e"]:
    r"""The primal layer itself, after φ, where every query sees every key.

    .. math:: h_i = \frac{W\varphi(q_i)}{z^\top\varphi(q_i)},\quad
        W = \sum_j v_j\varphi(k_j)^\top,\quad z = \sum_j\varphi(k_j)
    """
    return ratio(q @ (k.mT @ v), q @ k.sum(-2).unsqueeze(-1))


def through_prefixes(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b n d"], v: Float[Tensor, "*b n e"]
) -> Float[Tensor, "*b n e"]:
    """Each query sees the keys up to its own: earlier blocks as running sums, its own block explicitly."""
    length = q.shape[-2]
    q, k, v = (blocks(rows, CHUNK) for rows in (q, k, v))  # c chunk d
    state, z = (sums[..., :-1, :, :] for sums in running_sums(k, v))
    near = (q @ k.mT).tril()
    output = ratio(q @ state + near @ v, q @ z + near.sum(-1, keepdim=True))
    return output.flatten(-3, -2)[..., :length, :]


def through_windows(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b w d"], v: Float[Tensor, "*b w e"], pairs: Pairs
) -> Float[Tensor, "*b n e"]:
    """Each query sees the windows that are complete at its position, and its own token."""
    assert pairs.own is not None
    own_k, own_v = (wide(rows) for rows in pairs.own)
    length, scale = q.shape[-2], pairs.windows.scale
    own_weight = (q * feature_map(own_k)).sum(-1, keepdim=True)
    late = blocks(F.pad(q, (0, 0, 1, 0)), scale)  # (i + 1) // scale windows are complete at query i
    prefixes = (sums[..., : late.shape[-3], :, :] for sums in running_sums(k.unsqueeze(-2), v.unsqueeze(-2)))
    top, bottom = ((late @ prefix).flatten(-3, -2)[..., 1 : length + 1, :] for prefix in prefixes)
    return ratio(top + own_weight * own_v, bottom + own_weight)


def query_by_query(q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm) -> Float[Tensor, "b h n e"]:
    """Causal and normalised: each query has keys of its own. Blocks are recomputed in the backward pass."""
    mean, variance = statistics_of(pairs)
    k, v, hidden = wide(pairs.keys), wide(pairs.values), pairs.hidden(q.shape[-2])
    assert hidden is not None

    def some(q: Tensor, mean: Tensor, variance: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        statistics = mean, variance
        features = feature_map(norm.keys(k, statistics))
        scores = products(query_features(norm(q, statistics)), features).masked_fill(hidden, 0.0)
        return ratio(scores @ v, scores.sum(-1, keepdim=True))

    outputs = []
    for first in range(0, q.shape[-2], CHUNK):
        part = slice(first, first + CHUNK)
        block_inputs = q[..., part, :], mean[..., part, :], variance[..., part, :], k, v, hidden[..., part, :]
        again = checkpoint(some, *block_inputs, use_reentrant=False) if torch.is_grad_enabled() else some(*block_inputs)
        assert isinstance(again, Tensor)
        outputs.append(again)
    return torch.cat(outputs, -2)


def running_sums(
    k: Float[Tensor, "*b c s d"], v: Float[Tensor, "*b c s e"]
) -> tuple[Float[Tensor, "*b c+1 d e"], Float[Tensor, "*b c+1 d 1"]]:
    """State and normaliser before each block of keys, and after the last one."""
    state, z = (k.mT @ v).cumsum(-3), k.sum(-2).unsqueeze(-1).cumsum(-3)
    front = (0, 0, 0, 0, 1, 0)
    return F.pad(state, front), F.pad(z, front)


def blocks(x: Float[Tensor, "*b n d"], size: int) -> Float[Tensor, "*b c s d"]:
    """Cut a sequence into blocks; the last one is padded with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


class LinearAttention(MultiHead):
    """Multi-head linear attention with the feature map elu + 1."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(width, heads, LinearKernel(), dropout=dropout, bias=bias)
