"""The networks and losses that ``survey.py`` and ``survey_peers.py`` share. It needs nothing but torch."""

import torch
from torch import nn
from torch.nn import functional as F

RATES = (0.1, 0.1, 0.05)
"""The learning rates of the checkpoints."""


class RowAttention(nn.Module):
    """A digit as a sequence of its eight rows: one block of attention and a small network, LayerNorm before both."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.embed, self.norm1, self.norm2 = nn.Linear(8, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow, self.head = nn.Linear(width, 64), nn.Linear(64, width), nn.Linear(width, 10)
        self.places = nn.Parameter(0.1 * torch.randn(8, width))

    def forward(self, x):
        x = self.embed(x.reshape(-1, 8, 8)) + self.places
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.head(x.mean(1))


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


NETWORKS = {"MLP 64-128-64-10": mlp, "CNN 16-32 channels": cnn, "Transformer, 8 tokens × 32": RowAttention}


def scored_layers(model):
    """The names of the layers that take part: those that all methods know."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def losses(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")
