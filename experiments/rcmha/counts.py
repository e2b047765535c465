"""Tables of counts: how well frequencies, and pairs of neighbours, say what comes next. A network should do better."""

import math
from typing import Any

import torch
from torch import Tensor

from .settings import CountSettings
from .texts import read


def counted(settings: CountSettings) -> dict[str, Any]:
    """Bits a symbol of the validation text, by frequencies in the training text, and by pairs of neighbours in it.

    Behind each symbol one more pair is taken to have been seen, shared out by frequencies, and of each symbol one more:
    so nothing has no chance at all.
    """
    text = read(settings.text)
    return of(text.train, text.valid[: settings.validated + 1], len(text.symbols))


def of(train: Tensor, valid: Tensor, size: int) -> dict[str, Any]:
    """The same of two texts with so many symbols."""
    single = (torch.bincount(train, minlength=size) + 1).double()
    single /= single.sum()
    before, after = valid[:-1], valid[1:]
    pairs = times(train[:-1] * size + train[1:], before * size + after)
    firsts = times(train[:-1], before)
    double = (pairs + single[after]) / (firsts + 1)
    return {"frequencies": about(single[after]), "pairs": about(double), "tokens": len(after)}


def times(among: Tensor, wanted: Tensor) -> Tensor:
    """How often some numbers occur among others."""
    found, count = among.unique(return_counts=True)
    at = torch.searchsorted(found, wanted).clamp(max=len(found) - 1)
    return torch.where(found[at] == wanted, count[at], 0).double()


def about(chances: Tensor) -> dict[str, float]:
    """The loss of what came, by its chances, in nats and bits; and the perplexity."""
    loss = float(-chances.log().mean())
    return {"loss": loss, "bits": loss / math.log(2), "perplexity": math.exp(loss)}
