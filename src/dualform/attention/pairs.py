"""The pairs that the heads of a layer are fitted on: keys and values, which tokens they are made of, who sees them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .windows import Windows

Padding = Bool[Tensor, "b m"] | None
"""True at tokens that are not there."""


@dataclass(frozen=True)
class Pairs:
    """Keys and values of some heads of one scale.

    Each pair is a window of tokens. Where it is ``causal``, a query sees the windows that are complete by then; if they
    are longer than one token also its own key and value, ``own``, so that no query sees nothing.
    """

    k: Float[Tensor, "b h w d"]
    v: Float[Tensor, "b h w e"]
    windows: Windows
    empty: Bool[Tensor, "b w"] | None = None
    causal: bool = False
    own: tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n e"]] | None = None

    @property
    def keys(self) -> Float[Tensor, "b h m d"]:
        """All keys: of the windows and, behind them, the queries' own."""
        return self.k if self.own is None else torch.cat([self.k, self.own[0]], -2)

    @property
    def values(self) -> Float[Tensor, "b h m e"]:
        """All values, in the same order."""
        return self.v if self.own is None else torch.cat([self.v, self.own[1]], -2)

    def hidden(self, n: int) -> Bool[Tensor, "#b 1 n m"] | None:
        """Which keys each of n queries does not see; None where all see all."""
        device = self.k.device
        if self.causal:
            hidden = torch.from_numpy(self.windows.end > np.arange(n)[:, None]).to(device)[None, None]
        elif self.empty is not None:
            hidden = torch.zeros(1, 1, n, self.k.shape[-2], dtype=torch.bool, device=device)
        else:
            return None
        if self.empty is not None:
            hidden = hidden | self.empty[:, None, None, :]
        if self.own is not None:
            others = ~torch.eye(n, dtype=torch.bool, device=device)
            hidden = torch.cat([hidden, others.expand(*hidden.shape[:2], n, n)], -1)
        return hidden

    def spread(
        self, weights: Float[Tensor, "b h n m"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h n t"]:
        """Weights of pairs as weights of tokens."""
        count = self.k.shape[-2]
        found = self.windows.spread(weights[..., :count], padding)
        return found if self.own is None else found + weights[..., count:]
