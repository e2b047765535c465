"""The networks, losses and targets that our methods and the peers' share. It needs nothing but torch."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

WORDS, CONTEXT = 1000, 48
"""The vocabulary of the language model, and the words of a passage that it predicts."""


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """Two convolutions of 16 and 32 channels, for images of 28 × 28."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Causal attention and a small network, each with LayerNorm before it and a sum behind it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class LanguageModel(nn.Module):
    """A small transformer: a passage of words (b, n) gives the logits of the words that follow (b, n, words)."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        return self.head(self.norm(self.blocks(x)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "digits-relu": lambda: mlp(64, 128, 64, 10),
    "digits-gelu": lambda: mlp(64, 128, 64, 10, activation=nn.GELU),
    "mnist": lambda: mlp(784, 16, 16, 10),
    "cnn": cnn,
    "language": LanguageModel,
}
"""The networks by name. The language model learns with labels (b, n), the others with labels (b)."""

OPTIMIZERS = {"SGD": optim.SGD, "Adam": optim.Adam, "AdamW": optim.AdamW}


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """What the loop backpropagates: the mean cross entropy of a batch, over all its words in the language model."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def targets(outputs: Tensor, labels: Tensor) -> Tensor:
    """What is asked, one number a query: the log odds of the right class; for a passage, minus its mean loss."""
    if labels.ndim == 2:
        return -F.cross_entropy(outputs.mT, labels, reduction="none").mean(1)
    right = outputs.gather(1, labels[:, None])[:, 0]
    others = outputs.scatter(1, labels[:, None], float("-inf"))
    return right - others.logsumexp(1)
