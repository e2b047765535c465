"""A transformer block with any attention of the table. Its parts have the names that timm gives them."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from dualform.arguments import one_of
from dualform.attention import Padding, build
from dualform.errors import SizeError

Activation = Literal["gelu", "relu"]


class Feedforward(nn.Module):
    """Two linear layers with a GELU (or a ReLU) between them, token by token."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, activation: Activation = "gelu") -> None:
        super().__init__()
        act = nn.GELU() if one_of("activation", activation, ("gelu", "relu")) == "gelu" else nn.ReLU()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), act, nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b n D"]) -> Float[Tensor, "b n D"]:
        """The new tokens."""
        return self.fc2(self.drop(self.act(self.fc1(x))))


class TransformerBlock(nn.Module):
    """Attention and a feedforward network, each after a normalisation and with a skip connection.

    ``attention`` is a name in the table of attention layers, ``options`` are the options of that layer, such as
    ``scales`` or ``eps``. ``attention_dropout`` applies to attention weights, ``dropout`` to the outputs of attention
    and of the feedforward network.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, attention: str = "softmax", dropout: float = 0.0,
        attention_dropout: float = 0.0, norm_eps: float = 1e-5, activation: Activation = "gelu", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, norm_eps), nn.LayerNorm(width, norm_eps)
        self.attn = build(attention, width, heads, dropout=attention_dropout, **options)
        self.mlp = Feedforward(width, hidden, dropout, activation)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b n D"], *, memory: Float[Tensor, "b m D"] | None = None, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b n D"]:  # fmt: skip
        """The tokens after this block. ``memory`` has earlier tokens to attend to, after the same normalisation.

        ``padding`` then covers both.
        """
        near = self.norm1(x)
        context = None if memory is None else torch.cat([self.norm1(memory), near], 1)
        x = x + self.drop(self.attn(near, context, padding=padding, causal=causal))
        return x + self.drop(self.mlp(self.norm2(x)))


def small_normal(*embeddings: nn.Embedding, deviation: float = 0.02) -> None:
    """Initialise embeddings from a truncated normal distribution."""
    for embedding in embeddings:
        nn.init.trunc_normal_(embedding.weight, std=deviation)


def places(x: Shaped[Tensor, "b n *d"], position: nn.Embedding) -> Int[Tensor, "b n"]:
    """The position of each token, for each example of the batch, so that recorded positions belong to examples."""
    length = x.shape[1]
    if length > position.num_embeddings:
        raise SizeError(
            f"a sequence of {length} tokens is longer than the {position.num_embeddings} positions of this model. "
            "Shorten it, or build the model with a larger length."
        )
    return torch.arange(length, device=x.device).expand(len(x), -1)
