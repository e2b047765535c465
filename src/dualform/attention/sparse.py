r"""Sparse attention: each query sees its neighbours and every c-th token (after Child et al. 2019, arXiv 1904.10509).

.. math:: h_i = \sum_{j \in M_i} \mathrm{softmax}_{j \in M_i}(q_i^\top k_j/\sqrt d)\, v_j,\qquad
    M_i = \{j : |i - j| \le w \text{ or } (j + 1) \bmod c = 0\}

As a support vector expansion, each query has a fit of its own, on the keys in its M. A pooled window is visible if any
of its tokens is. The pattern of Nguyen et al. (2023) was not available: w and c are arguments, ⌈√N⌉ by default.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dualform.arguments import whole_number
from dualform.errors import SizeError

from .expansion import Expansion, exponential
from .heads import MultiHead
from .masked_attention import attend
from .norm import KeyNorm, statistics_of, subset_statistics
from .pairs import Pairs
from .windows import Windows

LEAST_BLOCK = 16
"""The smallest number of queries per block: shorter blocks cost more than they save."""


@dataclass(frozen=True)
class Pattern:
    """The visible tokens: neighbours up to ``window`` tokens away, and the last of every ``stride`` tokens."""

    window: int
    stride: int

    def sees(self, query: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Whether a query sees any of the tokens from the first to the last."""
        near = (first <= query + self.window) & (last >= query - self.window)
        return near | ((last + 1) // self.stride > first // self.stride)


class Gathered(NamedTuple):
    """For each block of queries, the keys that any of them sees, and which of these are hidden from each query."""

    keys: Int[np.ndarray, "c l"]
    hidden: Bool[np.ndarray, "c s l"]


@lru_cache(maxsize=64)
def gathered(pattern: Pattern, queries: int, windows: Windows, causal: bool, own: bool) -> Gathered:
    """Cut the queries into blocks, and gather for each the windows near it and those that hold a strided token.

    With the default pattern these are less than three times as many as its queries see, so the cost grows with the
    number of visible pairs, N√N.
    """
    last, of_token, end = windows.tokens - 1, windows.of_token, windows.end
    w = min(pattern.window, max(queries, windows.tokens))
    size = min(max(w, LEAST_BLOCK), queries)
    begin = np.arange(0, queries, size)[:, None]  # c 1
    query = begin[..., None] + np.arange(size)[:, None]  # c s 1
    lowest = of_token[(begin - w).clip(0, last)]
    highest = of_token[(begin + size - 1 + (0 if causal else w)).clip(max=last)]
    near = lowest + np.arange((highest - lowest).max() + 1)  # c l
    strided = np.unique(of_token[pattern.stride - 1 :: pattern.stride])
    again = (strided >= lowest) & (strided <= highest)
    keys = np.concatenate([near.clip(max=windows.count - 1), np.broadcast_to(strided, again.shape)], 1)
    useless = np.concatenate([near > highest, again], 1)[:, None]
    hidden = useless | ~pattern.sees(query, windows.first[keys][:, None], windows.last[keys][:, None])
    if causal:
        hidden = hidden | (end[keys][:, None] > query)
    if own:
        own_token = (begin + np.arange(size)).clip(max=queries - 1)
        other_tokens = np.broadcast_to(~np.eye(size, dtype=bool), (len(begin), size, size))
        keys, hidden = np.concatenate([keys, windows.count + own_token], 1), np.concatenate([hidden, other_tokens], 2)
    return Gathered(keys, hidden)


@dataclass(frozen=True)
class SparseKernel:
    """Softmax over the keys of a pattern.

    ``stats`` selects the keys of a normalisation's statistics: "all", or the "subset" that each query sees, which is
    the literal reading of one fit per query. ``way`` is "gathered", whose cost grows with the visible pairs, or
    "dense", the reference, which masks all scores.
    """

    window: int | None = None
    stride: int | None = None
    stats: Literal["all", "subset"] = "all"
    way: Literal["gathered", "dense"] = "gathered"

    def __post_init__(self) -> None:
        for name, least in (("window", 0), ("stride", 1)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        if self.stats not in ("all", "subset") or self.way not in ("gathered", "dense"):
            raise SizeError(f"stats={self.stats!r} is 'all' or 'subset', and way={self.way!r} 'gathered' or 'dense'.")

    def pattern(self, windows: Windows) -> Pattern:
        """The pattern for the number of tokens of ``windows``."""
        if windows.grid is not None and windows.scale > 1:
            raise SizeError("blocks of a grid are not intervals of a sequence: pool sparse heads without grid=.")
        root = math.isqrt(max(windows.tokens - 1, 0)) + 1
        return Pattern(root if self.window is None else self.window, self.stride or root)

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """The outputs, block by block of the queries, from torch's fused kernel."""
        if self.way == "dense":
            return self.expansion((), q, pairs, norm).outputs(dropout)
        n, device = q.shape[-2], q.device
        gathered_keys = gathered(self.pattern(pairs.windows), n, pairs.windows, pairs.causal, pairs.own is not None)
        index, hidden = (torch.from_numpy(array).to(device) for array in gathered_keys)
        hidden = hidden[None]  # 1 c s l
        if norm is not None and self.stats == "all":
            q = norm.query(q, statistics_of(pairs))
        if pairs.empty is not None:
            empty = pairs.empty if pairs.own is None else F.pad(pairs.empty, (0, n))
            hidden = hidden | empty[:, index].unsqueeze(-2)  # b c s l
        keys, values = pairs.keys[:, :, index], pairs.values[:, :, index]  # b h c l d
        size = hidden.shape[-2]
        q = F.pad(q, (0, 0, 0, -n % size)).unflatten(-2, (-1, size))  # b h c s d
        if norm is not None and self.stats == "subset":
            q = norm.query(q, subset_statistics(keys, ~hidden.unsqueeze(1)))
        if hidden.shape[0] > 1:
            hidden = hidden.repeat_interleave(q.shape[1], 0)
        out = attend(
            *(tensor.to(q.dtype).flatten(0, 1) for tensor in (q, keys, values)), hidden=hidden, dropout=dropout
        )
        return out.unflatten(0, q.shape[:2]).flatten(2, 3)[:, :, :n].to(pairs.v.dtype)

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """The expansion over all keys, with those outside the pattern hidden."""
        n, windows = q.shape[-2], pairs.windows
        unseen = ~self.pattern(windows).sees(np.arange(n)[:, None], windows.first, windows.last)
        unseen = torch.from_numpy(unseen).to(q.device)
        if pairs.own is not None:
            unseen = F.pad(unseen, (0, n))
        hidden = pairs.hidden(n)
        hidden = unseen[None, None] if hidden is None else hidden | unseen
        statistics = None
        if norm is not None:
            statistics = statistics_of(pairs) if self.stats == "all" else subset_statistics(pairs.keys, ~hidden)
        return exponential(heads, q, pairs, hidden, norm, statistics)


class SparseAttention(MultiHead):
    """Multi-head attention over a pattern of neighbours and strided tokens; options are those of ``SparseKernel``."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True, **pattern: Any) -> None:
        super().__init__(width, heads, SparseKernel(**pattern), dropout=dropout, bias=bias)
