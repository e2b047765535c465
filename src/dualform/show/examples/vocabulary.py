"""Tokens as people read them: bytes, a list of words or characters, or a tokenizer of Hugging Face."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dualform.errors import DataNotFound, QueryError, require

UNKNOWN = ("<unk>", "[UNK]")


@runtime_checkable
class Vocabulary(Protocol):
    """What token numbers stand for."""

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; side by side they are what was written."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...


@dataclass(frozen=True)
class ByteVocabulary:
    """Every token is a byte of UTF-8."""

    def decode(self, ids: Sequence[int]) -> list[str]:
        """A character stands at its first byte; the others are empty."""
        text, found = bytes(i % 256 for i in ids).decode("utf-8", errors="replace"), []
        for character in text:
            found += [character, *[""] * (len(character.encode()) - 1 if character != "�" else 0)]
        return (found + [""] * len(ids))[: len(ids)]

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode())


@dataclass(frozen=True)
class WordVocabulary:
    """A list of tokens, with what is written between two of them."""

    tokens: Sequence[str]
    between: str = ""

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each token."""
        return {token: i for i, token in enumerate(self.tokens)}

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Each token with what is written after it."""
        return [self.tokens[i] + self.between if 0 <= i < len(self.tokens) else "�" for i in ids]

    def encode(self, text: str) -> list[int]:
        """Words, or characters where nothing is written between tokens. What is not known is <unk>, if there is one."""
        parts = text.split() if self.between else list(text)
        unknown = next((self.numbers[name] for name in UNKNOWN if name in self.numbers), None)
        ids = [self.numbers.get(part, unknown) for part in parts]
        for part, number in zip(parts, ids, strict=True):
            if number is None:
                raise QueryError(
                    f"the network does not know {part!r}: it is not among its {len(self.tokens):,} tokens, and there "
                    f"is no {UNKNOWN[0]} for what is not."
                )
        return [number for number in ids if number is not None]


@dataclass(frozen=True)
class TokenizerVocabulary:
    """A tokenizer of Hugging Face's ``tokenizers``."""

    tokenizer: Any

    def decode(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text before it."""
        found, before = [], ""
        for end in range(1, len(ids) + 1):
            text = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
            text = text[:-1] if text.endswith("�") and end < len(ids) else text
            found.append(text[len(before) :] if text.startswith(before) else text)
            before = text
        return found

    def encode(self, text: str) -> list[int]:
        """Its tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def load_vocabulary(name: str | None) -> Vocabulary | None:
    """``bytes``; a tokenizer.json; a .json list of tokens; or a .txt file with one token a line."""
    if name is None:
        return None
    if name == "bytes":
        return ByteVocabulary()
    file = Path(name)
    if not file.is_file():
        raise DataNotFound(
            f"there is no file {file}. Give --tokens 'bytes', a list of tokens (.json, .txt) or a tokenizer.json."
        )
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".txt":
        return WordVocabulary(text.splitlines(), " ")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise QueryError(f"{file} is no JSON: {error}.") from error
    if isinstance(found, list) and all(isinstance(token, str) for token in found):
        return WordVocabulary(found, "" if max(map(len, found), default=1) == 1 else " ")
    if isinstance(found, dict) and "model" in found:
        return TokenizerVocabulary(require("tokenizers", "hf").Tokenizer.from_file(str(file)))
    raise QueryError(f"{file} is neither a list of tokens nor a tokenizer.json.")
