"""WikiText-2 as numbers, in characters or words, cut into streams that are read in parallel."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform import data

RARE, LEAST = "�", 100
"""Characters rarer than this in the training text share one symbol."""
TextName = Literal["characters", "words"]


@dataclass(frozen=True)
class Text:
    """A training and a validation text as numbers, and the symbols they stand for."""

    symbols: list[str]
    train: Tensor
    valid: Tensor
    between: str
    """Separator between two symbols in written text."""

    def written(self, ids: Tensor) -> str:
        """The text of some symbols."""
        return self.between.join(self.symbols[i] for i in ids.tolist())


@cache
def read(name: TextName) -> Text:
    """All words of WikiText-2, where a line's end is a word too; or its characters, the rare ones as one symbol."""
    train, valid = (data.wikitext2(part) for part in ("train", "valid"))
    return by_words(train, valid) if name == "words" else by_characters(train, valid)


def by_words(train: str, valid: str) -> Text:
    """Split into words, numbered by first occurrence."""
    parts = [[word for line in text.splitlines() for word in (*line.split(), "<eos>")] for text in (train, valid)]
    symbols = list(dict.fromkeys(parts[0]))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    ids = [torch.tensor([number[word] for word in part]) for part in parts]
    return Text(symbols, ids[0], ids[1], " ")


def by_characters(train: str, valid: str) -> Text:
    """Split into characters, numbered by code point after the symbol for rare ones."""
    codes = [np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) for text in (train, valid)]
    known, times = np.unique(codes[0], return_counts=True)
    known = known[times >= LEAST]
    places = (np.searchsorted(known, each).clip(max=len(known) - 1) for each in codes)
    ids = [torch.from_numpy(np.where(known[at] == each, at + 1, 0)) for at, each in zip(places, codes, strict=True)]
    return Text([RARE, *map(chr, known)], ids[0], ids[1], "")


class Segment(NamedTuple):
    """One step of all streams: start positions, inputs, targets, and whether the streams start over."""

    start: Tensor
    x: Tensor
    y: Tensor
    again: bool


def segments(ids: Tensor, streams: int, length: int, count: int) -> Iterator[Segment]:
    """Steps through a text that is cut into streams; at their end the streams start over."""
    long = (len(ids) - 1) // streams
    steps = max(1, long // length)
    begins = torch.arange(streams) * long
    for step in range(count):
        start = begins + step % steps * length
        index = start.unsqueeze(1) + torch.arange(min(length, long))
        yield Segment(start, ids[index], ids[index + 1], step % steps == 0)
