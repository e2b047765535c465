"""Classifiers of sequences: series of numbers, and texts."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.attention import Padding

from .block import TransformerBlock, places, small_normal

SERIES_POSITION_DEVIATION = 0.3
"""The initial deviation of a series' positions, large enough to matter beside its tokens, which are about 0.6."""


class SequenceClassifier(nn.Module):
    """Tokens with learned positions, transformer blocks, the mean over tokens that are not padding, a linear layer.

    ``embed`` turns inputs into tokens. ``attention`` is a name in the table of attention layers, with its options.
    """

    def __init__(
        self, embed: nn.Module, length: int, classes: int, *, width: int, heads: int, layers: int, hidden: int,
        attention: str, dropout: float, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.position = embed, nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, hidden, attention=attention, dropout=dropout, **options)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        small_normal(self.position, deviation=0.02 if isinstance(embed, nn.Embedding) else SERIES_POSITION_DEVIATION)

    def forward(self, x: Tensor, padding: Padding = None) -> Float[Tensor, "b classes"]:
        """The logits of each sequence; ``padding`` is True where it has ended."""
        x = self.drop(self.embed(x) + self.position(places(x, self.position)))
        for block in self.blocks:
            x = block(x, padding=padding)
        x = self.norm(x)
        if padding is None:
            return self.head(x.mean(1))
        present = (~padding).unsqueeze(-1).to(x.dtype)
        return self.head((x * present).sum(1) / present.sum(1).clamp(min=1))


class SeriesClassifier(SequenceClassifier):
    """A classifier of multivariate time series: (batch, time, channels)."""

    def __init__(
        self, channels: int, length: int, classes: int, *, width: int = 64, heads: int = 8, layers: int = 2,
        hidden: int = 128, attention: str = "softmax", dropout: float = 0.1, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            nn.Linear(channels, width), length, classes, width=width, heads=heads, layers=layers, hidden=hidden,
            attention=attention, dropout=dropout, **options,
        )  # fmt: skip

    def forward(
        self, x: Float[Tensor, "b n channels"], padding: Padding = None
    ) -> Float[Tensor, "b classes"]:  # fmt: skip
        """The logits of each series."""
        return super().forward(x, padding)


class TextClassifier(SequenceClassifier):
    """A classifier of tokens or bytes; its default sizes are the usual ones of the Long Range Arena."""

    def __init__(
        self, tokens: int, length: int, classes: int, *, width: int = 64, heads: int = 2, layers: int = 2,
        hidden: int = 128, attention: str = "softmax", dropout: float = 0.1, **options: Any,
    ) -> None:  # fmt: skip
        embed = nn.Embedding(tokens, width)
        small_normal(embed)
        super().__init__(
            embed, length, classes, width=width, heads=heads, layers=layers, hidden=hidden, attention=attention,
            dropout=dropout, **options,
        )  # fmt: skip

    def forward(self, x: Int[Tensor, "b n"], padding: Padding = None) -> Float[Tensor, "b classes"]:
        """The logits of each text."""
        return super().forward(x, padding)
