"""Heads through training: the same report at several steps, from checkpoints or from a recorded memory."""

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
"""The numbers of a head that are plotted."""


@dataclass(frozen=True)
class Trajectory:
    """Reports on the layers of a model after several steps of training, all for the same inputs."""

    steps: tuple[int, ...]
    reports: tuple[dict[str, Report], ...]

    @property
    def layers(self) -> list[str]:
        """The names of the layers in the reports."""
        return list(self.reports[0])

    def __iter__(self) -> Iterator[tuple[int, dict[str, Report]]]:
        """Iterate over the steps and their reports."""
        return iter(zip(self.steps, self.reports, strict=True))

    def head(self, layer: str, head: int) -> list[HeadReport]:
        """The reports on one head, step by step."""
        if layer not in self.layers:
            raise QueryError(f"this trajectory has no layer '{layer}'; it has {self.layers}.")
        return [reports[layer][head] for reports in self.reports]

    def curve(self, layer: str, head: int, what: str) -> list[float]:
        """One number of a head at every step: a column of the report's table, or ``"changed"``."""
        if what == "changed":
            return self.changes(layer, head)
        rows = [report.row() for report in self.head(layer, head)]
        if what not in rows[0]:
            raise QueryError(f"a report has no '{what}'; it has {['changed', *rows[0]]}.")
        return [row[what] for row in rows]

    def changes(self, layer: str, head: int) -> list[float]:
        """The share of queries that select another token than at the previous step; NaN at the first step."""
        chosen = [_selected_tokens(report) for report in self.head(layer, head)]
        shares = [float("nan")]
        for before, now in pairwise(chosen):
            both = before.keys() & now.keys()
            shares.append(sum(before[key] != now[key] for key in both) / max(1, len(both)))
        return shares

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"step": step, "layer": layer, **row, "changed": self.changes(layer, head.head)[i]}
            for i, (step, layer_reports) in enumerate(self)
            for layer, report in layer_reports.items()
            for head in report
            for row in [head.row()]
        ]

    def to_pandas(self) -> Any:
        """A table with one row for each step, layer and head."""
        return require("pandas", "pandas").DataFrame(self._rows)


def trajectory(
    model: nn.Module, inputs: Any, weights: Memory | Mapping[int, Mapping[str, Tensor]], *,
    steps: int | Sequence[int] = 8, layers: Sequence[str] | None = None, loss: LossOfOutput | None = None,
    items: Int[Tensor, "b m"] | None = None, progress: Progress = True, **more: Any,
) -> Trajectory:  # fmt: skip
    """Reports on a model's attention layers through training, on the same inputs.

    ``weights`` is a recorded memory, which has the weights of every step (``steps``: which ones, or how many), or a
    mapping from step to state dict. The change by training is measured from the first of them. ``more`` is passed to
    ``reports``.
    """
    if isinstance(weights, Memory):
        weights.fits(model)
        at = [int(s) for s in stretch_edges(weights.step, steps)] if isinstance(steps, int) else list(steps)
        moments = {step: partial(weights.at(step).weights, model, progress=False) for step in at}
    else:
        moments = {step: partial(dict, weights[step]) for step in sorted(weights)}
    if not moments:
        raise QueryError("there are no steps to report on: give the weights of at least one step.")
    first, all_reports = next(iter(moments.values()))(), []
    with bar("heads through training", len(moments), progress, worth=2) as watch:
        for make in moments.values():
            all_reports.append(
                reports(
                    model, inputs, layers=layers, loss=loss, weights=make(), start=first, items=items, progress=False,
                    **more,
                )
            )  # fmt: skip
            if watch:
                watch(1)
    return Trajectory(tuple(moments), tuple(all_reports))


def _selected_tokens(head: HeadReport) -> dict[tuple[int, int], int]:
    inputs = head.sight
    places = zip(inputs.sequence.tolist(), inputs.place.tolist(), strict=True)
    return dict(zip(places, head.selected.tolist(), strict=True))
