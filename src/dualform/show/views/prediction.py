"""One prediction: what the network says, and which training it is made of."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain import Groups, Hit, Hits, Memory, ScanAnswers, Timeline
from dualform.progress import Progress
from dualform.types import Order, Score

from ..examples import ShownExample
from ..text import FIRST_ORDER, ends, need_logits, parts, unit
from .explorer import MANY, ClassScore, ExampleHeader, ExamplePlace, Explorer
from .work import PendingWork

CURVE, STRETCHES, SHOWN_CLASSES, ENDS = 300, 40, 10, 12
"""Slots in the spotlight curve, stretches of the timeline, classes shown, and groups shown at either end."""

HitUnit = Literal["visit", "example"]

TOTAL = (
    "The parts sum to the whole: everything that layer {layer} adds to {target}. Each layer accounts for the same "
    "number in its own way, so do not sum over layers."
)

MOST_SWEPT = 2000
"""The most training examples that are summed one by one in a backward sweep under a preconditioned rule."""

SCORES: tuple[Score, ...] = ("contribution", "abs", "weight")
ORDERS: dict[Order, str] = {"largest": "add most", "smallest": "take most away", "magnitude": "matter most"}


@dataclass(frozen=True)
class PredictionQuestion:
    """The controls of the page. None leaves a choice to the explorer."""

    layer: str | None = None
    score: Score | None = None
    order: Order = "largest"
    target: int | None = None
    rather: bool = False
    """Whether the target is a difference of logits: the class minus the true class, or minus the next best."""
    k: int = 12
    step: int | None = None
    by: str | None = None
    each: HitUnit | None = None
    """Whether a tile is a single visit, or an example with all its visits."""


@dataclass(frozen=True)
class TopExample:
    """One of the top training examples: a single visit in one row of the layer, or all visits together."""

    rank: int
    index: Any
    shown: ShownExample | None
    label: Any
    step: int | None
    position: int
    weight: float | None
    contribution: float
    """The contribution of a visit; for an example with all its visits, the sum of the score that was asked for."""
    columns: dict[str, Any]
    visits: int = 1


@dataclass(frozen=True)
class SumPart:
    """One term of a sum; ``kind`` is group, others, bias, initial or total."""

    name: str
    kind: str
    value: float
    size: float | None = None
    """Σ|α|, for a group."""


@dataclass(frozen=True)
class ScoreCurve:
    """The scores of the top slots in falling order, and which slots have the label that is explained."""

    values: tuple[float, ...]
    own: tuple[bool, ...]


@dataclass(frozen=True)
class ScoreTimeline:
    """A score over training, for the visits of one group and for all others."""

    edges: tuple[int, ...]
    own: tuple[float, ...]
    others: tuple[float, ...]
    name: str | None
    """The group; None if all visits are in ``others``."""


@dataclass(frozen=True)
class PredictionView(ExampleHeader):
    """Everything the page shows."""

    says: list[ClassScore]
    layers: list[str]
    columns: list[str]
    steps: int
    question: PredictionQuestion
    """With every choice made."""
    scores: list[Score]
    eachs: list[HitUnit]
    unit: str
    target: str
    total: str
    """A sentence on what the layer's parts sum to, and why layers must not be added up."""
    notes: list[str]
    examples: list[TopExample] | None
    """None while they are being computed."""
    totals: list[SumPart]
    residual: float | None
    curve: ScoreCurve | None
    time: ScoreTimeline | None
    pending: PendingWork | None


def predict(explorer: Explorer, place: ExamplePlace, question: PredictionQuestion) -> PredictionView | PendingWork:
    """What one prediction is made of; pending work if the weights of an earlier step must be rebuilt first."""
    explorer.need(place)
    memory = explorer.at(question.step if question.step is not None else explorer.memory.step)
    if isinstance(memory, PendingWork):
        return memory
    settled = settle_question(explorer, memory, question)
    assert settled.layer and settled.score and settled.by is not None
    label = explorer.label(place)
    spot = explorer.spot(memory, explorer.input(place), settled.target)
    logits = need_logits(spot.prediction)[0]
    explained = settled.target if settled.target is not None else int(logits.argmax())
    rival = _rival(logits, explained, label) if settled.rather and len(logits) > 1 else None
    if rival is not None:
        spot = explorer.spot(memory, explorer.input(place), (explained, rival))
    if settled.step == 0:  # nothing was learned yet
        answer, examples, pending = None, [], None
    else:
        answer, pending = _answer(
            explorer, spot, place, settled, (explained, rival) if rival is not None else settled.target
        )
        examples = None if answer is None else _examples(explorer, answer, settled)
    totals, residual = _totals(explorer, answer.groups[settled.by], settled) if answer else ([], None)
    return PredictionView(
        **explorer.about(place),
        says=explorer.says(logits, SHOWN_CLASSES, [explained, *([] if label is None else [label])]),
        layers=list(explorer.layers),
        columns=explorer.columns,
        steps=explorer.memory.step,
        question=settled,
        scores=_scores(explorer, settled.layer),
        eachs=hit_units(explorer, settled.layer),
        unit=unit(settled.score, _target(explorer, explained, rival)),
        target=_target(explorer, explained, rival),
        total=TOTAL.format(layer=settled.layer, target=_target(explorer, explained, rival)),
        notes=[*_notes(explorer, settled), *_remarks(answer)],
        examples=examples,
        totals=totals,
        residual=residual,
        curve=_curve(explorer, answer.hits, explained) if answer and answer.hits else None,
        time=_time(answer.timeline, settled, explained) if answer and answer.timeline else None,
        pending=pending,
    )


def settle_question(explorer: Explorer, memory: Memory, question: PredictionQuestion) -> PredictionQuestion:
    """The question with every open choice made, as the memory allows."""
    layer = question.layer or explorer.layers[-1]
    explorer.info(layer)
    scores = _scores(explorer, layer)
    score = question.score or scores[0]
    if score not in scores:
        raise QueryError(f"layer '{layer}' cannot be asked for score='{score}': what was kept allows {scores}.")
    by = question.by or explorer.columns[0]
    if by not in explorer.columns:
        raise QueryError(f"the visits have no column '{by}': they have {explorer.columns}.")
    if not 1 <= question.k <= CURVE:
        raise QueryError(f"k={question.k} is out of range: choose a number from 1 to {CURVE}.")
    eachs = hit_units(explorer, layer)
    hit_unit = question.each or eachs[0]
    if hit_unit not in eachs:
        raise QueryError(f"layer '{layer}' cannot be asked for each='{hit_unit}': choose one of {eachs}.")
    return replace(question, layer=layer, score=score, by=by, each=hit_unit, step=memory.step)


def hit_units(explorer: Explorer, layer: str) -> list[HitUnit]:
    """What a tile can be, the default first: the example if it has one row in the layer, else the visit."""
    if explorer.index not in explorer.memory.store.visits.column_names:
        return ["visit"]
    if explorer.is_swept(layer):  # sums over many examples would need as many copies of the optimiser's state
        return ["visit", "example"] if len(explorer.groups(explorer.index)) <= MOST_SWEPT else ["visit"]
    return ["example", "visit"] if explorer.positions(layer) == 1 else ["visit", "example"]


def _rival(logits: Tensor, own: int, label: int | None) -> int:
    """The class to compare with: the true class, else the most probable other class."""
    if label is not None and label != own:
        return label
    return next(k for k in logits.argsort(descending=True).tolist() if k != own)


def _scores(explorer: Explorer, layer: str) -> list[Score]:
    """The scores that the kept slots of a layer allow."""
    info = explorer.info(layer)
    if info.keep == "slots" and all(explorer.memory.store.parameters[name].by_slots for name in info.weights):
        return list(SCORES)
    if info.keep == "ledger":
        return ["contribution"]
    return ["abs", "weight"]


def _answer(
    explorer: Explorer, spot: Any, place: ExamplePlace, question: PredictionQuestion, target: Any
) -> tuple[ScanAnswers | None, PendingWork | None]:
    """All answers from one pass over the slots, or the pending work if that takes long."""
    assert question.layer and question.score and question.by is not None
    many = len(explorer.groups(question.by)) > MANY
    sums_only = explorer.info(question.layer).keep == "ledger"
    # for a text the paper asks about its last token
    last = (
        question.score != "contribution"
        and explorer.positions(question.layer) > 1
        and explorer.shown(place).kind == "text"
    )
    columns = [question.by, *([explorer.index] if question.each == "example" and question.by != explorer.index else [])]
    options = {"top": 0 if sums_only else CURVE, "by": columns, "score": question.score, "order": question.order}
    options |= {"position": -1 if last else None}
    if not sums_only:
        options |= {"timeline": STRETCHES, "timeline_by": None if many else question.by}
    key = (
        place,
        explorer.own[place.row][0] if place.set == "own" else "",
        question.layer,
        question.score,
        question.order,
    )
    key = ("answer", *key, target, question.step, question.by, question.each)

    def work(progress: Progress) -> ScanAnswers:
        return spot.ask(question.layer, per="slot", progress=progress, **options)

    seconds = explorer.scan_seconds(question.layer, question.score)
    title = f"what each visit adds through layer {question.layer}"
    result = explorer.work_queue.result(key, title, seconds, work)
    return (None, result) if isinstance(result, PendingWork) else (result, None)


def _target(explorer: Explorer, explained: int, rival: int | None) -> str:
    if explorer.outputs == 1:
        return "the output"
    names = [
        f"class {name}" if (name := explorer.class_name(number)).isdigit() else f"‘{name}’"
        for number in (explained, rival or 0)
    ]
    return f"the logit of {names[0]}" + ("" if rival is None else f" less that of {names[1]}")


def _notes(explorer: Explorer, question: PredictionQuestion) -> list[str]:
    notes = []
    if question.score == "contribution" and question.layer != explorer.layers[-1]:
        notes.append(FIRST_ORDER)
    if question.step == 0:
        notes.append("These are the initial weights: nothing was learned before the first step.")
    return notes


def _remarks(answer: ScanAnswers | None) -> list[str]:
    """What a reader should know of the hits."""
    return [answer.hits.remark] if answer is not None and answer.hits is not None and answer.hits.remark else []


def _examples(explorer: Explorer, answer: ScanAnswers, question: PredictionQuestion) -> list[TopExample]:
    if question.each == "visit":
        return [example(explorer, hit, question.layer) for hit in list(answer.hits or ())[: question.k]]
    groups = answer.groups[explorer.index]
    values = groups.values[0] + (0 if groups.bias is None else groups.bias[0])
    key = values.abs() if question.order == "magnitude" else -values if question.order == "smallest" else values
    best = [
        group for group in key.topk(min(question.k + 1, len(key))).indices.tolist() if groups.names[group] is not None
    ][: question.k]
    counts, labels = explorer.counts(explorer.index), explorer.own_labels
    examples = []
    for rank, group in enumerate(best):
        index, value = groups.names[group], float(values[group])
        columns = {explorer.index: index} | ({"label": labels[index]} if index in labels else {})
        examples.append(
            TopExample(
                rank + 1, index, explorer.trained_on(index), labels.get(index), None, 0, None, value, columns,
                counts.get(index, 0),
            )
        )  # fmt: skip
    return examples


def example(explorer: Explorer, hit: Hit, layer: str | None) -> TopExample:
    """A hit in the form that pages display."""
    index = hit.columns.get(explorer.index)
    several = layer is not None and explorer.positions(layer) > 1
    shown = explorer.trained_on(index, layer, hit.position if several else None)
    columns = {name: value for name, value in hit.columns.items() if name not in ("visit", "row", "step")}
    return TopExample(
        hit.rank + 1,
        index,
        shown,
        hit.columns.get("label"),
        hit.step,
        hit.position,
        hit.weight,
        hit.contribution,
        columns,
    )


def _totals(explorer: Explorer, groups: Groups, question: PredictionQuestion) -> tuple[list[SumPart], float | None]:
    """The terms of the sum, largest first if there are many groups, and the residual."""
    values = groups.values[0].tolist()
    shown = list(range(len(values))) if len(values) <= 2 * ENDS else ends(values, ENDS)
    sums = [SumPart(name_of(explorer, question.by, groups.names[group]), "group", values[group]) for group in shown]
    if len(shown) < len(values):
        rest = sum(values) - sum(values[group] for group in shown)
        sums.insert(ENDS, SumPart(f"{len(values) - len(shown):,} others", "others", rest))
    if groups.total is None or groups.residual is None:
        return sums, None
    for name, value in list(parts(groups).items())[1:]:
        sums.append(SumPart(name, "bias" if "bias" in name else "initial", value))
    sums.append(SumPart("sum of all", "total", float(groups.total[0])))
    return sums, float(groups.residual[0])


def name_of(explorer: Explorer, column: str | None, value: Any) -> str:
    """The name of a group on the page."""
    if value is None:
        return f"{column} unknown"
    if column == "label" and isinstance(value, int) and explorer.classes is not None:
        return explorer.class_name(value)
    return f"{column} {value}"


def _curve(explorer: Explorer, hits: Hits, explained: int) -> ScoreCurve:
    labels = hits.columns["label"].to_pylist() if "label" in hits.columns.column_names else []
    values = hits.scores[0]
    is_own = [label == explained for label in labels] or [False] * len(values)
    return ScoreCurve(tuple(values.tolist()), tuple(is_own[: len(values)]))


def _time(line: Timeline, question: PredictionQuestion, explained: int) -> ScoreTimeline:
    """The timeline, split into the explained class and all others if the groups are labels."""
    values, edges = line.values[0], tuple(line.edges.tolist())
    is_own = [line.column == "label" and name == explained for name in line.names]
    if not any(is_own):
        return ScoreTimeline(edges, (), _floats(values.sum(0)), None)
    own_values = values[torch.tensor(is_own)].sum(0)
    return ScoreTimeline(edges, _floats(own_values), _floats(values.sum(0) - own_values), str(explained))


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
