"""The model and the examples of a memory: from the options of a command or a call, else from the recipe."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from dualform.data import Columns, Vocabulary, load_vocabulary
from dualform.errors import DataNotFound, ModelMismatch, QueryError
from dualform.explain import Memory, open_memory
from dualform.explain.weights import first_difference
from dualform.store import Manifest, Recipe, RecipeSource, load_manifest

from .consent import is_own, require_consent
from .examples import Examples, load_examples
from .factory import make_model
from .views import Explorer, WorkQueue

Role = Literal["train", "test"]


@dataclass(frozen=True)
class DataOptions:
    """What a command was told about the model and the data; None where it was told nothing."""

    model: str | None = None
    train: str | None = None
    test: str | None = None
    classes: str | Sequence[str] | None = None
    tokens: str | None = None
    index: str | None = None
    length: int | None = None
    columns: str | None = None
    label: str | None = None
    categories: str | None = None
    flags: tuple[str, str] = ("--data", "--test")
    """The options for training and test examples, for errors."""
    model_flag: str = "--model package.module:factory"
    trust_flag: str = "--trust"


@dataclass(frozen=True)
class Described:
    """A memory with its model and its examples."""

    memory: Memory
    options: DataOptions
    trust: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    held: Mapping[str, Any] = field(default_factory=dict)
    """Objects of a program in place of names: a ``model``, ``train`` and ``test`` data, a ``vocabulary``."""

    @cached_property
    def network(self) -> nn.Module:
        """The model. The weights come from the memory."""
        if "model" in self.held:
            return self.held["model"]
        name, flag = self.options.model or self.recipe.model, self.options.model_flag
        if name is None:
            raise QueryError(
                f"the memory {self.memory.path} does not say how its model is made: give {flag}, or call "
                "tape.describe(model=…) while you record, so that it is remembered."
            )
        self._ask_for_consent()
        model = make_model(name)
        if difference := first_difference(self.memory.store.manifest.parameters, model, alone=True):
            source = "the recipe names" if self.options.model is None else f"{flag.partition(' ')[0]} names"
            raise ModelMismatch(
                f"{name}, which {source}, makes a {type(model).__name__} that does not fit the memory at "
                f"{self.memory.path}: {difference}. Give {flag} for the right one."
            )
        return model

    @cached_property
    def train(self) -> Examples | None:
        """The training examples, if anybody said where they are."""
        return self._examples("train", self.options.train, self.recipe.train)

    @cached_property
    def test(self) -> Examples | None:
        """The examples to ask about, if anybody said where they are."""
        return self._examples("test", self.options.test, self.recipe.test)

    def require(self, role: Role) -> Examples:
        """The training or test examples; an error that names the option if nobody said where they are."""
        examples = self.train if role == "train" else self.test
        if examples is None:
            option = self.options.flags[role == "test"]
            raise QueryError(
                f"the memory {self.memory.path} does not say where its {role} examples are: give {option}."
            )
        return examples

    def asked(self, rows: Sequence[int]) -> Examples:
        """Some of the test examples; without test examples some of the training examples."""
        if self.options.test is None and self.recipe.test is None:
            if self.train is None:
                raise QueryError(
                    f"the memory {self.memory.path} does not say where its examples are: give --data FILE to ask about."
                )
            return self.train.only(rows)
        examples = self._examples("test", self.options.test, self.recipe.test, rows)
        assert examples is not None
        return examples

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """What turns token ids into text."""
        recipe = self.recipe.tokenizer
        if "vocabulary" in self.held:
            return self.held["vocabulary"]
        return load_vocabulary(self.options.tokens or (recipe and recipe.at(self.memory.path)))

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, if they are known."""
        columns = self.columns if self.train is None else self.train.columns
        named = _split(self.options.classes) or list(self.recipe.classes)
        return named or list(columns.classes if columns is not None else ()) or None

    @property
    def columns(self) -> Columns | None:
        """The columns of the training table: those of the recipe, changed by the options."""
        if self.recipe.columns is None:
            return None
        return self.recipe.columns.chosen(_split(self.options.columns), self.options.label, None)

    @property
    def index(self) -> str:
        """The column that holds the index of each visit's training example."""
        return self.options.index or self.recipe.index or "index"

    def explorer(self, work_queue: WorkQueue | None = None) -> Explorer:
        """The views of the memory. Without test examples they ask about training examples."""
        train, test = self.train, self.test
        return Explorer(
            self.memory, self.network, train, test, self.classes, self.index, work_queue=work_queue or WorkQueue()
        )

    def _examples(
        self, role: Role, option: str | None, source: RecipeSource | None, rows: Sequence[int] | None = None
    ) -> Examples | None:  # fmt: skip
        name: Any = self.held.get(role, option)
        if isinstance(name, Examples):
            return name
        if name is None and source is not None:
            name = source.at(self.memory.path)
            if source.factory is not None:
                self._ask_for_consent()
            elif not Path(name).exists():
                flag = self.options.flags[role == "test"]
                raise DataNotFound(
                    f"the recipe of {self.memory.path} names its {role} examples as {source}, and there is no file "
                    f"{name}. Give {flag} the file of today."
                )
        if name is None:
            return None
        columns = self.columns
        if role == "test" and self.train is not None and self.train.columns is not None:
            columns = self.train.columns
        classes = _split(self.options.classes) or list(self.recipe.classes) or None
        return load_examples(
            name, self.network, columns=columns or _split(self.options.columns),
            label=None if columns else self.options.label, categories=_split(self.options.categories) or (),
            classes=None if columns is not None and columns.classes else classes, vocabulary=self.vocabulary,
            length=self.options.length or self.recipe.length, rows=rows, learn=role == "train" or role in self.held,
        )  # fmt: skip

    def _ask_for_consent(self) -> None:
        """Raise an error unless the user agreed to the code that the recipe names and no option replaces."""
        _require_agreement(self.memory.path, self.recipe, self.options, self.trust, self.held)


@dataclass(frozen=True)
class MemoryToOpen:
    """A memory that is not open yet, of which only the manifest was read, with the options of a command."""

    path: Path
    options: DataOptions
    trust: bool = False

    @cached_property
    def manifest(self) -> Manifest:
        """What the memory says of itself."""
        return load_manifest(self.path)

    @property
    def recipe(self) -> Recipe:
        """How the model is made and where the examples are."""
        return self.manifest.recipe or Recipe()

    @property
    def is_own_network(self) -> bool:
        """Whether the model is one of dualform's own, so that no other code is imported."""
        name = self.options.model or self.recipe.model
        return name is not None and is_own(name)

    def name_of(self, role: Role) -> str | None:
        """The file or factory of the training or test examples; None if nobody said where they are."""
        option, source = (getattr(place, role) for place in (self.options, self.recipe))
        return option or (None if source is None else source.at(self.path))

    def open(self) -> Described:
        """Open the memory, with its recipe and the options that win over it."""
        memory = open_memory(self.path)
        return Described(memory, self.options, self.trust, memory.recipe or Recipe())

    def require_consent(self) -> None:
        """Raise an error unless the user agreed to the code that the recipe names and no option replaces."""
        _require_agreement(self.path, self.recipe, self.options, self.trust)


def described(path: Path, options: DataOptions, trust: bool = False) -> Described:
    """Open a memory, with its recipe and the options that win over it."""
    return MemoryToOpen(path, options, trust).open()


def _require_agreement(
    path: Path, recipe: Recipe, options: DataOptions, trust: bool, held: Mapping[str, Any] | None = None
) -> None:
    sources = [source and source.factory for source in (recipe.train, recipe.test)]
    replaced = {"model": options.model, "train": options.train, "test": options.test}
    typed = [name for name in replaced.values() if name is not None]
    others = ((held or {}).get(role, name) for role, name in replaced.items())
    named = zip((recipe.model, *sources), others, strict=True)
    factories = [name for name, other in named if name is not None and other is None]
    require_consent(
        path, recipe, factories, trust=trust, typed=typed,
        model_flag=options.model_flag.partition(" ")[0], trust_flag=options.trust_flag,
    )  # fmt: skip


def described_objects(
    memory: Memory, options: DataOptions, trust: bool, held: Mapping[str, Any]
) -> Described:  # fmt: skip
    """A memory with what a program holds of its model and examples; names among these are options."""
    names = {role: os.fspath(value) for role, value in held.items() if isinstance(value, str | os.PathLike)}
    objects = {role: value for role, value in held.items() if value is not None and role not in names}
    if "vocabulary" in names:
        names["tokens"] = names.pop("vocabulary")
    return Described(memory, replace(options, **names), trust, memory.recipe or Recipe(), objects)


def _split(names: str | Sequence[str] | None) -> list[str] | None:
    if names is None or not isinstance(names, str):
        return None if names is None else list(names)
    return [name.strip() for name in names.split(",") if name.strip()]
