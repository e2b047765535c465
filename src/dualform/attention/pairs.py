"""The pairs that the heads of a layer are fitted on: keys and values, which tokens they are made of, who sees them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .windows import Windows

Padding = Bool[Tensor, "b m"] | None
"""True at tokens that are not there."""


def blanked(x: Float[Tensor, "b m D"], padding: Padding) -> Float[Tensor, "b m D"]:
    """Tokens, with zeros for those that are not there: whatever they hold changes nothing."""
    return x if padding is None else x.masked_fill(padding.unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class Pairs:
    """Keys and values of some heads of one scale.

    Each pair is a window of tokens. Where it is ``causal``, a query sees the windows that are complete by then; if they
    are longer than one token also its own key and value, ``own``, so that no query sees nothing.
    """

    k: Float[Tensor, "b g w d"]
    v: Float[Tensor, "b g w e"]
    windows: Windows
    padding: Bool[Tensor, "b t"] | None = None
    """Tokens that are not there."""
    empty: Bool[Tensor, "b w"] | None = None
    """Windows that hold none."""
    causal: bool = False
    own: tuple[Float[Tensor, "b g n d"], Float[Tensor, "b g n e"]] | None = None
    shared: int = 1
    """How many heads of queries share each head of keys."""

    @property
    def keys(self) -> Float[Tensor, "b h m d"]:
        """All keys, head by head: of the windows and, behind them, the queries' own."""
        return self._of_heads(self.k if self.own is None else torch.cat([self.k, self.own[0]], -2))

    @property
    def values(self) -> Float[Tensor, "b h m e"]:
        """All values, in the same order."""
        return self._of_heads(self.v if self.own is None else torch.cat([self.v, self.own[1]], -2))

    @property
    def first(self) -> Int[Tensor, " m"]:
        """The first token of each key."""
        return self._tokens(self.windows.first)

    @property
    def last(self) -> Int[Tensor, " m"]:
        """The last token of each key."""
        return self._tokens(self.windows.first if self.windows.pool == "stride" else self.windows.last)

    def late(self, first: int, last: int, windows: int) -> Bool[Tensor, "n w"]:
        """Which of the first windows are not complete yet, for queries from the first place to before the last."""
        late = self.windows.end[:windows] > np.arange(first, last)[:, None]
        return torch.from_numpy(late).to(self.k.device)

    def hidden(self, n: int) -> Bool[Tensor, "#b 1 n m"] | None:
        """Which keys each of n queries does not see; None where all see all. The queries are the last n tokens."""
        if not self.causal and self.empty is None:
            return None
        count, device = self.k.shape[-2], self.k.device
        end = self.windows.tokens
        late = self.late(end - n, end, count) if self.causal else torch.zeros(n, count, dtype=torch.bool, device=device)
        hidden = late[None, None]
        if self.empty is not None:
            hidden = hidden | self.empty[:, None, None, :]
        if self.own is not None:
            others = ~torch.eye(n, dtype=torch.bool, device=device)
            hidden = torch.cat([hidden, others.expand(*hidden.shape[:2], n, n)], -1)
        return hidden

    def spread(self, weights: Float[Tensor, "b h n m"]) -> Float[Tensor, "b h n t"]:
        """Weights of pairs as weights of tokens."""
        count = self.k.shape[-2]
        found = self.windows.spread(weights[..., :count], self.padding)
        return found if self.own is None else found + weights[..., count:]

    def _of_heads(self, each: Float[Tensor, "b g m c"]) -> Float[Tensor, "b h m c"]:
        return each if self.shared == 1 else each.repeat_interleave(self.shared, 1)

    def _tokens(self, of_windows: np.ndarray) -> Int[Tensor, " m"]:
        own = np.arange(0 if self.own is None else self.own[0].shape[-2])
        return torch.from_numpy(np.concatenate([of_windows, own]))
