r"""Allocations: how many query heads each key/value head gets.

.. math:: a \in \mathbb N^G,\qquad \sum_g a_g = H

Query heads keep their order and are cut into runs: the first :math:`a_1` of them share the first key/value head, and so
on. A key/value head may get none. An allocation has no gradient.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import SizeError

from .masked_attention import wide
from .pairs import Padding


def uniform(heads: int, groups: int) -> Int[Tensor, " G"]:
    """The same number for each group; the remainder goes to the first groups."""
    quotient, rest = divmod(heads, groups)
    return quotient + (torch.arange(groups) < rest).long()


def owners(allocation: Int[Tensor, "*b G"], heads: int) -> Int[Tensor, "*b H"]:
    """The index of the key/value head of each query head: the number of runs that end before it."""
    ends = allocation.cumsum(-1).unsqueeze(-2)
    return (ends <= torch.arange(heads, device=allocation.device).unsqueeze(-1)).sum(-1)


def repeat_for_query_heads(
    rows: Float[Tensor, "b G m d"], allocation: Int[Tensor, "#b G"], heads: int
) -> Float[Tensor, "b H m d"]:
    """The keys, or values, of each query head, repeated from the key/value heads according to the allocation."""
    owner = owners(allocation, heads)
    if len(owner) == 1:
        return rows.index_select(1, owner[0])
    batch, groups = rows.shape[:2]
    of_all = owner + groups * torch.arange(batch, device=owner.device).unsqueeze(1)
    return rows.flatten(0, 1).index_select(0, of_all.flatten()).unflatten(0, (batch, heads))


@torch.no_grad()
def head_norms(k: Float[Tensor, "b G m d"], padding: Padding = None) -> Float[Tensor, "b G"]:
    r"""The norm of each head's keys, :math:`\|K_g\|_F`, over the tokens that are not padding."""
    of_tokens = torch.linalg.vector_norm(wide(k), dim=-1)
    if padding is not None:
        of_tokens = of_tokens.masked_fill(padding.unsqueeze(1), 0.0)
    return torch.linalg.vector_norm(of_tokens, dim=-1)


def rounding(norms: Float[Tensor, "*s"]) -> float:
    """The relative difference of norms that counts as zero: the order of summation over tokens changes as much."""
    return 1e-12 if norms.dtype == torch.float64 else 1e-6


def key_driven(
    norms: Float[Tensor, "*b G"], heads: int, least: int = 0, eps: float | None = None
) -> Int[Tensor, "*b G"]:
    r"""Allocate query heads by the norms of keys (Khan et al. 2024, arXiv 2408.08454, as in the released code).

    .. math:: m_g = \frac{n_g - \min n}{\max n - \min n},\qquad r_g = \mathrm{round}(H m_g/\textstyle\sum m)

    While the sum is too large, the largest entry loses one; while it is too small, the smallest gains one; the first of
    several equal entries. The smallest norm has m = 0, so its head usually gets nothing; ``least`` first gives this
    many query heads to each head and then distributes the others. If the norms differ by at most ``eps`` times the
    largest, all heads get equal shares (there the formula is 0/0); None means 1e-12 for float64, else 1e-6.
    """
    groups = norms.shape[-1]
    shared = heads - groups * least
    eps = rounding(norms) if eps is None else eps
    low, high = norms.amin(-1, keepdim=True), norms.amax(-1, keepdim=True)
    apart = high - low > eps * high  # False for NaN and infinity, too
    scaled = torch.where(apart, (norms - low) / (high - low), 1.0)
    allocation = (shared * scaled / scaled.sum(-1, keepdim=True)).round().long()
    for _ in range((groups - 1) // 2):  # the sum is off by no more: each entry by half at most, the smallest by nothing
        off = allocation.sum(-1, keepdim=True) - shared
        at = torch.where(off > 0, allocation.argmax(-1, keepdim=True), allocation.argmin(-1, keepdim=True))
        allocation = allocation.scatter_add(-1, at, -off.sign())
    if shared % groups:  # otherwise equal shares are whole numbers
        allocation = torch.where(apart, allocation, uniform(shared, groups).to(allocation.device))
    return allocation + least if least else allocation


def proportional(weights: Float[Tensor, "*b G"], heads: int) -> Int[Tensor, "*b G"]:
    """Allocate query heads in proportion to weights. The largest remainders are rounded up, ties in order."""
    shares = heads * weights / weights.sum(-1, keepdim=True)
    floors = shares.floor()
    order = (shares - floors).argsort(dim=-1, descending=True, stable=True)
    missing = heads - floors.sum(-1, keepdim=True)
    return (floors + (order.argsort(dim=-1) < missing)).long()


def repaired_at_random(weights: Float[Tensor, " G"], heads: int) -> Int[Tensor, " G"]:
    """The same with the rounding of the released code: each entry by itself, then random corrections of the sum."""
    total = float(weights.sum())
    if not 0 < total < float("inf"):
        raise SizeError(
            f"the shares of the groups are {weights.tolist()} over their sum, {total:g}: no number of heads. The "
            "released code does not terminate here; two batches in a row with the same keys cause it. Use "
            "mode='clean', which has no such case."
        )
    counts = (heads * weights / total).round().long().tolist()
    while (off := sum(counts) - heads) != 0:
        at = int(torch.randint(len(counts), ()))
        counts[at] = max(counts[at] - 1, 0) if off > 0 else counts[at] + 1
    return torch.tensor(counts, device=weights.device)
