"""The recipe of a memory: how its model is made and where its examples are, as plain text. Nothing in it ever runs
by itself.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualform.data import Columns, columns_of
from dualform.errors import CorruptMemory, DualformError
from dualform.types import ClassNames

BYTES = "bytes"
"""The vocabulary that needs no file."""


@dataclass(frozen=True)
class RecipeSource:
    """Where examples come from: a file or folder, or ``package.module:factory``."""

    file: str | None = None
    """Relative to the folder of the memory, unless they have nothing in common but the root."""
    factory: str | None = None

    def __str__(self) -> str:
        return self.file or self.factory or ""

    def at(self, memory: Path) -> str:
        """The path of the file, or the name of the factory."""
        return self.factory or str((memory.resolve() / (self.file or "")).resolve())


@dataclass(frozen=True)
class Recipe:
    """What ``tape.describe`` was told; None or empty where it was told nothing."""

    model: str | None = None
    """``package.module:factory(…)``"""
    train: RecipeSource | None = None
    test: RecipeSource | None = None
    classes: tuple[str, ...] = ()
    tokenizer: RecipeSource | None = None
    """The vocabulary of token ids: a file, or ``bytes`` as the factory."""
    columns: Columns | None = None
    index: str | None = None
    length: int | None = None

    @property
    def text(self) -> str:
        """All of it as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def class_names(self) -> ClassNames:
        """The names of the classes; the columns ``label`` and the label of the table hold classes."""
        label = None if self.columns is None else self.columns.label
        names = self.classes or (() if self.columns is None else self.columns.classes)
        return ClassNames(names, frozenset(["label", *([] if label is None else [label])]))

    def lines(self) -> dict[str, str]:
        """What is said, for people to read, by name."""
        columns = self.columns or Columns()
        label = None if columns.label is None else f"label {columns.label}"
        words = [f"{name} ({len(words)} words)" for name, words in columns.categories.items()]
        scaled = f"{len(columns.scale)} scaled" if columns.scale else None
        said = {
            "model": self.model,
            "train": self.train and str(self.train),
            "test": self.test and str(self.test),
            "classes": ", ".join(self.classes or columns.classes),
            "tokenizer": self.tokenizer and str(self.tokenizer),
            "columns": "; ".join(part for part in (", ".join(columns.names), label, *words, scaled) if part),
            "index": self.index,
            "length": self.length and str(self.length),
        }
        return {name: text for name, text in said.items() if text}


def recipe_of_json(value: Mapping[str, Any] | None) -> Recipe | None:
    """A recipe from the manifest. Fields that a later version added are left out."""
    if value is None:
        return None
    try:
        columns = None if value.get("columns") is None else columns_of(value["columns"])
        classes = tuple(_text(name) for name in value.get("classes", ()))
        length = None if value.get("length") is None else int(value["length"])
        model, index = (None if value.get(name) is None else _text(value[name]) for name in ("model", "index"))
        sources = {name: _source(value.get(name)) for name in ("train", "test", "tokenizer")}
    except (TypeError, ValueError, KeyError, AttributeError, DualformError) as error:
        raise CorruptMemory(f"the recipe in the manifest is not plain text as it should be: {error}") from error
    return Recipe(model, classes=classes, columns=columns, index=index, length=length, **sources)


def _source(value: Mapping[str, Any] | None) -> RecipeSource | None:
    if value is None:
        return None
    file, factory = (None if value.get(name) is None else _text(value[name]) for name in ("file", "factory"))
    if (file is None) == (factory is None):
        raise ValueError(f"{dict(value)} names neither a file nor a factory, or both")
    return RecipeSource(file, factory)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value
