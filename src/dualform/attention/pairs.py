"""The key/value pairs that heads are fitted on, the tokens that each is made of, and which queries see it."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .windows import Windows

Padding = Bool[Tensor, "b m"] | None
"""True at padding tokens."""


def zero_padding(x: Float[Tensor, "b m D"], padding: Padding) -> Float[Tensor, "b m D"]:
    """Set padding tokens to zero, so that their content has no effect."""
    return x if padding is None else x.masked_fill(padding.unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class Pairs:
    """Keys and values of the heads of one scale.

    Each pair is a window of tokens. With ``causal``, a query sees the windows that are complete at its position and, if
    windows are longer than one token, also its own key and value, ``own``, so that every query sees something.
    """

    k: Float[Tensor, "b g w d"]
    v: Float[Tensor, "b g w e"]
    windows: Windows
    padding: Bool[Tensor, "b t"] | None = None
    """True at padding tokens."""
    empty: Bool[Tensor, "b w"] | None = None
    """True at windows with only padding tokens."""
    causal: bool = False
    own: tuple[Float[Tensor, "b g n d"], Float[Tensor, "b g n e"]] | None = None
    shared: int = 1
    """How many heads of queries share each head of keys."""

    @property
    def keys(self) -> Float[Tensor, "b h m d"]:
        """All keys, head by head: those of the windows, then the queries' own."""
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
        """Which of the first ``windows`` windows are not complete for the queries at positions first to last − 1."""
        late = self.windows.end[:windows] > np.arange(first, last)[:, None]
        return torch.from_numpy(late).to(self.k.device)

    def hidden(self, n: int) -> Bool[Tensor, "#b 1 n m"] | None:
        """The keys hidden from each of n queries, the last n tokens; None where every query sees every key."""
        if not self.causal and self.empty is None:
            return None
        count, device = self.k.shape[-2], self.k.device
        end = self.windows.tokens
        late = self.late(end - n, end, count) if self.causal else torch.zeros(n, count, dtype=torch.bool, device=device)
        hidden = late[None, None]
        if self.empty is not None:
            hidden = hidden | self.empty[:, None, None, :]
        if self.own is not None:
            other_tokens = ~torch.eye(n, dtype=torch.bool, device=device)
            hidden = torch.cat([hidden, other_tokens.expand(*hidden.shape[:2], n, n)], -1)
        return hidden

    def spread(self, weights: Float[Tensor, "b h n m"]) -> Float[Tensor, "b h n t"]:
        """Convert weights of pairs to weights of tokens."""
        count = self.k.shape[-2]
        token_weights = self.windows.spread(weights[..., :count], self.padding)
        return token_weights if self.own is None else token_weights + weights[..., count:]

    def _of_heads(self, rows: Float[Tensor, "b g m c"]) -> Float[Tensor, "b h m c"]:
        return rows if self.shared == 1 else rows.repeat_interleave(self.shared, 1)

    def _tokens(self, of_windows: np.ndarray) -> Int[Tensor, " m"]:
        own = np.arange(0 if self.own is None else self.own[0].shape[-2])
        return torch.from_numpy(np.concatenate([of_windows, own]))
