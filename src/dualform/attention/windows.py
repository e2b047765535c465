"""Windows of tokens: a head of scale r sees one pooled key and value for every r tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dualform.errors import SizeError

Pool = Literal["avg", "stride"]
Grid = tuple[int, int] | None
Places = Int[np.ndarray, " _"]


@dataclass(frozen=True)
class Windows:
    """How so many tokens are cut into windows of ``scale`` tokens, the last one shorter where it does not fit.

    The first ``class_tokens`` are windows of their own. With a ``grid`` (height, width) the others are cut into blocks
    of it, as square as the scale allows; else in the order in which they come. ``pool`` is "avg", the mean of the
    tokens that are there, or "stride", the first token of each window.
    """

    tokens: int
    scale: int = 1
    pool: Pool = "avg"
    class_tokens: int = 0
    grid: Grid = None

    def __post_init__(self) -> None:
        rest = self.tokens - self.class_tokens
        if self.grid is not None and self.scale > 1 and self.grid[0] * self.grid[1] != rest:
            raise SizeError(
                f"{rest} tokens (behind {self.class_tokens} class tokens) are no grid of {self.grid[0]} × "
                f"{self.grid[1]}. Give grid=(height, width) as it is, or grid=None for a sequence."
            )

    @property
    def count(self) -> int:
        """How many windows there are."""
        if self.grid is None or self.scale == 1:
            return self.class_tokens + -(-(self.tokens - self.class_tokens) // self.scale)
        height, width = block(self.scale)
        return self.class_tokens + -(-self.grid[0] // height) * -(-self.grid[1] // width)

    @cached_property
    def of_token(self) -> Places:
        """The window of each token."""
        first, rest = np.arange(self.class_tokens), np.arange(self.tokens - self.class_tokens)
        if self.grid is None or self.scale == 1:
            return np.concatenate([first, len(first) + rest // self.scale])
        height, width = block(self.scale)
        row, column = rest // self.grid[1] // height, rest % self.grid[1] // width
        return np.concatenate([first, len(first) + row * -(-self.grid[1] // width) + column])

    @cached_property
    def sizes(self) -> Places:
        """How many tokens each window has."""
        return np.bincount(self.of_token, minlength=self.count)

    @cached_property
    def first(self) -> Places:
        """The first token of each window."""
        found = np.full(self.count, self.tokens)
        np.minimum.at(found, self.of_token, np.arange(self.tokens))
        return found

    @cached_property
    def last(self) -> Places:
        """The last token of each window."""
        found = np.zeros(self.count, dtype=np.int64)
        np.maximum.at(found, self.of_token, np.arange(self.tokens))
        return found

    @cached_property
    def end(self) -> Places:
        """Where each window of a sequence is complete: its last token, had it all of them."""
        return (np.arange(self.count) + 1) * self.scale - 1

    def pooled(
        self, x: Float[Tensor, "*b m d"], padding: Bool[Tensor, "*#b m"] | None = None
    ) -> tuple[Float[Tensor, "*b w d"], Bool[Tensor, "*#b w"] | None]:
        """Each window as one token, and which windows are empty. ``padding`` is True at tokens that are not there."""
        if self.scale == 1:
            return x, padding
        if self.pool == "stride":
            where = torch.from_numpy(self.first).to(x.device)
            return x[..., where, :], None if padding is None else padding[..., where]
        there = None if padding is None else (~padding).to(x.dtype)
        if there is not None:
            x = x * there.unsqueeze(-1)
            counts = self._sum(there.unsqueeze(-1))
            return self._sum(x) / counts.clamp(min=1), counts.squeeze(-1) == 0
        return self._sum(x) / torch.from_numpy(self.sizes).to(x).unsqueeze(-1), None

    def spread(
        self, weights: Float[Tensor, "b h n w"], padding: Bool[Tensor, "b m"] | None = None
    ) -> Float[Tensor, "b h n m"]:
        """Weights of windows as weights of tokens: each token has its share."""
        where = torch.from_numpy(self.of_token).to(weights.device)
        if self.scale > 1 and self.pool == "stride":
            chosen = torch.from_numpy(self.first).to(weights.device)
            return weights.new_zeros(*weights.shape[:-1], self.tokens).index_copy(-1, chosen, weights)
        there = weights.new_ones(1, self.tokens) if padding is None else (~padding).to(weights.dtype)
        counts = there.new_zeros(there.shape[0], self.count).index_add(1, where, there).clamp(min=1)
        return weights[..., where] * (there / counts[:, where])[:, None, None, :]

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
    """Height and width of a block of so many tokens, as square as can be, rather wide than high."""
    height = next(h for h in range(int(scale**0.5), 0, -1) if scale % h == 0)
    return height, scale // height


SCALES = {1: (1,), 2: (1, 2), 3: (1, 2, 4), 4: (1, 2, 4, 8), 8: (1, 1, 2, 2, 4, 4, 8, 8)}
"""Scales for some numbers of heads; others take the first few, over and over again."""


def default_scales(heads: int) -> tuple[int, ...]:
    """A scale for each head, at least one of them 1."""
    return SCALES.get(heads) or tuple(sorted((1, 2, 4, 8)[i % 4] for i in range(heads)))


def keep_rate(scales: Sequence[int]) -> float:
    """ρ: how many keys the heads see on average, as a share of all tokens."""
    return sum(1 / scale for scale in scales) / len(scales)
