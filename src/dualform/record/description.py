"""``tape.describe``: how the recorded model is made and where its examples are, kept in the memory as plain text."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from dualform.data import Columns, DataRows, load_vocabulary
from dualform.errors import DataNotFound, QueryError
from dualform.store import BYTES, Recipe, RecipeSource, is_factory_name, parse_factory_name


def make_recipe(
    memory: Path,
    *,
    model: str | None = None,
    train: Any = None,
    test: Any = None,
    classes: str | Sequence[str] | None = None,
    tokenizer: str | os.PathLike | None = None,
    columns: Columns | str | Sequence[str] | None = None,
    index: str | None = None,
    length: int | None = None,
) -> Recipe:
    """The recipe of a memory at a path; an error if something cannot be kept as plain text, or is not there."""
    if model is not None:
        if not isinstance(model, str):
            raise QueryError(
                f"describe(model=…) takes the name of what makes the model, not a {type(model).__name__}: "
                "'package.module:factory', as in 'train:make_model'."
            )
        if parse_factory_name(model, "the model").module == "__main__":
            raise QueryError(f"'{model}' is another module in every program: name its file, as in 'train:make_model'.")
    if columns is None and isinstance(train, DataRows):
        columns = train.columns
    if isinstance(train, DataRows) and train.vocabulary is not None:  # texts are padded as training saw them
        tokenizer, length = tokenizer or train.tokens, length or train.inputs.shape[1]
    if columns is not None and not isinstance(columns, Columns):
        columns = Columns((columns,) if isinstance(columns, str) else tuple(columns))
    names = [name.strip() for name in classes.split(",")] if isinstance(classes, str) else list(classes or ())
    tokens = None if tokenizer is None else os.fspath(tokenizer)
    if tokens is not None:
        load_vocabulary(tokens)
    return Recipe(
        model,
        _source("train", train, memory),
        _source("test", test, memory),
        tuple(map(str, names)) or (columns.classes if columns is not None else ()),
        RecipeSource(factory=BYTES) if tokens == BYTES else _source("tokenizer", tokens, memory),
        columns,
        index,
        None if length is None else int(length),
    )  # fmt: skip


def make_recipe_of(memory: Path, described: Mapping[str, Any] | None) -> Recipe | None:
    """The recipe from the option ``describe=`` of ``record``."""
    if described is None:
        return None
    names = [name for name in signature(make_recipe).parameters if name != "memory"]
    for name in described:
        if name not in names:
            raise QueryError(f"describe= has no '{name}': it takes {', '.join(names)}.")
    return make_recipe(memory, **described)


def moved_recipe(recipe: Recipe, memory: Path, to: Path) -> Recipe:
    """The recipe of a memory for another one: its paths lead to the same files from there."""

    def moved(source: RecipeSource | None) -> RecipeSource | None:
        if source is None or source.file is None:
            return source
        return RecipeSource(_kept_path(Path(source.at(memory)), to.resolve()))

    return replace(
        recipe, train=moved(recipe.train), test=moved(recipe.test), tokenizer=moved(recipe.tokenizer)
    )  # fmt: skip


def _source(role: str, value: Any, memory: Path) -> RecipeSource | None:
    if value is None:
        return None
    if isinstance(value, DataRows) and value.source is not None:
        value = value.source
    if not isinstance(value, str | os.PathLike):
        raise QueryError(
            f"describe({role}=…) keeps a name, and a {type(value).__name__} has none: give a file that holds the "
            "examples, or package.module:factory."
        )
    name = os.fspath(value)
    if is_factory_name(name) and not Path(name).exists():
        parse_factory_name(name, f"the {role} examples")
        return RecipeSource(factory=name)
    if not Path(name).exists():
        raise DataNotFound(f"describe({role}=…) names {name}, but there is no such file. Write it first.")
    return RecipeSource(_kept_path(Path(name).resolve(), memory.resolve()))


def _kept_path(file: Path, memory: Path) -> str:
    """The path relative to the memory, if they have more in common than the root of the file system."""
    try:
        common = os.path.commonpath([file, memory])
    except ValueError:  # on another drive
        return str(file)
    return str(file) if common == file.anchor else Path(os.path.relpath(file, memory)).as_posix()
