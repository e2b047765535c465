"""Texts as numbers, cut into streams that are read in parallel."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dualform import data

from .settings import LanguageSettings


@dataclass(frozen=True)
class Text:
    """A training and a test text as numbers, and the tokens they stand for."""

    tokens: list[str]
    train: Tensor
    test: Tensor
    between: str
    """Separator between two tokens in written text."""

    def words(self, ids: Tensor) -> str:
        """The text of some tokens."""
        return self.between.join(self.tokens[i] for i in ids.tolist())


@cache
def read(name: str) -> Text:
    """The paper's texts: Aesop's fables by characters, WikiText-2 by words, where a line's end is a word too."""
    if name == "aesop":
        train, test = (list(data.aesop(part, split="reference")) for part in ("train", "test"))
        between = ""
    else:
        train, test = (_words(data.wikitext2(part)) for part in ("train", "test"))
        between = " "
    tokens = sorted(set(train) | set(test)) if name == "aesop" else list(dict.fromkeys(train))
    number = {token: i for i, token in enumerate(tokens)}
    ids = [torch.tensor([number[token] for token in part]) for part in (train, test)]
    return Text(tokens, *ids, between)


def _words(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in (*line.split(), "<eos>")]


def batches(settings: LanguageSettings, done: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    """For each update: start positions, inputs, targets, and whether the state is reset.

    The text is cut into as many streams as the batch has rows; an epoch reads all of them once, a stretch at a time.
    """
    ids = read(settings.text).train
    length = (len(ids) - 1) // settings.batch
    begins = torch.arange(settings.batch) * length
    random = torch.Generator().manual_seed(1000 + settings.seed)
    stretches = length // settings.unroll
    for update in range(settings.updates):
        place = update % stretches
        forgotten = bool(torch.rand((), generator=random) < settings.reset) or place == 0
        start = begins + place * settings.unroll
        index = start.unsqueeze(1) + torch.arange(settings.unroll)
        if update >= done:
            yield start, ids[index], ids[index + 1], forgotten


def titles() -> list[tuple[int, str]]:
    """Start position and title of each article in WikiText-2."""
    articles, at = [], 0
    for line in data.wikitext2("train").splitlines():
        words = line.split()
        if len(words) > 2 and words[0] == words[-1] == "=" and words[1] != "=":
            articles.append((at, " ".join(words[1:-1])))
        at += len(words) + 1
    return articles
