"""Which key/value head each query head of a grouped layer has for an example: now, and through training."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from dualform.attention import Allocating, GroupedQueryAttention
from dualform.explain import stretch_edges

from .explorer import ExamplePlace, Explorer
from .heads import SeenCall, attention_layers, see
from .work import PendingWork, Tell

MOMENTS = 8
"""Moments of training that are looked at."""


@dataclass(frozen=True)
class KeyHead:
    """A key/value head, and the query heads that have it."""

    group: int
    heads: list[int]


@dataclass(frozen=True)
class ThroughTraining:
    """Query heads of each key/value head, (moment, group), after some steps."""

    steps: list[int]
    heads: list[list[int]]


@dataclass(frozen=True)
class AllocationView:
    """Which query heads have which key/value head. ``through`` is None where that never changes."""

    heads: int
    groups: list[KeyHead]
    through: ThroughTraining | PendingWork | None


def allocation(explorer: Explorer, layer: str, place: ExamplePlace, seen: SeenCall) -> AllocationView | None:
    """That of one call of a layer; None where each query head has its own."""
    if not isinstance(seen.layer, GroupedQueryAttention):
        return None
    ends = [0, *accumulate(_counts(seen))]
    groups = [KeyHead(group, list(range(*ends[group : group + 2]))) for group in range(len(ends) - 1)]
    through = None
    if isinstance(seen.layer, Allocating):
        seconds = MOMENTS * sum(explorer.scanning(name, "contribution", 1) for name in explorer.layers)
        through = explorer.desk.need(
            ("allocation", layer, place, seen.call), f"the same at {MOMENTS} moments of training", seconds,
            _through(explorer, layer, place, seen.call),
        )  # fmt: skip
    return AllocationView(seen.layer.heads, groups, through)


def _through(explorer: Explorer, layer: str, place: ExamplePlace, call: int) -> Callable[[Tell], ThroughTraining]:
    def work(tell: Tell) -> ThroughTraining:
        mine, found = explorer.fork(), []
        steps = [int(step) for step in stretch_edges(mine.memory.step, MOMENTS - 1)]
        for done, step in enumerate(steps):
            module = attention_layers(mine.model)[layer]
            found.append(_counts(see(mine.model, module, mine.memory.at(step), mine.input(place), call)))
            if callable(tell):
                tell("moments", done + 1, len(steps))
        return ThroughTraining(steps, found)

    return work


def _counts(seen: SeenCall) -> list[int]:
    """How many query heads each key/value head has."""
    assert isinstance(seen.layer, GroupedQueryAttention)
    return seen.layer.allocate(seen.x, seen.context, padding=seen.padding)[0].tolist()
