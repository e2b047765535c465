"""Which key/value head each query head of a grouped layer uses for an example, now and through training."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from dualform.attention import Allocating, GroupedQueryAttention
from dualform.explain import stretch_edges
from dualform.progress import Progress

from ..explorer import ExamplePlace, Explorer
from ..work import PendingWork
from .heads import SeenCall, attention_layers, call_of_layer

MOMENTS = 8
"""How many moments of training are shown."""


@dataclass(frozen=True)
class KeyHead:
    """A key/value head and the query heads that use it."""

    group: int
    heads: list[int]


@dataclass(frozen=True)
class ThroughTraining:
    """The number of query heads per key/value head, (moment, group), after each of some steps."""

    steps: list[int]
    heads: list[list[int]]


@dataclass(frozen=True)
class AllocationView:
    """Which query heads use which key/value head. ``through`` is None if that never changes."""

    heads: int
    groups: list[KeyHead]
    through: ThroughTraining | PendingWork | None


def allocation(explorer: Explorer, layer: str, place: ExamplePlace, seen_call: SeenCall) -> AllocationView | None:
    """The allocation in one call of a layer; None if the layer is not grouped."""
    if not isinstance(seen_call.layer, GroupedQueryAttention):
        return None
    ends = [0, *accumulate(_counts(seen_call))]
    groups = [KeyHead(group, list(range(*ends[group : group + 2]))) for group in range(len(ends) - 1)]
    through = None
    if isinstance(seen_call.layer, Allocating):
        seconds = MOMENTS * sum(explorer.scan_seconds(name, "contribution", 1) for name in explorer.layers)
        through = explorer.work_queue.result(
            ("allocation", layer, place, seen_call.call), f"the same at {MOMENTS} moments of training", seconds,
            _through(explorer, layer, place, seen_call.call),
        )  # fmt: skip
    return AllocationView(seen_call.layer.heads, groups, through)


def _through(explorer: Explorer, layer: str, place: ExamplePlace, call: int) -> Callable[[Progress], ThroughTraining]:
    def work(progress: Progress) -> ThroughTraining:
        fork, heads = explorer.fork(), []
        steps = [int(step) for step in stretch_edges(fork.memory.step, MOMENTS - 1)]
        for done, step in enumerate(steps):
            module = attention_layers(fork.model)[layer]
            heads.append(_counts(call_of_layer(fork.model, module, fork.memory.at(step), fork.input(place), call)))
            if callable(progress):
                progress("moments", done + 1, len(steps))
        return ThroughTraining(steps, heads)

    return work


def _counts(seen_call: SeenCall) -> list[int]:
    """The number of query heads per key/value head."""
    assert isinstance(seen_call.layer, GroupedQueryAttention)
    return seen_call.layer.allocate(seen_call.x, seen_call.context, padding=seen_call.padding)[0].tolist()
