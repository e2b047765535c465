r"""Relative positions: the term that the offset of a key adds to a score, and the shift from offsets to keys.

n queries are the last n of m tokens: query i has position m − n + i and key j position j, so its offset is
:math:`\delta = j - (m - n + i)`, 0 at the query's own token and negative before it. Reference: Dai et al. (2019),
Transformer-XL, arXiv 1901.02860.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from dualform.arguments import whole_number
from dualform.errors import SizeError

from .masked_attention import split_heads

Offsets = tuple[Float[Tensor, "b H c d"], Float[Tensor, "b H c"]]
"""For each head and offset the vector R that a query is multiplied with, and the number S that is added."""


class TablePositions(nn.Module):
    r"""A vector R and a number S for each head and offset: row P + δ of tables with 2P rows, zero at first.

    P is the ``reach``. Rows are looked up for each example of a batch, so that a recorded row belongs to an example.
    """

    def __init__(self, width: int, heads: int, reach: int) -> None:
        super().__init__()
        self.heads, self.reach = heads, whole_number("reach", reach, 1)
        self.vectors, self.numbers = nn.Embedding(2 * reach, width), nn.Embedding(2 * reach, heads)
        for table in (self.vectors, self.numbers):
            nn.init.zeros_(table.weight)

    def forward(self, batch: int, first: int, end: int) -> Offsets:
        """Those of the offsets from the first to before the end."""
        if first < -self.reach or end > self.reach:
            raise SizeError(
                f"a sequence of {max(-first, end)} tokens is longer than reach={self.reach}: there is no position for "
                "the offset between its ends. Shorten it, or build the layer with a larger reach."
            )
        device = self.vectors.weight.device
        rows = torch.arange(self.reach + first, self.reach + end, device=device).expand(batch, -1)
        return split_heads(self.vectors(rows), self.heads), self.numbers(rows).mT


class SinusoidPositions(nn.Module):
    r"""The positions of Transformer-XL: :math:`R_\delta = W r_{-\delta}` and :math:`S_\delta = v^\top W r_{-\delta}`.

    r is a sinusoid of the distance, W a projection without bias, v a vector for each head (here for each layer; in the
    original all layers share one). There is no limit on the distance.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.project, self.v = nn.Linear(width, width, bias=False), nn.Embedding(1, width)
        nn.init.zeros_(self.v.weight)

    def forward(self, batch: int, first: int, end: int) -> Offsets:
        """Those of the offsets from the first to before the end."""
        weight = self.project.weight
        distances = -torch.arange(first, end, device=weight.device)
        r = sinusoids(distances, self.width).to(weight.dtype).expand(batch, -1, -1)
        vectors = split_heads(self.project(r), self.heads)
        return vectors, (vectors * one_for_all(self.v, batch, self.heads)).sum(-1)


def one_for_all(table: nn.Embedding, batch: int, heads: int) -> Float[Tensor, "b H 1 d"]:
    """The one vector of a table, repeated for each example of a batch, so that recorded rows belong to examples."""
    rows = torch.zeros(batch, 1, dtype=torch.int64, device=table.weight.device)
    return split_heads(table(rows), heads)


def sinusoids(places: Int[Tensor, " n"], width: int) -> Float[Tensor, "n D"]:
    r"""Sines, then cosines, of each position, with frequencies :math:`10000^{-2k/D}`."""
    even = torch.arange(0, width, 2, device=places.device, dtype=torch.float64)
    angles = places.double().unsqueeze(-1) * 10000.0 ** (-even / width)
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width]


def shifted(scores: Shaped[Tensor, "*b n c"], keys: int) -> Shaped[Tensor, "*b n m"]:
    r"""From scores of offsets to scores of keys, without a copy: :math:`s_{ij} = b_{i,\,n - i + j}`.

    Column c holds the offset c − m, so the first is never used. From one row to the next, a key's column decreases by
    one; reading the same buffer with rows that are one shorter has this effect. With n + m columns this holds for all
    keys; with m + 1, for keys that are not later than the query (above the diagonal are entries of the next row).
    """
    n, columns = scores.shape[-2:]
    rows = scores.flatten(-2)[..., n : n + n * (columns - 1)]
    return rows.unflatten(-1, (n, columns - 1))[..., :keys]
