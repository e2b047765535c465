"""The explorer: a memory, its network, and the examples to ask about."""

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attention import ScaledHeadAttention
from dualform.errors import QueryError
from dualform.explain import Memory, ReplayedRun, Spotlight
from dualform.explain.query import run_model, shadow_of
from dualform.progress import Progress
from dualform.store import outside_inference_mode
from dualform.types import LayerInfo, Score

from ..examples import Examples, ShownExample
from ..inputs import as_inputs, together
from ..text import need_logits
from .estimates import Estimates
from .selection import Selection
from .work import PendingWork, SharedQueue, WorkQueue

SETS = ("test", "train", "own")
MOST_OWN, BATCH = 200, 128
"""The most inputs that visitors may add, and how many examples go through the network at a time."""

MANY = 60
"""The most groups of a column that are shown one by one."""


@dataclass(frozen=True)
class ExamplePlace:
    """One example: the name of its set and its number there."""

    set: str
    row: int


@dataclass(frozen=True)
class ExampleHeader:
    """What every page about an example shows first: the example, its label, and the size of its set."""

    place: ExamplePlace
    count: int
    stride: int
    shown: ShownExample
    label: int | None
    label_name: str | None


@dataclass(frozen=True)
class ClassScore:
    """One output class with its logit and probability."""

    number: int
    name: str
    logit: float
    probability: float | None


@dataclass
class Explorer:
    """What all views work on. ``index`` is the column that says which training example a visit was."""

    memory: Memory
    model: nn.Module
    train: Examples | None = None
    test: Examples | None = None
    classes: Sequence[str] | None = None
    index: str = "index"
    title: str = ""
    run: ReplayedRun | None = None
    """The training, to be run again; without it the explorer tries with the loss of a classifier."""
    others: Mapping[str, "Explorer"] = field(default_factory=dict)
    """Explorers of other memories of the same network, to compare with, by name."""
    work_queue: WorkQueue = field(default_factory=WorkQueue)
    own: list[tuple[str, Tensor]] = field(default_factory=list)
    selected: Selection = field(default_factory=Selection)
    """The training examples that visitors collected."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.memory.store.need_steps()
        self.memory.store.need_training()
        self.memory.fits(self.model)
        self.title = self.title or self.memory.path.name
        self._counts: dict[str, dict[Any, int]] = {}
        self._groups: dict[str, list[Any]] = {}
        self._positions: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------- layers, columns

    @property
    def layers(self) -> tuple[str, ...]:
        """The recorded layers."""
        return self.memory.layers

    @cached_property
    def columns(self) -> list[str]:
        """Columns of the visits to group by: label and source, then other noted columns, then index and step."""
        names = self.memory.store.visits.column_names
        noted = [name for name in names if name not in ("visit", "row", "step", self.index)]
        first = [name for name in ("label", "source") if name in noted]
        return [
            *first,
            *(name for name in noted if name not in first),
            *(name for name in (self.index, "step") if name in names),
        ]

    def info(self, layer: str) -> LayerInfo:
        """The recorded description of a layer."""
        return self.memory.store.layer(layer)[0]

    def positions(self, layer: str) -> int:
        """How many rows of one example pass through a layer: 1, or one per token or patch."""
        if layer not in self._positions:
            calls = self.memory.store.calls(self.info(layer).name)
            self._positions[layer] = int((calls.rows // np.maximum(1, calls.batch)).max(initial=1))
        return self._positions[layer]

    def tokens(self, layer: str, position: int) -> tuple[int, int]:
        """The tokens behind one row of a layer, as first token and count: heads may pool tokens before projecting."""
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
        """The label that each training example was trained with; empty if labels were not noted."""
        visits = self.memory.store.visits
        if "label" not in visits.column_names or self.index not in visits.column_names:
            return {}
        return dict(zip(visits[self.index].to_pylist(), visits["label"].to_pylist(), strict=True))

    def class_name(self, number: int) -> str:
        """The name of a class: as given, else its token, else its number."""
        if self.classes is not None and 0 <= number < len(self.classes):
            return self.classes[number]
        examples = self.test or self.train
        if examples is not None and examples.vocabulary is not None and self.outputs > 2:
            return visible(examples.vocabulary.decode([number])[0])
        return str(number)

    @cached_property
    def outputs(self) -> int:
        """How many logits the network gives for an example; 0 without examples."""
        for name in SETS:
            if name == "own" or self.examples(name) is None:
                continue
            return need_logits(self.predict(ExamplePlace(name, 0))).shape[1]
        return 0

    # ------------------------------------------------------------------------------------------- examples

    def examples(self, name: str) -> Examples | None:
        """The examples of the test or training set; None if there are none, and for the visitor's own inputs."""
        return {"test": self.test, "train": self.train}.get(name)

    def count(self, name: str) -> int:
        """The size of a set."""
        if name == "own":
            return len(self.own)
        examples = self.examples(name)
        return 0 if examples is None else len(examples)

    def need(self, place: ExamplePlace) -> None:
        """Raise an error unless there is such an example."""
        if place.set not in SETS or not 0 <= place.row < self.count(place.set):
            raise QueryError(
                f"there is no example {place.row} in '{place.set}': there are "
                + ", ".join(f"{self.count(name):,} in '{name}'" for name in SETS if self.count(name))
                + "."
            )

    def input(self, place: ExamplePlace) -> Any:
        """One example as a batch that the model takes."""
        return self.inputs(place.set, [place.row])

    def inputs(self, name: str, rows: Sequence[int]) -> Any:
        """Examples of a set as one batch: a tensor, or tensors by the names of the model's arguments."""
        for row in rows:
            self.need(ExamplePlace(name, row))
        examples = self.examples(name)
        if examples is None:
            return as_inputs(torch.stack([self.own[row][1] for row in rows]), self.model)
        return together(as_inputs(examples.rows(rows), self.model), examples.beside(rows), self.model)

    def tensor(self, place: ExamplePlace) -> Tensor:
        """One example as a tensor, without an axis of examples."""
        examples = self.examples(place.set)
        return self.own[place.row][1] if examples is None else examples.row(place.row)[0]

    def shown(self, place: ExamplePlace) -> ShownExample:
        """An example in the form that pages display."""
        self.need(place)
        examples = self.examples(place.set)
        if examples is not None:
            return examples.shown(place.row, name=f"{place.set} example")
        like = self.test or self.train
        assert like is not None
        return like.shown_input(self.own[place.row][1], self.own[place.row][0])

    def trained_on(self, index: Any, layer: str | None = None, position: int | None = None) -> ShownExample | None:
        """A training example in the form that pages display, with the place of one row of a layer marked."""
        if self.train is None or not isinstance(index, int) or not 0 <= index < len(self.train):
            return None
        positions, span = 1, 1
        if layer is not None and position is not None:
            positions, (position, span) = self.positions(layer), self.tokens(layer, position)
        return self.train.shown(index, position=position, positions=positions, span=span, name="training example")

    def passage(self, index: Any, token: int, taught: bool) -> ShownExample | None:
        """A training text around the token that counts; None if there is no such example."""
        if self.train is None or not isinstance(index, int) or not 0 <= index < len(self.train):
            return None
        return self.train.passage(index, token, taught=taught, name="training example")

    def kind_of(self, place: ExamplePlace) -> str:
        """How an example is shown: image, text, series or numbers."""
        like = self.examples(place.set) or self.test or self.train
        return "none" if like is None else like.kind

    def label(self, place: ExamplePlace) -> int | None:
        """The true class of an example; None if it is not known."""
        examples = self.examples(place.set)
        return None if examples is None else examples.label(place.row)

    def about(self, place: ExamplePlace) -> dict[str, Any]:
        """The fields of ``ExampleHeader`` for one example."""
        label, examples = self.label(place), self.examples(place.set)
        return {
            "place": place, "count": self.count(place.set), "stride": 1 if examples is None else examples.stride,
            "shown": self.shown(place), "label": label, "label_name": None if label is None else self.class_name(label),
        }  # fmt: skip

    def bring(self, name: str, x: Tensor) -> ExamplePlace:
        """Add an input that a visitor sent."""
        with self.lock:
            if len(self.own) >= MOST_OWN:
                raise QueryError(
                    f"you have added {MOST_OWN} inputs of your own, and no more are kept. Restart the explorer to "
                    "remove them."
                )
            self.own.append((name, x))
            return ExamplePlace("own", len(self.own) - 1)

    @property
    def selection(self) -> tuple[Any, ...]:
        """The indices of the selected training examples, sorted."""
        return self.selected.indices

    # ------------------------------------------------------------------------------------------- answers

    def at(self, step: int) -> Memory | PendingWork:
        """The memory at a step with its weights rebuilt; pending work if rebuilding them takes long."""
        if step == self.memory.step:
            return self.memory
        memory = self.memory.at(step)

        def work(progress: Progress) -> Memory:
            memory.held_weights(progress=progress)
            return memory

        share = step / max(1, self.memory.step)
        return self.work_queue.result(("at", step), f"the weights of step {step:,}", share * self.rebuild_seconds, work)

    def spot(self, memory: Memory, x: Any, target: Any = None) -> Spotlight:
        """A spotlight whose forward pass has been run, so that asking it later needs no lock."""
        with self.lock:
            spotlight = memory.attend(self.model, x, target=target)
            _ = spotlight.prediction  # reading the prediction runs the forward pass, here under the lock
            return spotlight

    def predict(self, place: ExamplePlace, memory: Memory | None = None) -> Any:
        """The output of the network for one example."""
        with self.lock:
            return self.spot(memory or self.memory, self.input(place)).prediction

    def predict_with(self, weights: Mapping[str, Tensor], place: ExamplePlace) -> Any:
        """The output of the network with other weights for one example."""
        with self.lock, outside_inference_mode(), torch.no_grad():
            return run_model(shadow_of(self.model, weights), self.input(place))

    def logits(self, name: str, rows: Sequence[int]) -> Tensor:
        """The logits of many examples of a set, one row each."""
        batches = []
        for begin in range(0, len(rows), BATCH):
            inputs = self.inputs(name, rows[begin : begin + BATCH])
            batches.append(need_logits(self.spot(self.memory, inputs).prediction))
        return torch.cat(batches)

    def says(self, logits: Tensor, shown: int | None = None, also: Sequence[int] = ()) -> list[ClassScore]:
        """The most probable classes of one example, largest first, followed by the classes of ``also``."""
        logits = logits.double()
        if len(logits) == 1:
            return [ClassScore(0, "output", float(logits[0]), None)]
        chances = logits.softmax(0)
        order = chances.argsort(descending=True).tolist()
        wanted = order if shown is None else order[:shown]
        wanted += [number for number in dict.fromkeys(also) if number not in wanted and 0 <= number < len(logits)]
        return [
            ClassScore(number, self.class_name(number), float(logits[number]), float(chances[number]))
            for number in wanted
        ]

    # ------------------------------------------------------------------------------------------- how long

    @cached_property
    def estimates(self) -> Estimates:
        """How many seconds questions to the memory take."""
        return Estimates(self.memory.store, self.positions)

    @property
    def rebuild_seconds(self) -> float:
        """Estimated seconds to rebuild all weights from their slots."""
        return self.estimates.rebuilding()

    def scan_seconds(self, layer: str, score: Score = "contribution", queries: int = 1) -> float:
        """Estimated seconds to score the slots of a layer."""
        return self.estimates.scan(layer, score, queries)

    def question_seconds(self, layer: str | None, score: Score = "contribution", queries: int = 1) -> float:
        """Estimated seconds of a question to a layer, or to the whole network, with sums over training examples."""
        groups = len(self.counts(self.index)) if self.index in self.columns else 1
        like = self.test or self.train
        asks_last_token = score != "contribution" and like is not None and like.kind == "text"
        return self.estimates.scan(layer, score, queries, groups=groups, rows=1 if asks_last_token else 0)

    def sums_seconds(self, layer: str | None, column: str, queries: int = 1) -> float:
        """Estimated seconds to sum contributions over the groups of a column, and nothing else."""
        return self.estimates.sums(layer, len(self.counts(column)), queries)

    def forward_seconds(self, count: int) -> float:
        """Estimated seconds to run the network on some examples."""
        weights = sum(parameter.size for parameter in self.memory.store.manifest.parameters)
        rows = max(map(self.positions, self.layers), default=1)
        return count * (2 * weights * rows * self.estimates.speed.product + 50 * self.estimates.speed.call)

    def ledger_seconds(self, groups: int) -> float:
        """Estimated seconds to make a ledger of some groups."""
        return self.estimates.ledger(groups)

    def is_swept(self, layer: str) -> bool:
        """Whether contributions of a layer need a backward sweep, because its rule is preconditioned."""
        return self.estimates.is_swept(self.info(layer))

    def compare_with(self, memories: Iterable[Memory]) -> None:
        """Add memories of the same network, whose answers can be compared with those of this one."""
        others = dict(self.others)
        for memory in memories:
            name, number = memory.path.name, 2
            while name in others or name == self.title:
                name, number = f"{memory.path.name} ({number})", number + 1
            others[name] = Explorer(
                memory, copy.deepcopy(self.model), self.train, self.test, self.classes, self.index, name,
                work_queue=SharedQueue(self.work_queue, name), own=self.own,
            )  # fmt: skip
        self.others = others

    def fork(self) -> "Explorer":
        """An explorer with its own copy of the network, for work in another thread."""
        with self.lock:
            return Explorer(
                self.memory, copy.deepcopy(self.model), self.train, self.test, self.classes, self.index, self.title,
                self.run, self.others, self.work_queue, self.own, self.selected,
            )  # fmt: skip


def visible(token: str) -> str:
    """A token without surrounding white space; a token of white space alone is shown by symbols."""
    return "".join(SPACES.get(character, character) for character in token) if not token.strip() else token.strip()


SPACES = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
