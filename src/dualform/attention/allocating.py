"""Grouped heads whose allocation changes from pass to pass, and callbacks that receive each allocation."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .allocation import repeat_for_query_heads
from .grouped import GroupedQueryAttention
from .masked_attention import check_sequences, split_heads
from .pairs import Padding, zero_padding

Watcher = Callable[[Int[Tensor, "#b G"]], None]
"""A callback that receives the allocation of a pass: one for each example, or one for all."""


class Allocating(GroupedQueryAttention):
    """A grouped layer that assigns query heads to key/value heads anew in each pass.

    A pass is a call of the layer (or of ``head_outputs``). Calls of ``weights`` or ``expansions`` do not count, nor
    does a forward pass that gradient checkpointing repeats during the backward pass.
    """

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__(width, heads, **options)
        self.watchers: list[Watcher] = []
        self.passing = False

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """The output of each head, before the heads are merged. This is a pass."""
        self.passing = True
        try:
            return super().head_outputs(x, context, padding=padding, causal=causal)
        finally:
            self.passing = False

    def handed_out(
        self, k: Float[Tensor, "b G m d"], v: Float[Tensor, "b G m d"], padding: Padding, causal: bool
    ) -> tuple[Float[Tensor, "b H m d"], Float[Tensor, "b H m d"]]:
        """Keys and values of each query head. In training, the watchers are called with the allocation."""
        allocation = self.decided(k, padding, causal)
        if self.passing and self.training and self.watchers and not in_backward_pass():
            for watcher in self.watchers:
                watcher(allocation)
        return repeat_for_query_heads(k, allocation, self.heads), repeat_for_query_heads(v, allocation, self.heads)

    @torch.no_grad()
    def allocate(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None
    ) -> Int[Tensor, "b G"]:
        """The number of query heads of each key/value head on given inputs. This does not count as a pass."""
        context = x if context is None else context
        check_sequences(x, context, padding, self.width, False)
        k = split_heads(self.key(zero_padding(context, padding)), self.kv_heads)
        return self.decided(k, padding, False).expand(len(x), -1)

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, without the watchers, which belong to this layer alone."""
        return self.__dict__ | {"watchers": []}

    def decided(self, k: Float[Tensor, "b G m d"], padding: Padding, causal: bool) -> Int[Tensor, "#b G"]:
        """The number of query heads of each key/value head."""
        raise NotImplementedError


def in_backward_pass() -> bool:
    """Whether a backward pass is running, which may repeat forward passes.

    This call breaks the graph of a compiler, so it is evaluated last and only where it matters.
    """
    return torch._C._current_graph_task_id() != -1
