"""Windows of tokens: a head of scale r sees one pooled key and value for every r tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dualform.errors import SizeError

from .masked_attention import wide

WindowPool = Literal["avg", "stride"]
Grid = tuple[int, int] | None
TokenPlaces = Int[np.ndarray, " _"]


@dataclass(frozen=True)
class Windows:
    """The partition of a sequence into windows of ``scale`` tokens, of which the last one may be shorter.

    The first ``class_tokens`` are windows of their own. With a ``grid`` (height, width) the others are cut into blocks
    of it, as square as the scale allows; otherwise into consecutive windows. ``pool`` is "avg", the mean of the tokens
    that are not padding, or "stride", the first of these.
    """

    tokens: int
    scale: int = 1
    pool: WindowPool = "avg"
    class_tokens: int = 0
    grid: Grid = None

    def __post_init__(self) -> None:
        rest = self.tokens - self.class_tokens
        if rest < 0:
            raise SizeError(f"there are {self.tokens} tokens, fewer than class_tokens={self.class_tokens}.")
        if self.grid is not None and self.scale > 1 and self.grid[0] * self.grid[1] != rest:
            raise SizeError(
                f"{rest} tokens (after {self.class_tokens} class tokens) do not form a grid of {self.grid[0]} × "
                f"{self.grid[1]}. Give the right grid=(height, width), or grid=None for a sequence."
            )

    @property
    def count(self) -> int:
        """The number of windows."""
        if self.grid is None or self.scale == 1:
            return self.class_tokens + -(-(self.tokens - self.class_tokens) // self.scale)
        height, width = block(self.scale)
        return self.class_tokens + -(-self.grid[0] // height) * -(-self.grid[1] // width)

    @property
    def of_token(self) -> TokenPlaces:
        """The index of each token's window."""
        first, rest = np.arange(self.class_tokens), np.arange(self.tokens - self.class_tokens)
        if self.grid is None or self.scale == 1:
            return np.concatenate([first, len(first) + rest // self.scale])
        height, width = block(self.scale)
        row, column = rest // self.grid[1] // height, rest % self.grid[1] // width
        return np.concatenate([first, len(first) + row * -(-self.grid[1] // width) + column])

    @property
    def sizes(self) -> TokenPlaces:
        """The number of tokens of each window."""
        return np.bincount(self.of_token, minlength=self.count)

    @property
    def first(self) -> TokenPlaces:
        """The first token of each window."""
        first = np.full(self.count, self.tokens)
        np.minimum.at(first, self.of_token, np.arange(self.tokens))
        return first

    @property
    def last(self) -> TokenPlaces:
        """The last token of each window."""
        last = np.zeros(self.count, dtype=np.int64)
        np.maximum.at(last, self.of_token, np.arange(self.tokens))
        return last

    @property
    def end(self) -> TokenPlaces:
        """The position at which each window of a sequence is complete: that of its last token, if it were full."""
        return (np.arange(self.count) + 1) * self.scale - 1

    def pooled(
        self, x: Float[Tensor, "*b m d"], padding: Bool[Tensor, "*#b m"] | None = None
    ) -> tuple[Float[Tensor, "*b w d"], Bool[Tensor, "*#b w"] | None]:
        """Pool each window to one token; also returns which windows hold nothing but padding."""
        if self.scale == 1:
            return x, padding
        if self.pool == "stride":
            where, empty = self._chosen(padding, x.device)
            if empty is None:
                return x[..., where, :], None
            return torch.take_along_dim(x, where.unsqueeze(-1).expand(*where.shape, x.shape[-1]), -2), empty
        summed = wide(x)
        if padding is None:
            sizes = torch.from_numpy(self.sizes).to(summed).unsqueeze(-1)
            return (self._sum(summed) / sizes).to(x.dtype), None
        counts = self._sum((~padding).to(summed.dtype).unsqueeze(-1))
        summed = self._sum(summed.masked_fill(padding.unsqueeze(-1), 0.0))
        return (summed / counts.clamp(min=1)).to(x.dtype), counts.squeeze(-1) == 0

    def spread(
        self, weights: Float[Tensor, "b h n w"], padding: Bool[Tensor, "b m"] | None = None
    ) -> Float[Tensor, "b h n m"]:
        """Distribute the weight of each window over its tokens."""
        where = torch.from_numpy(self.of_token).to(weights.device)
        if self.scale > 1 and self.pool == "stride":
            chosen, _ = self._chosen(padding, weights.device)
            chosen = chosen.reshape(-1, 1, 1, self.count).expand_as(weights)
            return weights.new_zeros(*weights.shape[:-1], self.tokens).scatter_add(-1, chosen, weights)
        present = weights.new_ones(1, self.tokens) if padding is None else (~padding).to(weights.dtype)
        counts = present.new_zeros(present.shape[0], self.count).index_add(1, where, present).clamp(min=1)
        return weights[..., where] * (present / counts[:, where])[:, None, None, :]

    def _chosen(
        self, padding: Bool[Tensor, "*b m"] | None, device: torch.device
    ) -> tuple[Int[Tensor, "*b w"], Bool[Tensor, "*b w"] | None]:
        """The first token of each window that is not padding, and which windows have none."""
        if padding is None:
            return torch.from_numpy(self.first).to(device), None
        places = torch.arange(self.tokens, device=device) + self.tokens * padding  # padding comes last
        window = torch.from_numpy(self.of_token).to(device).expand_as(places)
        nothing = places.new_full((*places.shape[:-1], self.count), 2 * self.tokens)
        earliest = nothing.scatter_reduce(-1, window, places, "amin")
        return earliest.clamp(max=self.tokens - 1), earliest >= self.tokens

    def _sum(self, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b w d"]:
        """The sum of each window."""
        if self.grid is not None:
            where = torch.from_numpy(self.of_token).to(x.device)
            return x.new_zeros(*x.shape[:-2], self.count, x.shape[-1]).index_add(-2, where, x)
        first, rest = x[..., : self.class_tokens, :], x[..., self.class_tokens :, :]
        windows = self.count - self.class_tokens
        if missing := windows * self.scale - rest.shape[-2]:
            rest = F.pad(rest, (0, 0, 0, missing))
        summed = rest.unflatten(-2, (windows, self.scale)).sum(-2)
        return torch.cat([first, summed], -2) if self.class_tokens else summed


def block(scale: int) -> tuple[int, int]:
    """Height and width of a block of ``scale`` tokens, as square as possible, and wider than high if necessary."""
    height = next(h for h in range(int(scale**0.5), 0, -1) if scale % h == 0)
    return height, scale // height


SCALES = {1: (1,), 2: (1, 2), 3: (1, 2, 4), 4: (1, 2, 4, 8), 8: (1, 1, 2, 2, 4, 4, 8, 8)}
"""Default scales for common numbers of heads; other numbers repeat 1, 2, 4, 8."""


def default_scales(heads: int) -> tuple[int, ...]:
    """A scale for each head, at least one of them 1."""
    return SCALES.get(heads) or tuple(sorted((1, 2, 4, 8)[i % 4] for i in range(heads)))


def keep_rate(scales: Sequence[int]) -> float:
    """ρ, the mean number of keys per head as a share of all tokens."""
    return sum(1 / scale for scale in scales) / len(scales)
