"""Grouped heads whose allocation changes, and who is told of it."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .allocation import handed_out
from .grouped import GroupedQueryAttention
from .masked_attention import see_that_they_fit, split_heads
from .pairs import Padding, blanked

Watcher = Callable[[Int[Tensor, "#b G"]], None]
"""Is told the allocation of a pass: of each example, or one for all."""


class Allocating(GroupedQueryAttention):
    """Query heads are given to key/value heads pass by pass.

    A pass is a call of the layer (or of ``head_outputs``). Looking at ``weights`` or ``expansions`` is none, nor is
    what gradient checkpointing runs again on the way back.
    """

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__(width, heads, **options)
        self.watchers: list[Watcher] = []
        self.passing = False

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """What each head gives, before the heads are merged. This is a pass."""
        self.passing = True
        try:
            return super().head_outputs(x, context, padding=padding, causal=causal)
        finally:
            self.passing = False

    def handed_out(
        self, k: Float[Tensor, "b G m d"], v: Float[Tensor, "b G m d"], padding: Padding, causal: bool
    ) -> tuple[Float[Tensor, "b H m d"], Float[Tensor, "b H m d"]]:
        """Keys and values of each query head. Watchers are told of passes in training."""
        allocation = self.decided(k, padding, causal)
        if self.passing and self.training and self.watchers and not going_back():
            for tell in self.watchers:
                tell(allocation)
        return handed_out(k, allocation, self.heads), handed_out(v, allocation, self.heads)

    @torch.no_grad()
    def allocate(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None
    ) -> Int[Tensor, "b G"]:
        """How many query heads each key/value head gets on some inputs. This is no pass, and changes nothing."""
        context = x if context is None else context
        see_that_they_fit(x, context, padding, self.width, False)
        k = split_heads(self.key(blanked(context, padding)), self.kv_heads)
        return self.decided(k, padding, False).expand(len(x), -1)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but the watchers, who watch this layer alone."""
        return self.__dict__ | {"watchers": []}

    def decided(self, k: Float[Tensor, "b G m d"], padding: Padding, causal: bool) -> Int[Tensor, "#b G"]:
        """How many query heads each key/value head gets."""
        raise NotImplementedError


def going_back() -> bool:
    """Whether a backward pass is running, which may run forward passes again. To a compiler it is no part of a graph,
    so it is asked last, and where it matters.
    """
    return torch._C._current_graph_task_id() != -1
