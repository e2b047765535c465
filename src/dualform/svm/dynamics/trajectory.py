"""Heads through training: the same report at several moments, of checkpoints or of a recorded memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from dualform.errors import QueryError, require
from dualform.explain import Memory, stretch_edges
from dualform.progress import Progress, bar

from ..heads import HeadReport, LossOfOutput, Report, reports

CURVES = (
    "norm", "above 0.99", "entropy", "smallest margin", "efficiency", "cosine", "null cosine", "nuclear cosine",
    "effective rank",
)  # fmt: skip
"""What is drawn of a head."""


@dataclass(frozen=True)
class Trajectory:
    """Reports on the layers of a model after some steps of training, all at the same queries."""

    steps: tuple[int, ...]
    reports: tuple[dict[str, Report], ...]

    @property
    def layers(self) -> list[str]:
        """The layers that are reported on."""
        return list(self.reports[0])

    def __iter__(self) -> Iterator[tuple[int, dict[str, Report]]]:
        """Step by step."""
        return iter(zip(self.steps, self.reports, strict=True))

    def head(self, layer: str, head: int) -> list[HeadReport]:
        """One head at every step."""
        if layer not in self.layers:
            raise QueryError(f"no layer '{layer}' is in this trajectory: there are {self.layers}.")
        return [each[layer][head] for each in self.reports]

    def curve(self, layer: str, head: int, what: str) -> list[float]:
        """One number of a head at every step: a column of the report's table, or ``"changed"``."""
        if what == "changed":
            return self.changes(layer, head)
        rows = [each.row() for each in self.head(layer, head)]
        if what not in rows[0]:
            raise QueryError(f"no '{what}' is in a report: there are {['changed', *rows[0]]}.")
        return [row[what] for row in rows]

    def changes(self, layer: str, head: int) -> list[float]:
        """The share of queries that select another token than at the step before; the first is not a number."""
        chosen = [_selected(each) for each in self.head(layer, head)]
        found = [float("nan")]
        for before, now in pairwise(chosen):
            both = before.keys() & now.keys()
            found.append(sum(before[key] != now[key] for key in both) / max(1, len(both)))
        return found

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"step": step, "layer": layer, **row, "changed": self.changes(layer, head.head)[i]}
            for i, (step, found) in enumerate(self)
            for layer, report in found.items()
            for head in report
            for row in [head.row()]
        ]

    def to_pandas(self) -> Any:
        """One line a step, layer and head."""
        return require("pandas", "pandas").DataFrame(self._rows)


def trajectory(
    model: nn.Module, inputs: Any, weights: Memory | Mapping[int, Mapping[str, Tensor]], *,
    steps: int | Sequence[int] = 8, layers: Sequence[str] | None = None, loss: LossOfOutput | None = None,
    items: Int[Tensor, "b m"] | None = None, progress: Progress = True, **more: Any,
) -> Trajectory:  # fmt: skip
    """Reports on a model's attention layers through training, on the same inputs.

    ``weights`` is a recorded memory, which knows the weights of every step (``steps``: which, or how many), or state
    dicts by step. What training moved is counted from the first of them. ``more`` goes to ``reports``.
    """
    if isinstance(weights, Memory):
        weights.fits(model)
        at = [int(s) for s in stretch_edges(weights.step, steps)] if isinstance(steps, int) else list(steps)
        moments = {step: partial(weights.at(step).weights, model, progress=False) for step in at}
    else:
        moments = {step: partial(dict, weights[step]) for step in sorted(weights)}
    if not moments:
        raise QueryError("no step was given: there is nothing to report on.")
    first, found = next(iter(moments.values()))(), []
    with bar("heads through training", len(moments), progress, worth=2) as watch:
        for make in moments.values():
            found.append(
                reports(
                    model, inputs, layers=layers, loss=loss, weights=make(), start=first, items=items, progress=False,
                    **more,
                )
            )  # fmt: skip
            if watch:
                watch(1)
    return Trajectory(tuple(moments), tuple(found))


def _selected(head: HeadReport) -> dict[tuple[int, int], int]:
    sight = head.sight
    places = zip(sight.sequence.tolist(), sight.place.tolist(), strict=True)
    return dict(zip(places, head.selected.tolist(), strict=True))
