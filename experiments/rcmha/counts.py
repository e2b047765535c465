"""Unigram and bigram baselines that a network should beat."""

import math
from typing import Any

import torch
from torch import Tensor

from .settings import CountSettings
from .texts import read


def counted(settings: CountSettings) -> dict[str, Any]:
    """Bits per symbol of the validation text under unigram and bigram counts of the training text.

    Smoothing: each symbol counts once more, and each symbol has one more successor, distributed by the unigram
    frequencies. So no probability is zero.
    """
    text = read(settings.text)
    return of(text.train, text.valid[: settings.validated + 1], len(text.symbols))


def of(train: Tensor, valid: Tensor, size: int) -> dict[str, Any]:
    """Unigram and bigram losses of a validation text, given a training text and the number of symbols."""
    single = (torch.bincount(train, minlength=size) + 1).double()
    single /= single.sum()
    before, after = valid[:-1], valid[1:]
    pairs = times(train[:-1] * size + train[1:], before * size + after)
    firsts = times(train[:-1], before)
    double = (pairs + single[after]) / (firsts + 1)
    return {"frequencies": about(single[after]), "pairs": about(double), "tokens": len(after)}


def times(among: Tensor, wanted: Tensor) -> Tensor:
    """How often each wanted number occurs."""
    found, count = among.unique(return_counts=True)
    at = torch.searchsorted(found, wanted).clamp(max=len(found) - 1)
    return torch.where(found[at] == wanted, count[at], 0).double()


def about(chances: Tensor) -> dict[str, float]:
    """Loss in nats and bits, and perplexity, from the probabilities of the true symbols."""
    loss = float(-chances.log().mean())
    return {"loss": loss, "bits": loss / math.log(2), "perplexity": math.exp(loss)}
