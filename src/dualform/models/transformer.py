"""A transformer language model, which predicts the next token."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from .block import TransformerBlock, places, small_normal


class TransformerLM(nn.Module):
    """Tokens with learned positions, causal transformer blocks, and a linear layer to the next token.

    ``tied`` lets the last layer share the weights of the embedding.
    """

    def __init__(
        self, tokens: int, length: int, *, width: int = 64, heads: int = 4, layers: int = 2, hidden: int | None = None,
        attention: str = "softmax", dropout: float = 0.0, tied: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        if attention.startswith("conv1d"):
            options = {"one_sided": True} | options
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, hidden or 4 * width, attention=attention, dropout=dropout, **options)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=not tied)
        small_normal(self.embed, self.position)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
        """The logits of the next token at every position."""
        x = self.drop(self.embed(tokens) + self.position(places(tokens, self.position)))
        for block in self.blocks:
            x = block(x, causal=True)
        return self.head(self.norm(x))
