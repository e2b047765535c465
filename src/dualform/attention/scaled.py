r"""Attention-SH: heads that are fitted with less data (Nguyen et al. 2023, arXiv 2406.13781).

Head s has a scale r and sees ⌈N/r⌉ pooled keys and values; queries, and so the output, keep their length.

.. math:: h_i^s = \sum_m \mathrm{softmax}_m(q_i^\top \bar k_m/\sqrt d)\, \bar v_m,\qquad
    \bar k_m = \text{mean of } k_j \text{ over the window } j \in [mr, (m+1)r)

Pooling commutes with the projections, so tokens are pooled first and fewer of them are projected. Heads of one scale
are computed together. The paper's pooling and scales were not available: both are arguments.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dualform.arguments import one_of, whole_number
from dualform.errors import SizeError

from .heads import AttentionKernel, HeadGroup, Heads
from .masked_attention import split_heads
from .norm import KeyNorm
from .pairs import Padding, Pairs
from .softmax import SoftmaxKernel
from .windows import Grid, WindowPool, Windows, default_scales


class ScaledHeadAttention(Heads):
    """Attention-SH. It adds no parameters, and with all scales 1 it is the kernel's plain attention.

    ``normalise`` makes it Attention-BN+SH, with the statistics of the pooled keys of each head. ``class_tokens`` at the
    front are never pooled; with a ``grid`` (height, width) the others are pooled in blocks of it. Without ``prepool``
    all tokens are projected and then pooled: the same result at a higher cost (causal attention always does this). The
    state dict of a layer without scales can be loaded.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kernel: AttentionKernel | None = None,
        scales: Sequence[int] | None = None,
        pool: WindowPool = "avg",
        prepool: bool = True,
        class_tokens: int = 0,
        grid: Grid = None,
        normalise: bool = False,
        beta: float = 1.0,
        use_var: bool = True,
        eps: float = 1e-5,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        norm = KeyNorm(heads, beta=beta, use_var=use_var, eps=eps) if normalise else None
        super().__init__(width, heads, kernel or SoftmaxKernel(), norm=norm, dropout=dropout)
        self.scales = tuple(default_scales(heads) if scales is None else scales)
        if len(self.scales) != heads or not all(isinstance(scale, int) and scale > 0 for scale in self.scales):
            raise SizeError(f"scales={list(self.scales)} must be {heads} whole numbers, one per head, 1 or more.")
        self.pool: WindowPool = one_of("pool", pool, ("avg", "stride"))
        self.prepool, self.class_tokens, self.grid = prepool, whole_number("class_tokens", class_tokens), grid
        self.members = {scale: [i for i in range(heads) if self.scales[i] == scale] for scale in sorted({*self.scales})}
        by_scale = [head for members in self.members.values() for head in members]
        self.order = [by_scale.index(head) for head in range(heads)]  # the position of each head among the groups
        self.query, self.out = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        sizes = {str(scale): len(members) * self.size for scale, members in self.members.items()}
        self.key = nn.ModuleDict({scale: nn.Linear(width, size, bias=bias) for scale, size in sizes.items()})
        self.value = nn.ModuleDict({scale: nn.Linear(width, size, bias=bias) for scale, size in sizes.items()})
        self.register_load_state_dict_pre_hook(split_projections)

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """The heads of each scale, in the order of their scales."""
        if causal and (self.class_tokens or self.grid is not None):
            raise SizeError(
                "class tokens and grids have no order, so heads of several scales are not causal with them."
            )
        q = split_heads(self.query(x), self.heads)
        for scale, members in self.members.items():
            together = members[-1] - members[0] == len(members) - 1
            queries = q[:, members[0] : members[-1] + 1] if together else q[:, members]
            yield HeadGroup(tuple(members), queries, self._pairs(context, scale, len(members), padding, causal))

    def in_order(self, parts: list[Tensor]) -> Tensor:
        """Concatenate the groups, which come by scale, in the order of the heads."""
        merged = super().in_order(parts)
        return merged if self.order == sorted(self.order) else merged[:, self.order]

    def split_by_scale(self, rows: Tensor) -> dict[str, Tensor]:
        """Split the rows of all heads into those of each scale's projection."""
        heads = rows.unflatten(0, (self.heads, self.size))
        return {str(scale): heads[members].flatten(0, 1) for scale, members in self.members.items()}

    def extra_repr(self) -> str:
        """The options of ``Heads``, the scales and the pooling."""
        return f"{super().extra_repr()}, scales={list(self.scales)}, pool={self.pool!r}"

    def _pairs(self, context: Tensor, scale: int, count: int, padding: Padding, causal: bool) -> Pairs:
        """Keys and values of the heads of one scale, pooled before the projection unless it is causal."""
        windows = Windows(context.shape[1], scale, self.pool, self.class_tokens, self.grid)
        later = scale > 1 and (causal or not self.prepool)
        tokens, empty = (context, padding) if later else windows.pooled(context, padding)
        k, v = (split_heads(projections[str(scale)](tokens), count) for projections in (self.key, self.value))
        if not later:
            return Pairs(k, v, windows, padding, empty, causal)
        hidden = None if padding is None else padding.unsqueeze(1)
        (pooled_k, empty), (pooled_v, _) = windows.pooled(k, hidden), windows.pooled(v, hidden)
        own = (k, v) if causal else None
        return Pairs(pooled_k, pooled_v, windows, padding, None if empty is None else empty.squeeze(1), causal, own)


def split_projections(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of ``load_state_dict``: split projections of all heads by scale."""
    for part in ("key", "value"):
        for kind in ("weight", "bias"):
            rows_of_all_heads = state.pop(f"{prefix}{part}.{kind}", None)
            if rows_of_all_heads is not None:
                state |= {
                    f"{prefix}{part}.{s}.{kind}": rows for s, rows in layer.split_by_scale(rows_of_all_heads).items()
                }
