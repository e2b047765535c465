"""What single training examples do: which test answers they move, and when they were learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.explain import Spotlight
from dualform.progress import Progress

from ...examples import ShownExample
from ..explorer import BATCH, ExamplePlace, Explorer
from ..work import PendingWork
from .examples import training_examples
from .lines import ExampleLine, features_of, label_name
from .question import TrainingSetQuestion
from .sums import asked_layers, known_sums, network_seconds, right_answers, right_target, sums_of, test_rows

MOVED = 8
"""Test examples that are shown at either end."""


@dataclass(frozen=True)
class MovedAnswer:
    """A test example, and what the training example adds to its answer."""

    row: int
    shown: ShownExample
    adds: float
    label_name: str | None
    features: tuple[str, ...]


@dataclass(frozen=True)
class MovedAnswers:
    """The test answers that a training example moves most, up and down."""

    up: list[MovedAnswer]
    down: list[MovedAnswer]
    asked: int
    target: str


@dataclass(frozen=True)
class LearnedVisit:
    """What one visit added to the logit of the example's own label."""

    step: int
    adds: float


@dataclass(frozen=True)
class LearnedOverTime:
    """What the visits of an example added to its own answer."""

    visits: list[LearnedVisit]
    steps: int
    target: str
    total: float


def moved_answers(
    explorer: Explorer, choice: TrainingSetQuestion, index: int
) -> MovedAnswers | PendingWork | None:  # fmt: skip
    """The test answers that an example moves most: from the sums over the training set, or from its visits alone.

    Under a preconditioned rule one sweep takes as long for one example as for all of them, so all are summed.
    """
    rows = test_rows(explorer, choice.rows)
    sums = known_sums(explorer, choice)
    layers = asked_layers(explorer, None)
    if sums is None and any(map(explorer.is_swept, layers)):
        sums = sums_of(explorer, choice)
        if isinstance(sums, PendingWork):
            return sums
    if sums is not None and sums.single is not None and index in sums.names:
        adds = sums.single[:, sums.names.index(index)].double()
    else:
        seconds = ceil(len(rows) / BATCH) * network_seconds(explorer, layers, 1)

        def work(progress: Progress) -> Tensor:
            return _added_to(explorer.fork(), index, rows, progress)

        title = f"which test answers training example {index} moves"
        adds = explorer.work_queue.result(("moved", index, len(rows)), title, seconds, work)
        if isinstance(adds, PendingWork):
            return adds
    order = adds.argsort(descending=True).tolist()
    up = [place for place in order[:MOVED] if adds[place] > 0]
    down = [place for place in order[::-1][:MOVED] if adds[place] < 0]
    tests = [[_moved(explorer, rows[place], float(adds[place])) for place in end] for end in (up, down)]
    return MovedAnswers(*tests, asked=len(rows), target=right_target(explorer))


def learned_over_time(
    explorer: Explorer, place: ExamplePlace, line: ExampleLine
) -> LearnedOverTime | PendingWork:  # fmt: skip
    """What each visit of an example added to the logit of its own label."""
    label = line.label if isinstance(line.label, int) and explorer.outputs > 1 else None
    layers = asked_layers(explorer, None)

    def work(progress: Progress) -> LearnedOverTime:
        own = explorer.fork()
        target = None if label is None else torch.tensor([label])
        hits = spot_of_visits(own, line.index, own.input(place), target).top(
            line.visits, per="visit", order="magnitude", progress=progress
        )
        visits = sorted((LearnedVisit(hit.step, hit.contribution) for hit in hits), key=lambda visit: visit.step)
        name = "the network’s answer" if label is None else f"the logit of {line.label_name}, its own label"
        return LearnedOverTime(visits, own.memory.step, name, sum(visit.adds for visit in visits))

    title = f"when training example {line.index} was learned"
    seconds = network_seconds(explorer, layers, 1)
    return explorer.work_queue.result(("learned", line.index), title, seconds, work)


def spot_of_visits(explorer: Explorer, index: Any, inputs: Any, target: Any) -> Spotlight:
    """A spotlight of the network as it is on the visits of one training example alone."""
    memory, model = explorer.memory, explorer.model
    values = memory.store.visits[explorer.index].to_pylist()
    mask = np.fromiter((value == index for value in values), bool, len(values))
    weights = memory.weights_for(model)
    if weights is None:
        weights = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return Spotlight(memory.only(mask), model, inputs, weights, target)


def _added_to(explorer: Explorer, index: Any, rows: Sequence[int], progress: Progress) -> Float[Tensor, " n"]:
    """What the visits of one example add to the answers to some test examples."""
    visits, parts = training_examples(explorer).visits[training_examples(explorer).place[index]], []
    for begin in range(0, len(rows), BATCH):
        batch = rows[begin : begin + BATCH]
        target = right_answers(explorer, batch)
        spot = spot_of_visits(explorer, index, explorer.inputs("test", batch), target)
        hits = spot.top(int(visits), per="visit", order="magnitude", progress=_part(progress, begin, batch, rows))
        parts.append(hits.scores.double().sum(1))
    return torch.cat(parts)


def _part(progress: Progress, begin: int, batch: Sequence[int], rows: Sequence[int]) -> Progress:
    if isinstance(progress, bool):
        return progress
    return lambda stage, done, total: progress(
        stage, int(1000 * (begin + len(batch) * done / max(1, total)) / len(rows)), 1000
    )


def _moved(explorer: Explorer, row: int, adds: float) -> MovedAnswer:
    assert explorer.test is not None
    shown = explorer.test.shown(row, name="test example")
    return MovedAnswer(row, shown, adds, label_name(explorer, explorer.test.label(row)), features_of(explorer, shown))
