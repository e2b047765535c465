"""The explorer: a memory, the network it is of, and examples to ask about."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attention import ScaledHeadAttention
from dualform.errors import QueryError
from dualform.explain import Memory, Spotlight, is_preconditioned
from dualform.types import LayerInfo

from ..examples import Examples, ShownExample
from ..inputs import as_inputs, together
from ..text import need_logits
from .work import PendingWork, Tell, WorkDesk

SETS = ("test", "train", "own")
MOST_OWN, BATCH = 200, 128
"""Inputs that visitors may bring, and examples that are asked about at a time."""

MANY = 60
"""Groups of a column that can still be looked at one by one."""


@dataclass(frozen=True)
class ExamplePlace:
    """One example: in which set, and its number there."""

    set: str
    row: int


@dataclass(frozen=True)
class ExampleHeader:
    """What all pages about one example show of it: how many there are in its set, and what it is."""

    place: ExamplePlace
    count: int
    stride: int
    shown: ShownExample
    label: int | None
    label_name: str | None


@dataclass(frozen=True)
class ClassScore:
    """One class that the network can say."""

    number: int
    name: str
    logit: float
    probability: float | None


@dataclass
class Explorer:
    """What all views ask. ``index`` is the column that says which training example a visit was."""

    memory: Memory
    model: nn.Module
    train: Examples | None = None
    test: Examples | None = None
    classes: Sequence[str] | None = None
    index: str = "index"
    title: str = ""
    desk: WorkDesk = field(default_factory=WorkDesk)
    own: list[tuple[str, Tensor]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.memory.store.need_steps()
        self.memory.fits(self.model)
        self.title = self.title or self.memory.path.name
        self._counts: dict[str, dict[Any, int]] = {}
        self._groups: dict[str, list[Any]] = {}
        self._positions: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------- what there is

    @property
    def layers(self) -> tuple[str, ...]:
        """The recorded layers."""
        return self.memory.layers

    @cached_property
    def columns(self) -> list[str]:
        """Columns of the visits to group by, the most telling first: those that were noted before our own."""
        names = self.memory.store.visits.column_names
        noted = [name for name in names if name not in ("visit", "row", "step", self.index)]
        first = [name for name in ("label", "source") if name in noted]
        return [
            *first,
            *(name for name in noted if name not in first),
            *(n for n in (self.index, "step") if n in names),
        ]

    def info(self, layer: str) -> LayerInfo:
        """What is known of a layer."""
        return self.memory.store.layer(layer)[0]

    def positions(self, layer: str) -> int:
        """How many rows of an example go through a layer."""
        if layer not in self._positions:
            calls = self.memory.store.calls(self.info(layer).name)
            self._positions[layer] = int((calls.rows // np.maximum(1, calls.batch)).max(initial=1))
        return self._positions[layer]

    def tokens(self, layer: str, position: int) -> tuple[int, int]:
        """The first token that a row of a layer is of, and how many: heads may pool tokens before they project them."""
        path, _, scale = layer.rpartition(".")  # blocks.0.attn.key.4
        parent, _, name = path.rpartition(".")
        heads = dict(self.model.named_modules()).get(parent)
        if not isinstance(heads, ScaledHeadAttention) or name not in ("key", "value"):
            return position, 1
        first = heads.class_tokens
        if position < first or self.positions(layer) == max(map(self.positions, self.layers)):
            return position, 1
        return first + (position - first) * int(scale), int(scale) if heads.pool == "avg" else 1

    def groups(self, column: str) -> list[Any]:
        """The values of a column, sorted."""
        if column not in self._groups:
            values = [value for value in self.counts(column) if value is not None]
            self._groups[column] = sorted(values, key=lambda value: (str(type(value)), value))
        return self._groups[column]

    def counts(self, column: str) -> dict[Any, int]:
        """How many visits each group of a column has."""
        if column not in self._counts:
            counted = self.memory.store.visits[column].value_counts()
            self._counts[column] = {line["values"]: line["counts"] for line in counted.to_pylist()}
        return self._counts[column]

    @cached_property
    def own_labels(self) -> dict[Any, Any]:
        """The label that each training example was trained with, as far as it was noted."""
        visits = self.memory.store.visits
        if "label" not in visits.column_names or self.index not in visits.column_names:
            return {}
        return dict(zip(visits[self.index].to_pylist(), visits["label"].to_pylist(), strict=True))

    def class_name(self, number: int) -> str:
        """What a class is called: by its name, its token, or its number."""
        if self.classes is not None and 0 <= number < len(self.classes):
            return self.classes[number]
        examples = self.test or self.train
        if examples is not None and examples.vocabulary is not None and self.outputs > 2:
            return visible(examples.vocabulary.decode([number])[0])
        return str(number)

    @cached_property
    def outputs(self) -> int:
        """How many numbers the network says of an example."""
        for name in SETS:
            if name == "own" or self.examples(name) is None:
                continue
            return need_logits(self.predict(ExamplePlace(name, 0))).shape[1]
        return 0

    # ------------------------------------------------------------------------------------------- examples

    def examples(self, name: str) -> Examples | None:
        """The examples of a set."""
        return {"test": self.test, "train": self.train}.get(name)

    def count(self, name: str) -> int:
        """How many examples a set has."""
        if name == "own":
            return len(self.own)
        found = self.examples(name)
        return 0 if found is None else len(found)

    def need(self, place: ExamplePlace) -> None:
        """See that there is such an example."""
        if place.set not in SETS or not 0 <= place.row < self.count(place.set):
            raise QueryError(
                f"there is no example {place.row} in '{place.set}': there are "
                + ", ".join(f"{self.count(name):,} in '{name}'" for name in SETS if self.count(name))
                + "."
            )

    def input(self, place: ExamplePlace) -> Any:
        """An example as the model takes it, in a batch of its own."""
        return self.inputs(place.set, [place.row])

    def inputs(self, name: str, rows: Sequence[int]) -> Any:
        """Some examples of a set as one batch: a tensor, or several by the names of the model's arguments."""
        for row in rows:
            self.need(ExamplePlace(name, row))
        found = self.examples(name)
        if found is None:
            return as_inputs(torch.stack([self.own[row][1] for row in rows]), self.model)
        return together(as_inputs(found.rows(rows), self.model), found.beside(rows), self.model)

    def shown(self, place: ExamplePlace) -> ShownExample:
        """An example to look at."""
        self.need(place)
        found = self.examples(place.set)
        if found is not None:
            return found.shown(place.row, name=f"{place.set} example")
        like = self.test or self.train
        assert like is not None
        return like.shown_input(self.own[place.row][1], self.own[place.row][0])

    def trained_on(self, index: Any, layer: str | None = None, position: int | None = None) -> ShownExample | None:
        """A training example to look at, with the place that a row of a layer is of."""
        if self.train is None or not isinstance(index, int) or not 0 <= index < len(self.train):
            return None
        positions, span = 1, 1
        if layer is not None and position is not None:
            positions, (position, span) = self.positions(layer), self.tokens(layer, position)
        return self.train.shown(index, position=position, positions=positions, span=span, name="training example")

    def label(self, place: ExamplePlace) -> int | None:
        """The true class, if it is known."""
        found = self.examples(place.set)
        return None if found is None else found.label(place.row)

    def about(self, place: ExamplePlace) -> dict[str, Any]:
        """What pages about an example begin with: the fields of ``ExampleHeader``."""
        label, found = self.label(place), self.examples(place.set)
        return {
            "place": place, "count": self.count(place.set), "stride": 1 if found is None else found.stride,
            "shown": self.shown(place), "label": label, "label_name": None if label is None else self.class_name(label),
        }  # fmt: skip

    def bring(self, name: str, x: Tensor) -> ExamplePlace:
        """Take an input that somebody brought."""
        with self.lock:
            if len(self.own) >= MOST_OWN:
                raise QueryError(f"{MOST_OWN} inputs of your own are enough. Start the explorer again to forget them.")
            self.own.append((name, x))
            return ExamplePlace("own", len(self.own) - 1)

    # ------------------------------------------------------------------------------------------- answers

    def at(self, step: int) -> Memory | PendingWork:
        """The memory at a step, with its weights ready."""
        if step == self.memory.step:
            return self.memory
        memory = self.memory.at(step)

        def work(tell: Tell) -> Memory:
            memory.held_weights(progress=tell)
            return memory

        share = step / max(1, self.memory.step)
        return self.desk.need(("at", step), f"the weights of step {step:,}", share * self.rebuilding, work)

    def spot(self, memory: Memory, x: Any, target: Any = None) -> Spotlight:
        """A spotlight with the forward pass done, so that asking it needs no lock."""
        with self.lock:
            found = memory.attend(self.model, x, target=target)
            assert found.examples
            return found

    def predict(self, place: ExamplePlace, memory: Memory | None = None) -> Any:
        """What the network says."""
        with self.lock:
            return self.spot(memory or self.memory, self.input(place)).prediction

    def logits(self, name: str, rows: Sequence[int]) -> Tensor:
        """What the network says of many examples of a set, one line each."""
        found = []
        for begin in range(0, len(rows), BATCH):
            some = self.inputs(name, rows[begin : begin + BATCH])
            found.append(need_logits(self.spot(self.memory, some).prediction))
        return torch.cat(found)

    def says(self, logits: Tensor, shown: int | None = None, also: Sequence[int] = ()) -> list[ClassScore]:
        """The likeliest classes of one example, and some others."""
        logits = logits.double()
        if len(logits) == 1:
            return [ClassScore(0, "output", float(logits[0]), None)]
        chances = logits.softmax(0)
        order = chances.argsort(descending=True).tolist()
        wanted = order if shown is None else order[:shown]
        wanted += [number for number in also if number not in wanted and 0 <= number < len(logits)]
        return [ClassScore(n, self.class_name(n), float(logits[n]), float(chances[n])) for n in wanted]

    # ------------------------------------------------------------------------------------------- how long

    @cached_property
    def speed(self) -> float:
        """Multiplications and additions a second, measured once."""
        a, b = torch.randn(512, 2048), torch.randn(2048, 512)
        torch.mm(a, b)
        begin = perf_counter()
        for _ in range(4):
            torch.mm(a, b)
        return 4 * 2 * 512 * 2048 * 512 / max(1e-6, perf_counter() - begin)

    @property
    def rebuilding(self) -> float:
        """Seconds to rebuild all weights from their slots."""
        return REBUILD * sum(self._work(layer) for layer in self.memory.store.manifest.layers) / self.speed

    def scanning(self, layer: str, score: str, queries: int = 1) -> float:
        """Seconds to ask a layer: a pass over its slots, or under a preconditioned rule a sweep."""
        info, store = self.info(layer), self.memory.store
        slots = store.slots(info.name)
        if score == "contribution" and self.is_swept(layer):
            return SWEEP * self._work(info) / self.speed + A_STEP * self.memory.step + slots * queries * 2e-6
        numbers = info.key_size + (info.d_out if score == "contribution" else 0)
        return slots * numbers * (READ + 2 * queries / self.speed)

    def is_swept(self, layer: str) -> bool:
        """Whether a preconditioned rule explains a layer."""
        return is_preconditioned(self.memory.store, self.info(layer))

    def _work(self, info: LayerInfo) -> float:
        """Operations to add up the slots of a layer."""
        if info.in_ledger:
            return 0.0
        return 2.0 * self.memory.store.slots(info.name) * info.d_out * (1 if info.indexed else info.width)

    def fork(self) -> "Explorer":
        """The same with a network of its own, for work in another thread."""
        with self.lock:
            return Explorer(
                self.memory, copy.deepcopy(self.model), self.train, self.test, self.classes, self.index, self.title,
                self.desk, self.own,
            )  # fmt: skip


def visible(token: str) -> str:
    """A token that can be seen, also where it is nothing but space."""
    return "".join(SPACES.get(character, character) for character in token) if not token.strip() else token.strip()


SPACES = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}

READ = 0.6e-9
"""Seconds that a number of a slot takes to be read."""

REBUILD, SWEEP, A_STEP = 1.6, 20.0, 6e-3
"""What adding up slots takes beside their bare products, what a sweep through a preconditioned rule takes beside them,
and the seconds of each step of it."""
