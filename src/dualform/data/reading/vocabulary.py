"""Tokens as text: bytes, a list of words or characters, or a Hugging Face tokenizer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dualform.errors import DataNotFound, QueryError, require

UNKNOWN = ("<unk>", "[UNK]")
PADDING = ("<pad>", "[PAD]")


@runtime_checkable
class Vocabulary(Protocol):
    """Converts between token ids and text."""

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; joined they are the original text."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...


@dataclass(frozen=True)
class ByteVocabulary:
    """Tokens are the bytes of UTF-8."""

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each byte: a character stands at its first byte, and its other bytes are empty."""
        text, texts = bytes(i % 256 for i in ids).decode("utf-8", errors="replace"), []
        for character in text:
            texts += [character, *[""] * (len(character.encode()) - 1 if character != "�" else 0)]
        return (texts + [""] * len(ids))[: len(ids)]

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode())


@dataclass(frozen=True)
class WordVocabulary:
    """Tokens from a list, with the separator between two tokens."""

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
        """The tokens of a text: words, or characters without a separator. Unknown ones are <unk>, if there is one."""
        parts = text.split() if self.between else list(text)
        unknown = next((self.numbers[name] for name in UNKNOWN if name in self.numbers), None)
        ids = [self.numbers.get(part, unknown) for part in parts]
        for part, number in zip(parts, ids, strict=True):
            if number is None:
                raise QueryError(
                    f"{part!r} is not in the vocabulary of {len(self.tokens):,} tokens, which has no {UNKNOWN[0]} for "
                    "unknown tokens either."
                )
        return [number for number in ids if number is not None]


@dataclass(frozen=True)
class TokenizerVocabulary:
    """A tokenizer from Hugging Face's ``tokenizers``."""

    tokenizer: Any

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds to the text before it; of parts of a character, the first stands for it."""
        texts, before, begun = [], "", None
        for end in range(1, len(ids) + 1):
            text = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
            is_part = text.endswith("�") and end < len(ids)
            text = text[:-1] if is_part else text
            texts.append(text[len(before) :] if text.startswith(before) else text)
            before = text
            if begun is not None and texts[-1]:
                texts[begun], texts[-1], begun = texts[-1], "", None
            elif begun is None and is_part and not texts[-1]:
                begun = end - 1
        return texts

    def encode(self, text: str) -> list[int]:
        """Its tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def padding_token(vocabulary: Vocabulary) -> int:
    """The number that fills up short texts: that of <pad>, if the vocabulary has it, else 0."""
    if isinstance(vocabulary, WordVocabulary):
        return next((vocabulary.numbers[name] for name in PADDING if name in vocabulary.numbers), 0)
    if isinstance(vocabulary, TokenizerVocabulary):
        numbers = (vocabulary.tokenizer.token_to_id(name) for name in PADDING)
        return next((number for number in numbers if number is not None), 0)
    return 0


def load_vocabulary(name: str | None) -> Vocabulary | None:
    """Load ``bytes``, a tokenizer.json, a .json list of tokens, or a .txt file with one token per line."""
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
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise QueryError(f"{file} is not valid JSON: {error}.") from error
    if isinstance(content, list) and all(isinstance(token, str) for token in content):
        return WordVocabulary(content, "" if max(map(len, content), default=1) == 1 else " ")
    if isinstance(content, dict) and "model" in content:
        return TokenizerVocabulary(require("tokenizers", "hf").Tokenizer.from_file(str(file)))
    raise QueryError(f"{file} holds neither a list of tokens nor a tokenizer.json.")
