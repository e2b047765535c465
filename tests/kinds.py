"""One small network for each kind of layer, with data for it, for the batteries over all kinds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 11


class Around(nn.Module):
    """A layer of some kind, and a linear layer behind it."""

    def __init__(self, body: nn.Module, width: int, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.read = body, nn.Linear(width, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.body, x))


class Tied(nn.Module):
    """A word model whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(TOKENS, 6), nn.Linear(6, 6), nn.Linear(6, TOKENS)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.embed(x)).tanh()).mean(1)[:, :3]


class Turned(nn.Module):
    """Hugging Face's ``Conv1D``, by its own name: a linear layer with its weight transposed."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d_in, d_out) / 2), nn.Parameter(torch.zeros(d_out))
        self.nf = d_out

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


Turned.__module__, Turned.__qualname__ = "transformers.pytorch_utils", "Conv1D"


@dataclass(frozen=True)
class Kind:
    """How to make a network and a batch of inputs. ``batch_dim`` is the axis of the examples in the inputs."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    layers: tuple[str, ...]
    tokens: bool = False
    batch_dim: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().to(dtype)

    def inputs(self, random: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
        if self.tokens:
            return torch.randint(TOKENS, self.shape, generator=random)
        return torch.randn(self.shape, generator=random, dtype=torch.float64).to(dtype)

    @property
    def examples(self) -> int:
        return self.shape[self.batch_dim]


def flat(body: nn.Module, x: Tensor) -> Tensor:
    return body(x).flatten(1).tanh()


def inplace(body: nn.Module, x: Tensor) -> Tensor:
    return torch.relu_(body(x)).flatten(1)


def mean(body: nn.Module, x: Tensor) -> Tensor:
    return body(x).mean(1)


def last(body: nn.Module, x: Tensor) -> Tensor:
    return body(x)[0][:, -1]


def state(body: nn.Module, x: Tensor) -> Tensor:
    states = body(x.transpose(0, 1))[1]
    return states[0][-1] + states[1][-1] if isinstance(states, tuple) else states[-1]


def attention(body: nn.Module, x: Tensor) -> Tensor:
    return body(x, x, x, need_weights=False)[0].mean(1)


def across(body: nn.Module, x: Tensor) -> Tensor:
    return body(x[:3], x, x)[0].mean(0)


KINDS: dict[str, Kind] = {
    "linear": Kind(lambda: Around(nn.Linear(4, 5), 5, flat), (5, 4), ("body",)),
    "linear, turned": Kind(lambda: Around(Turned(4, 5), 5, mean), (5, 3, 4), ("body",)),
    "conv1d": Kind(lambda: Around(nn.Conv1d(2, 4, 3, stride=2, padding=1), 12, flat), (4, 2, 6), ("body",)),
    "conv1d, depthwise": Kind(
        lambda: Around(nn.Conv1d(4, 8, 3, dilation=2, padding=2, groups=4), 48, inplace), (4, 4, 6), ("body",)
    ),
    "conv2d": Kind(lambda: Around(nn.Conv2d(2, 4, 3, padding=1), 64, flat), (3, 2, 4, 4), ("body",)),
    "conv2d, grouped": Kind(
        lambda: Around(nn.Conv2d(4, 6, (2, 3), stride=2, padding=1, groups=2, bias=False), 54, inplace),
        (3, 4, 4, 6),
        ("body",),
    ),
    "conv2d, reflected": Kind(
        lambda: Around(nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"), 48, flat), (3, 2, 4, 4), ("body",)
    ),
    "embedding": Kind(lambda: Around(nn.Embedding(TOKENS, 5), 5, mean), (4, 6), ("body",), tokens=True),
    "embedding, padded": Kind(
        lambda: Around(nn.Embedding(TOKENS, 5, padding_idx=1, scale_grad_by_freq=True), 5, mean),
        (4, 6),
        ("body",),
        tokens=True,
    ),
    "embedding, tied": Kind(Tied, (4, 6), ("embed", "out"), tokens=True),
    "lstm": Kind(lambda: Around(nn.LSTM(4, 5, batch_first=True), 5, last), (4, 6, 4), ("body",)),
    "lstm, deep": Kind(
        lambda: Around(nn.LSTM(4, 5, num_layers=2, bidirectional=True), 5, state),
        (4, 6, 4),
        ("body.l0", "body.l0_reverse", "body.l1", "body.l1_reverse"),
    ),
    "gru": Kind(
        lambda: Around(nn.GRU(4, 5, batch_first=True), 5, last), (4, 6, 4), ("body.l0.input", "body.l0.hidden")
    ),
    "rnn": Kind(lambda: Around(nn.RNN(4, 5), 5, state), (4, 6, 4), ("body",)),
    "attention": Kind(
        lambda: Around(nn.MultiheadAttention(4, 2, batch_first=True), 4, attention),
        (4, 5, 4),
        ("body.in_proj", "body.out_proj"),
    ),
    "attention, across": Kind(
        lambda: Around(nn.MultiheadAttention(4, 2), 4, across),
        (6, 4, 4),
        ("body.in_proj", "body.out_proj"),
        batch_dim=1,
    ),
}
