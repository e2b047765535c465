"""Texts: Aesop's fables and WikiText-2."""

import lzma
from typing import Literal

from .folder import data_file
from .reference import ReferenceSplit

FABLES, APPENDIX, ANNOUNCEMENTS = 384, 4018, 4505
"""The lines of the book where the fables, the appendix of fables and the publisher's announcements begin."""

HELD_OUT = 17_763
"""Characters that the paper's code holds out: a tenth of the book including Project Gutenberg's own text."""


def aesop(part: Literal["all", "train", "test"] = "all", *, split: ReferenceSplit = "ordinary") -> str:
    """The fables of J. H. Stickney's book, without its preface, contents and announcements.

    ``split="reference"`` includes the appendix, as the code of Irie, Csordás, Schmidhuber (2022) does, and holds out
    the last 17,763 characters; the ordinary split holds out the last tenth of the fables.
    """
    book = data_file("aesop/aesop-stickney-pg49010.txt").read_text(encoding="utf-8").split("\n")
    text = "\n".join(book[FABLES : APPENDIX if split == "ordinary" else ANNOUNCEMENTS])
    end = len(text) - (len(text) // 10 if split == "ordinary" else HELD_OUT)
    return {"all": text, "train": text[:end], "test": text[end:]}[part]


def wikitext2(part: Literal["train", "valid", "test"]) -> str:
    """A part of WikiText-2 (Merity et al. 2016), one paragraph per line."""
    file = data_file(f"wikitext-2/{part}.txt.xz", f"wikitext-2/{part}.txt")
    if file.suffix == ".xz":
        with lzma.open(file, "rt", encoding="utf-8") as text:
            return text.read()
    return file.read_text(encoding="utf-8")
