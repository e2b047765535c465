"""Film reviews with sentiment labels: IMDB (Maas et al. 2011)."""

import json
import lzma
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dualform.errors import DataNotFound

from .folder import data_file

FILE = "imdb/imdb_train25k.jsonl.xz"
HELD_OUT = 5_000
"""The number of reviews in the ``test`` part."""


class Reviews(NamedTuple):
    """Texts and their classes: 0 for a bad review, 1 for a good one."""

    texts: tuple[str, ...]
    labels: Int[Tensor, " n"]


class ByteTexts(NamedTuple):
    """Texts as integers: each byte plus 1, and 0 after the end of a text."""

    tokens: Int[Tensor, "n length"]
    padding: Bool[Tensor, "n length"]
    """True where a text has ended."""


def reviews(part: Literal["train", "test"]) -> Reviews:
    """20,000 of the 25,000 labelled training reviews of IMDB, shuffled, or the other 5,000.

    This is our own split, always the same: the 25,000 test reviews of the original are not at hand, so no number
    measured here is one of the literature. No text is in both parts: those that come twice are all in ``train``.
    """
    try:
        file = data_file(FILE)
    except DataNotFound as error:
        raise DataNotFound(
            f'{error} It has one of the 25,000 training reviews a line, as {{"label": 0 or 1, "text": "…"}}; the '
            "reviews are at https://ai.stanford.edu/~amaas/data/sentiment."
        ) from error
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    times = Counter(row["text"] for row in rows)
    order = np.random.RandomState(0).permutation(len(rows)).tolist()
    once = [i for i in order if times[rows[i]["text"]] == 1]
    held_out = set(once[:HELD_OUT])
    chosen = [i for i in order if (i in held_out) == (part == "test")]
    return Reviews(tuple(rows[i]["text"] for i in chosen), torch.tensor([rows[i]["label"] for i in chosen]))


def as_bytes(texts: Sequence[str], length: int) -> ByteTexts:
    """The first ``length`` bytes of each text in UTF-8, plus 1, with zeros behind those that are shorter."""
    tokens = np.zeros((len(texts), length), np.int64)
    for row, text in zip(tokens, texts, strict=True):
        codes = np.frombuffer(text.encode()[:length], np.uint8)
        row[: len(codes)] = codes + 1  # still a byte: none of UTF-8 is above 244
    return ByteTexts(torch.from_numpy(tokens), torch.from_numpy(tokens == 0))
