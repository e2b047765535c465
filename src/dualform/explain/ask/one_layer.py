"""Questions to one layer, answered by one scan of its slots."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dualform.engine import GroupSums, StoreView, TopSlots, TopSlotsByGroup, coefficients, scan, scan_backwards
from dualform.errors import QueryError
from dualform.progress import Progress, bar
from dualform.store import Store
from dualform.types import LayerInfo, ModuleInfo

from ..answers import Timeline
from ..groups import Stretches, group_slots
from ..hits import SlotHits, Summands, slot_hits
from ..query import Question, is_preconditioned
from .asked import AskedQuestions, ScanAnswers
from .contributions import output_parts, slot_groups, sums_without_scan
from .early_steps import remark_of_slots

AskLayer = Callable[[AskedQuestions, LayerInfo, ModuleInfo], Question]
"""Makes the question to one use of a layer."""


def ask_layer(store: Store, ask: AskLayer, asked: AskedQuestions, layer: str | int, progress: Progress) -> ScanAnswers:
    """The top slots of a layer, sums and a timeline, in one scan."""
    question = _question(store, ask, asked, layer)
    info, queries, view, score = question.info, question.queries, asked.view, asked.score
    k = min(asked.top, max(1, store.slots(info.name)))
    best = TopSlots(k, len(queries), score, asked.order) if asked.top and asked.top_by is None else None
    best_of = group_slots(store, [info.name], asked.top_by) if asked.top and asked.top_by is not None else None
    best_by = TopSlotsByGroup(len(best_of.names), k, len(queries), score, asked.order, best_of) if best_of else None
    groups = {column: slot_groups(question, column, asked.places) for column in asked.by}
    over = stretches_of(store, asked, [info.name])
    times = GroupSums(over.count, len(queries), score, over) if over else None
    with bar(f"attending over {info.name}", store.slots(info.name), progress) as watch:
        alone = not (asked.top or asked.timeline)
        unscanned = {c: sums_without_scan(question, g, alone, watch) for c, g in groups.items()}
        values = {c: sums for c, sums in unscanned.items() if sums is not None}
        sums = {c: GroupSums(len(g.names), len(queries), score, g) for c, g in groups.items() if c not in values}
        reductions = [reduction for reduction in (best, best_by, *sums.values(), times) if reduction is not None]
        if not reductions:
            pass
        elif score == "contribution" and is_preconditioned(store, info):
            scan_backwards(store, [(info.name, queries)], view, reductions, watch)
        else:
            of_step = step_coefficients(store, view, info) if score == "contribution" else None
            scan(store, info.name, view, queries, reductions, of_step=of_step, watch=watch)
    values |= {column: reduction.total for column, reduction in sums.items()}
    place, target = question.module.name, question.target
    return ScanAnswers(
        _with_remark(question, slot_hits(question, best), asked.after) if best else None,
        {column: output_parts(question, g, values[column]) for column, g in groups.items()},
        timeline_of(asked, place, target, over, times.total) if over and times else None,
        {name: slot_hits(question, b) for name, b in zip(best_of.names, best_by.best, strict=True)}
        if best_of and best_by
        else {},
    )


def sum_layer_weights(
    store: Store, ask: AskLayer, asked: AskedQuestions, layer: str | int, progress: Progress
) -> ScanAnswers:  # fmt: skip
    """The examples or visits with the largest Σα or Σ|α| in a layer."""
    question = _question(store, ask, asked, layer)
    info, summands = question.info, Summands(store, asked.view, asked.per, asked.top_by)
    sums = GroupSums(len(summands.groups.names), len(question.queries), asked.score, summands.groups)
    with bar(f"attending over {info.name}", store.slots(info.name), progress) as watch:
        scan(store, info.name, asked.view, question.queries, [sums], watch=watch)
    return asked.hits_of(summands, sums.total, question.module.name, question.target, (), "")


def _question(store: Store, ask: AskLayer, asked: AskedQuestions, layer: str | int) -> Question:
    info, module = store.layer(layer)
    require_slots(store, info, layer, asked)
    return ask(asked, info, module)


def require_slots(store: Store, info: LayerInfo, layer: str | int, asked: AskedQuestions) -> None:
    """Raise if only a ledger of a layer was kept, and something else is asked."""
    contributes = asked.score == "contribution"
    if info.in_ledger and ((asked.top or asked.timeline) if contributes else info.keep == "ledger"):
        raise QueryError(
            f"of layer '{layer}' a ledger by '{store.manifest.by}' was kept and no slots, so it can only be asked "
            f"for by({store.manifest.by!r}, layer={layer!r}). For top examples record with keep='slots'."
        )


def step_coefficients(store: Store, view: StoreView, info: LayerInfo) -> list[np.ndarray]:
    """The coefficient of each training step, for each piece of a layer's matrix."""
    return [coefficients(store, name, view.horizon).of_step for name in info.weights]


def stretches_of(store: Store, asked: AskedQuestions, layers: list[str]) -> Stretches | None:
    """The stretches of the timeline that is asked for."""
    if not asked.timeline:
        return None
    return Stretches(asked.view.horizon, asked.timeline, group_slots(store, layers, asked.timeline_by))


def timeline_of(
    asked: AskedQuestions, layer: str, target: str, over: Stretches, sums: Float[Tensor, "n Gs"]
) -> Timeline:  # fmt: skip
    """A timeline from the sums over its groups and stretches."""
    values = sums.unflatten(1, (len(over.names), -1))
    return Timeline(layer, asked.score, target, asked.timeline_by, over.names, over.edges, values)


def _with_remark(question: Question, hits: SlotHits, after: int) -> SlotHits:
    rule = rule_with_preconditioner(question.store, question.info)
    if question.score != "contribution" or not rule:
        return hits
    return replace(hits, remark=remark_of_slots(hits.steps, question.store.steps, rule, after))


def rule_with_preconditioner(store: Store, info: LayerInfo) -> str:
    """The name of the rule such as Adam that explains a layer; nothing if there is none."""
    rules = [store.rule(name) for name in info.parameters if store.is_preconditioned(name)]
    return next((rule.name for rule in rules if rule is not None), "")
