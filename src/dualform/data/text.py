"""Texts: Aesop's fables and WikiText-2."""

import lzma
from typing import Literal

from .folder import data_file


def aesop() -> str:
    """The fables of J. H. Stickney's book, without its preface, contents and announcements."""
    text = data_file("aesop/aesop-stickney-pg49010.txt").read_text(encoding="utf-8")
    return "\n".join(text.split("\n")[384:4018])


def wikitext2(part: Literal["train", "valid", "test"]) -> str:
    """A part of WikiText-2, one paragraph a line."""
    with lzma.open(data_file(f"wikitext-2/{part}.txt.xz"), "rt", encoding="utf-8") as file:
        return file.read()
