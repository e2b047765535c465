"""One prediction: what the network says, and which training it is made of."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain import Groups, Hit, Hits, Memory, ScanAnswers, Timeline
from dualform.types import Order, Score

from ..examples import ShownExample
from ..text import FIRST_ORDER, ends, need_logits, parts, unit
from .explorer import MANY, ClassScore, ExampleHeader, ExamplePlace, Explorer
from .work import PendingWork, Tell

CURVE, STRETCHES, SAID, ENDS = 300, 40, 10, 12
"""Slots of the spotlight curve, stretches of the timeline, classes that are shown, groups at either end."""

HitUnit = Literal["visit", "example"]

TOTAL = (
    "The parts sum to the whole: all that layer {layer} adds to {target}. Each layer is an account of its own of the "
    "same number, so layers do not add up."
)

SWEPT = 2000
"""Examples whose sums are found in a sweep through a preconditioned rule."""

SCORES: tuple[Score, ...] = ("contribution", "abs", "weight")
ORDERS: dict[Order, str] = {"largest": "add most", "smallest": "take most away", "magnitude": "matter most"}


@dataclass(frozen=True)
class PredictionQuestion:
    """What is asked of an example: the controls of the page. None leaves the choice to the explorer."""

    layer: str | None = None
    score: Score | None = None
    order: Order = "largest"
    target: int | None = None
    rather: bool = False
    """Whether the target is a difference: the class rather than the true one, or than the next best."""
    k: int = 12
    step: int | None = None
    by: str | None = None
    each: HitUnit | None = None
    """Whether single visits are shown, or examples with all their visits."""


@dataclass(frozen=True)
class TopExample:
    """A training example among the top ones: a visit of it, in one row of the layer, or all its visits together."""

    rank: int
    index: Any
    shown: ShownExample | None
    label: Any
    step: int | None
    position: int
    weight: float | None
    contribution: float
    """What it adds; of an example with all its visits the sum of whatever score was asked for."""
    columns: dict[str, Any]
    visits: int = 1


@dataclass(frozen=True)
class SumPart:
    """A part of a sum; ``kind`` is group, others, bias, initial or total."""

    name: str
    kind: str
    value: float
    size: float | None = None
    """Σ|α|, for a group."""


@dataclass(frozen=True)
class ScoreCurve:
    """The scores of the top slots, falling, and which are of the class that the network says."""

    values: tuple[float, ...]
    own: tuple[bool, ...]


@dataclass(frozen=True)
class ScoreTimeline:
    """A score over training: of the visits of one group, and of all others."""

    edges: tuple[int, ...]
    own: tuple[float, ...]
    others: tuple[float, ...]
    name: str | None
    """The group; None where all visits are in ``others``."""


@dataclass(frozen=True)
class PredictionView(ExampleHeader):
    """All that the page shows."""

    says: list[ClassScore]
    layers: list[str]
    columns: list[str]
    steps: int
    question: PredictionQuestion
    """With everything chosen."""
    scores: list[Score]
    eachs: list[HitUnit]
    unit: str
    target: str
    total: str
    """What the layer's parts sum to, and why layers do not add up."""
    notes: list[str]
    examples: list[TopExample] | None
    """None where they are not known yet."""
    totals: list[SumPart]
    residual: float | None
    curve: ScoreCurve | None
    time: ScoreTimeline | None
    pending: PendingWork | None


def predict(explorer: Explorer, place: ExamplePlace, question: PredictionQuestion) -> PredictionView | PendingWork:
    """Ask about one example; Pending where even what the network says takes a while (another step)."""
    explorer.need(place)
    memory = explorer.at(question.step if question.step is not None else explorer.memory.step)
    if isinstance(memory, PendingWork):
        return memory
    asked = settle(explorer, memory, question)
    assert asked.layer and asked.score and asked.by is not None
    label = explorer.label(place)
    spot = explorer.spot(memory, explorer.input(place), asked.target)
    logits = need_logits(spot.prediction)[0]
    own = asked.target if asked.target is not None else int(logits.argmax())
    other = _rival(logits, own, label) if asked.rather and len(logits) > 1 else None
    if other is not None:
        spot = explorer.spot(memory, explorer.input(place), (own, other))
    if asked.step == 0:  # nothing was learned yet
        answer, examples, pending = None, [], None
    else:
        answer, pending = _answer(explorer, spot, place, asked, (own, other) if other is not None else asked.target)
        examples = None if answer is None else _examples(explorer, answer, asked)
    totals, residual = _totals(explorer, answer.groups[asked.by], asked) if answer else ([], None)
    return PredictionView(
        **explorer.about(place),
        says=explorer.says(logits, SAID, [own, *([] if label is None else [label])]),
        layers=list(explorer.layers),
        columns=explorer.columns,
        steps=explorer.memory.step,
        question=asked,
        scores=_scores(explorer, asked.layer),
        eachs=eachs_of(explorer, asked.layer),
        unit=unit(asked.score, _target(explorer, own, other)),
        target=_target(explorer, own, other),
        total=TOTAL.format(layer=asked.layer, target=_target(explorer, own, other)),
        notes=_notes(explorer, asked),
        examples=examples,
        totals=totals,
        residual=residual,
        curve=_curve(explorer, answer.hits, own) if answer and answer.hits else None,
        time=_time(answer.timeline, asked, own) if answer and answer.timeline else None,
        pending=pending,
    )


def settle(explorer: Explorer, memory: Memory, question: PredictionQuestion) -> PredictionQuestion:
    """The question with everything chosen that was left open, as the memory allows."""
    layer = question.layer or explorer.layers[-1]
    explorer.info(layer)
    scores = _scores(explorer, layer)
    score = question.score or scores[0]
    if score not in scores:
        raise QueryError(f"layer '{layer}' cannot be asked for score='{score}': it kept what is enough for {scores}.")
    by = question.by or explorer.columns[0]
    if by not in explorer.columns:
        raise QueryError(f"no column '{by}' among the visits: there are {explorer.columns}.")
    if not 1 <= question.k <= CURVE:
        raise QueryError(f"k={question.k} cannot be; choose between 1 and {CURVE}.")
    eachs = eachs_of(explorer, layer)
    each = question.each or eachs[0]
    if each not in eachs:
        raise QueryError(f"layer '{layer}' cannot be asked for each='{each}': choose one of {eachs}.")
    return replace(question, layer=layer, score=score, by=by, each=each, step=memory.step)


def eachs_of(explorer: Explorer, layer: str) -> list[HitUnit]:
    """What tiles can be: where an example sends one row through a layer it is shown whole first."""
    if explorer.index not in explorer.memory.store.visits.column_names:
        return ["visit"]
    if explorer.is_swept(layer):  # sums over many examples would need as many copies of the optimiser's state
        return ["visit", "example"] if len(explorer.groups(explorer.index)) <= SWEPT else ["visit"]
    return ["example", "visit"] if explorer.positions(layer) == 1 else ["visit", "example"]


def _rival(logits: Tensor, own: int, label: int | None) -> int:
    """The class that another one is compared with: the true one, or else the best of the others."""
    if label is not None and label != own:
        return label
    return next(k for k in logits.argsort(descending=True).tolist() if k != own)


def _scores(explorer: Explorer, layer: str) -> list[Score]:
    """What slots of a layer can be asked for."""
    info = explorer.info(layer)
    if info.keep == "slots" and all(explorer.memory.store.parameters[name].by_slots for name in info.weights):
        return list(SCORES)
    if info.keep == "ledger":
        return ["contribution"]
    return ["abs", "weight"]


def _answer(
    explorer: Explorer, spot: Any, place: ExamplePlace, asked: PredictionQuestion, target: Any
) -> tuple[ScanAnswers | None, PendingWork | None]:
    """All answers of one pass over the slots, or what of them is to be had without a long one."""
    assert asked.layer and asked.score and asked.by is not None
    many = len(explorer.groups(asked.by)) > MANY
    sums_only = explorer.info(asked.layer).keep == "ledger"
    # the paper's question to a text: where does its last token look?
    last = (
        asked.score != "contribution" and explorer.positions(asked.layer) > 1 and explorer.shown(place).kind == "text"
    )
    columns = [asked.by, *([explorer.index] if asked.each == "example" and asked.by != explorer.index else [])]
    options = {"top": 0 if sums_only else CURVE, "by": columns, "score": asked.score, "order": asked.order}
    options |= {"position": -1 if last else None}
    if not sums_only:
        options |= {"timeline": STRETCHES, "timeline_by": None if many else asked.by}
    key = (place, explorer.own[place.row][0] if place.set == "own" else "", asked.layer, asked.score, asked.order)
    key = ("answer", *key, target, asked.step, asked.by, asked.each)

    def work(tell: Tell) -> ScanAnswers:
        return spot.ask(asked.layer, progress=tell, **options)

    seconds = explorer.scanning(asked.layer, asked.score)
    what = f"what each visit adds through layer {asked.layer}"
    found = explorer.desk.need(key, what, seconds, work)
    return (None, found) if isinstance(found, PendingWork) else (found, None)


def _target(explorer: Explorer, own: int, other: int | None) -> str:
    if explorer.outputs == 1:
        return "the output"
    names = [f"class {name}" if (name := explorer.class_name(n)).isdigit() else f"‘{name}’" for n in (own, other or 0)]
    return f"the logit of {names[0]}" + ("" if other is None else f" less that of {names[1]}")


def _notes(explorer: Explorer, asked: PredictionQuestion) -> list[str]:
    notes = []
    if asked.score == "contribution" and asked.layer != explorer.layers[-1]:
        notes.append(FIRST_ORDER)
    if asked.step == 0:
        notes.append("Before the first step nothing was learned: these are the first weights.")
    return notes


def _examples(explorer: Explorer, answer: ScanAnswers, asked: PredictionQuestion) -> list[TopExample]:
    if asked.each == "visit":
        return [example(explorer, hit, asked.layer) for hit in list(answer.hits or ())[: asked.k]]
    groups = answer.groups[explorer.index]
    values = groups.values[0] + (0 if groups.bias is None else groups.bias[0])
    key = values.abs() if asked.order == "magnitude" else -values if asked.order == "smallest" else values
    best = [i for i in key.topk(min(asked.k + 1, len(key))).indices.tolist() if groups.names[i] is not None][: asked.k]
    counts, labels = explorer.counts(explorer.index), explorer.own_labels
    found = []
    for rank, i in enumerate(best):
        index, value = groups.names[i], float(values[i])
        columns = {explorer.index: index} | ({"label": labels[index]} if index in labels else {})
        found.append(
            TopExample(
                rank + 1, index, explorer.trained_on(index), labels.get(index), None, 0, None, value, columns,
                counts.get(index, 0),
            )
        )  # fmt: skip
    return found


def example(explorer: Explorer, hit: Hit, layer: str | None) -> TopExample:
    """A hit as the page shows it."""
    index = hit.columns.get(explorer.index)
    several = layer is not None and explorer.positions(layer) > 1
    shown = explorer.trained_on(index, layer, hit.position if several else None)
    own = {name: value for name, value in hit.columns.items() if name not in ("visit", "row", "step")}
    return TopExample(
        hit.rank + 1, index, shown, hit.columns.get("label"), hit.step, hit.position, hit.weight, hit.contribution, own
    )


def _totals(explorer: Explorer, groups: Groups, asked: PredictionQuestion) -> tuple[list[SumPart], float | None]:
    """The parts of the sum, largest first where there are many groups, and what they leave unexplained."""
    values = groups.values[0].tolist()
    shown = list(range(len(values))) if len(values) <= 2 * ENDS else ends(values, ENDS)
    found = [SumPart(name_of(explorer, asked.by, groups.names[i]), "group", values[i]) for i in shown]
    if len(shown) < len(values):
        rest = sum(values) - sum(values[i] for i in shown)
        found.insert(ENDS, SumPart(f"{len(values) - len(shown):,} others", "others", rest))
    if groups.total is None or groups.residual is None:
        return found, None
    for name, value in list(parts(groups).items())[1:]:
        found.append(SumPart(name, "bias" if "bias" in name else "initial", value))
    found.append(SumPart("sum of all", "total", float(groups.total[0])))
    return found, float(groups.residual[0])


def name_of(explorer: Explorer, column: str | None, value: Any) -> str:
    """A group in words."""
    if value is None:
        return f"{column} not known"
    if column == "label" and isinstance(value, int) and explorer.classes is not None:
        return explorer.class_name(value)
    return f"{column} {value}"


def _curve(explorer: Explorer, hits: Hits, own: int) -> ScoreCurve:
    labels = hits.columns["label"].to_pylist() if "label" in hits.columns.column_names else []
    values = hits.scores[0]
    is_own = [label == own for label in labels] or [False] * len(values)
    return ScoreCurve(tuple(values.tolist()), tuple(is_own[: len(values)]))


def _time(line: Timeline, asked: PredictionQuestion, own: int) -> ScoreTimeline:
    """The timeline: the group of the class that is explained beside all others, if groups are labels."""
    values, edges = line.values[0], tuple(line.edges.tolist())
    mine = [line.column == "label" and name == own for name in line.names]
    if not any(mine):
        return ScoreTimeline(edges, (), _floats(values.sum(0)), None)
    here = values[torch.tensor(mine)].sum(0)
    return ScoreTimeline(edges, _floats(here), _floats(values.sum(0) - here), str(own))


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
