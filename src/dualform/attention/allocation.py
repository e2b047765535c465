r"""Allocations: how many query heads each key/value head gets.

.. math:: a \in \mathbb N^G,\qquad \sum_g a_g = H

Query heads stay in order and are cut into runs: the first :math:`a_1` of them share the first key/value head, and so
on. A head may get none. To gradients an allocation is constant.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import SizeError

from .masked_attention import wide
from .pairs import Padding


def uniform(heads: int, groups: int) -> Int[Tensor, " G"]:
    """As many for each; what is left over goes to the first."""
    whole, rest = divmod(heads, groups)
    return whole + (torch.arange(groups) < rest).long()


def owners(allocation: Int[Tensor, "*b G"], heads: int) -> Int[Tensor, "*b H"]:
    """The key/value head of each query head: as many runs lie before it as have ended."""
    ends = allocation.cumsum(-1).unsqueeze(-2)
    return (ends <= torch.arange(heads, device=allocation.device).unsqueeze(-1)).sum(-1)


def handed_out(each: Float[Tensor, "b G m d"], allocation: Int[Tensor, "#b G"], heads: int) -> Float[Tensor, "b H m d"]:
    """Keys, or values, of the key/value heads for the query heads that they are given to."""
    owner = owners(allocation, heads)
    if len(owner) == 1:
        return each.index_select(1, owner[0])
    batch, groups = each.shape[:2]
    of_all = owner + groups * torch.arange(batch, device=owner.device).unsqueeze(1)
    return each.flatten(0, 1).index_select(0, of_all.flatten()).unflatten(0, (batch, heads))


@torch.no_grad()
def head_norms(k: Float[Tensor, "b G m d"], padding: Padding = None) -> Float[Tensor, "b G"]:
    r"""How large the keys of each head are: :math:`\|K_g\|_F` over the tokens that are there."""
    of_tokens = torch.linalg.vector_norm(wide(k), dim=-1)
    if padding is not None:
        of_tokens = of_tokens.masked_fill(padding.unsqueeze(1), 0.0)
    return torch.linalg.vector_norm(of_tokens, dim=-1)


def rounding(norms: Float[Tensor, "*s"]) -> float:
    """The share of norms below which a difference is none: the order of a sum over tokens changes as much."""
    return 1e-12 if norms.dtype == torch.float64 else 1e-6


def key_driven(
    norms: Float[Tensor, "*b G"], heads: int, least: int = 0, eps: float | None = None
) -> Int[Tensor, "*b G"]:
    r"""Query heads by the norms of keys, after Khan et al. (2024), arXiv 2408.08454, as the released code has it.

    .. math:: m_g = \frac{n_g - \min n}{\max n - \min n},\qquad r_g = \mathrm{round}(H m_g/\textstyle\sum m)

    While the sum is too large the largest entry loses one, while it is too small the smallest gains one; the first
    where there are several. The smallest norm has m = 0, so its head mostly gets nothing; ``least`` gives each head so
    many first, and shares out the others. Norms that are equal, but for ``eps`` of the largest, share evenly (there the
    formula is 0/0); None is 1e-12 for float64, else 1e-6.
    """
    groups = norms.shape[-1]
    shared = heads - groups * least
    eps = rounding(norms) if eps is None else eps
    low, high = norms.amin(-1, keepdim=True), norms.amax(-1, keepdim=True)
    apart = high - low > eps * high  # False for NaN and infinity, too
    scaled = torch.where(apart, (norms - low) / (high - low), 1.0)
    found = (shared * scaled / scaled.sum(-1, keepdim=True)).round().long()
    for _ in range((groups - 1) // 2):  # no sum is further off: each entry by half at most, and the smallest by nothing
        off = found.sum(-1, keepdim=True) - shared
        at = torch.where(off > 0, found.argmax(-1, keepdim=True), found.argmin(-1, keepdim=True))
        found = found.scatter_add(-1, at, -off.sign())
    if shared % groups:  # or equal shares are whole numbers
        found = torch.where(apart, found, uniform(shared, groups).to(found.device))
    return found + least if least else found


def proportional(weights: Float[Tensor, "*b G"], heads: int) -> Int[Tensor, "*b G"]:
    """Query heads in proportion to some weights. Those with the largest remainders are rounded up, the first first."""
    shares = heads * weights / weights.sum(-1, keepdim=True)
    whole = shares.floor()
    order = (shares - whole).argsort(dim=-1, descending=True, stable=True)
    missing = heads - whole.sum(-1, keepdim=True)
    return (whole + (order.argsort(dim=-1) < missing)).long()


def repaired_at_random(weights: Float[Tensor, " G"], heads: int) -> Int[Tensor, " G"]:
    """The same, as the released code rounds: each by itself, then one up or down at random until the sum is right."""
    total = float(weights.sum())
    if not 0 < total < float("inf"):
        raise SizeError(
            f"the shares of the groups are {weights.tolist()} over their sum, {total:g}: no number of heads. The "
            "released code does not end here; two batches with the same keys in a row do it. mode='clean' does not."
        )
    found = (heads * weights / total).round().long().tolist()
    while (off := sum(found) - heads) != 0:
        at = int(torch.randint(len(found), ()))
        found[at] = max(found[at] - 1, 0) if off > 0 else found[at] + 1
    return torch.tensor(found, device=weights.device)
