"""What training put into a number, asked in several ways: top slots, sums over groups, a timeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.engine import GroupSums, StoreView, TopSlots, TopSlotsByGroup, coefficients, scan, scan_backwards
from dualform.errors import QueryError
from dualform.progress import Progress, bar
from dualform.store import Store
from dualform.types import LayerInfo, ModuleInfo, Order, Score

from .answers import Groups, Hits, Timeline
from .contributions import output_parts, slot_groups, sums_without_scan
from .groups import Stretches, group_slots
from .hits import hits_of
from .query import Question, Target, is_preconditioned

if TYPE_CHECKING:
    from .memory import Memory

SCORES, ORDERS = ("weight", "abs", "contribution"), ("largest", "smallest", "magnitude")
STRETCHES = 50


@dataclass(frozen=True)
class ScanAnswers:
    """Several answers from one pass over the slots."""

    hits: Hits | None
    groups: dict[str, Groups]
    timeline: Timeline | None
    hits_by: dict[Any, Hits]
    """The top slots of each group."""


class Attribution:
    """A number that a memory explains by the training that its layers recall. Each question is one scan.

    Subclasses say what the number is and which queries it sends to a layer.
    """

    memory: "Memory"

    def top(
        self,
        k: int = 10,
        *,
        layer: str | int,
        score: Score = "contribution",
        order: Order = "largest",
        target: Target = None,
        position: int | None = None,
        progress: Progress = True,
    ) -> Hits:
        """The exact k best slots of each query, with weight α, contribution, and the visit's columns."""
        _require_count(1, "k", k)
        answer = self.ask(layer, top=k, score=score, order=order, target=target, position=position, progress=progress)
        assert answer.hits is not None
        return answer.hits

    def top_by(
        self,
        column: str,
        k: int = 10,
        *,
        layer: str | int,
        score: Score = "contribution",
        order: Order = "largest",
        target: Target = None,
        position: int | None = None,
        progress: Progress = True,
    ) -> dict[Any, Hits]:
        """The exact k best slots of each query in every group of a column: group → hits."""
        _require_count(1, "k", k)
        answer = self.ask(
            layer, top=k, top_by=column, score=score, order=order, target=target, position=position, progress=progress
        )
        return answer.hits_by

    def by(
        self,
        column: str,
        *,
        layer: str | int,
        score: Score = "contribution",
        target: Target = None,
        position: int | None = None,
        places: bool = False,
        progress: Progress = True,
    ) -> Groups:
        """A score summed over the groups of a column. ``score="abs"`` is the paper's: Σ|α|.

        With ``places`` every position of the examples is a group of its own: names are (value, position), as for the
        words of a text whose noted column says where each stretch of it begins. Only weights α can be summed so.
        """
        answer = self.ask(
            layer, by=(column,), score=score, target=target, position=position, places=places, progress=progress
        )
        return answer.groups[column]

    def timeline(
        self, column: str | None = None, *, layer: str | int, stretches: int = STRETCHES, score: Score = "contribution",
        target: Target = None, position: int | None = None, progress: Progress = True,
    ) -> Timeline:  # fmt: skip
        """A score over training time, in equal stretches of steps; by groups of a column if one is given."""
        _require_count(1, "stretches", stretches)
        answer = self.ask(
            layer,
            timeline=stretches,
            timeline_by=column,
            score=score,
            target=target,
            position=position,
            progress=progress,
        )
        assert answer.timeline is not None
        return answer.timeline

    def ask(
        self, layer: str | int, *, top: int = 0, top_by: str | None = None, by: Sequence[str] = (), timeline: int = 0,
        timeline_by: str | None = None, score: Score = "contribution", order: Order = "largest", target: Target = None,
        position: int | None = None, places: bool = False, progress: Progress = True,
    ) -> ScanAnswers:  # fmt: skip
        """Several questions in one pass: the ``top`` slots (of each group of ``top_by``), sums ``by`` columns, a
        ``timeline`` of so many stretches.
        """
        _require_choice("score", score, SCORES)
        _require_choice("order", order, ORDERS)
        _require_count(0, "top", top)
        _require_count(0, "timeline", timeline)
        store, view = self.memory.store, self.memory.view
        if timeline or score == "contribution":
            store.need_training()
        info, module = store.layer(layer)
        if info.in_ledger and ((top or timeline) if score == "contribution" else info.keep == "ledger"):
            raise QueryError(
                f"of layer '{layer}' a ledger by '{store.manifest.by}' was kept and no slots, so it can only be asked "
                f"for by({store.manifest.by!r}, layer={layer!r}). For top examples record with keep='slots'."
            )
        if places and score == "contribution":
            raise QueryError("places=True is for weights α: say score='abs' or score='weight'.")
        question = self._question(info, module, score, position, target)
        queries = question.queries
        k = min(top, max(1, store.slots(info.name)))
        best = TopSlots(k, len(queries), score, order) if top and top_by is None else None
        best_of = group_slots(store, [info.name], top_by) if top and top_by is not None else None
        best_by = TopSlotsByGroup(len(best_of.names), k, len(queries), score, order, best_of) if best_of else None
        columns = (by,) if isinstance(by, str) else tuple(by)
        groups = {column: slot_groups(question, column, places) for column in columns}
        over = Stretches(view.horizon, timeline, group_slots(store, [info.name], timeline_by)) if timeline else None
        times = GroupSums(over.count, len(queries), score, over) if over else None
        with bar(f"attending over {info.name}", store.slots(info.name), progress) as watch:
            alone = not (top or timeline)
            unscanned = {c: sums_without_scan(question, g, alone, watch) for c, g in groups.items()}
            values = {c: sums for c, sums in unscanned.items() if sums is not None}
            sums = {c: GroupSums(len(g.names), len(queries), score, g) for c, g in groups.items() if c not in values}
            reductions = [reduction for reduction in (best, best_by, *sums.values(), times) if reduction is not None]
            if not reductions:
                pass
            elif score == "contribution" and is_preconditioned(store, info):
                scan_backwards(store, info.name, view, queries, reductions, watch)
            else:
                of_step = step_coefficients(store, view, info) if score == "contribution" else None
                scan(store, info.name, view, queries, reductions, of_step=of_step, watch=watch)
        values |= {column: reduction.total for column, reduction in sums.items()}
        return ScanAnswers(
            hits_of(question, best) if best else None,
            {column: output_parts(question, g, values[column]) for column, g in groups.items()},
            _timeline(question, timeline_by, over, times) if over and times else None,
            {name: hits_of(question, b) for name, b in zip(best_of.names, best_by.best, strict=True)}
            if best_of and best_by
            else {},
        )

    def _question(
        self, info: LayerInfo, module: ModuleInfo, score: Score, position: int | None, target: Target
    ) -> Question:
        """The question to one layer."""
        raise NotImplementedError


def step_coefficients(store: Store, view: StoreView, info: LayerInfo) -> list[np.ndarray]:
    """The coefficient of each training step, for each piece of a layer's matrix."""
    return [coefficients(store, name, view.horizon).of_step for name in info.weights]


def _timeline(question: Question, column: str | None, over: Stretches, times: GroupSums) -> Timeline:
    values = times.total.unflatten(1, (len(over.names), -1))
    return Timeline(question.module.name, question.score, question.target, column, over.names, over.edges, values)


def _require_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise QueryError(f"{option}={value!r} is not known; choose one of {list(choices)}.")


def _require_count(least: int, option: str, value: int) -> None:
    if not isinstance(value, Integral) or value < least:
        raise QueryError(f"{option}={value!r} cannot be; choose a whole number, {least} or more.")
