"""What the heads of an attention layer separate: a report on them, drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dualform.errors import QueryError, SizeError
from dualform.svm import HeadReport, Report, Trajectory, origin, reports, trajectory
from dualform.svm.heads import COLUMNS, LEGEND, DirectionGroup, cells, sentences, source_of

from ..examples import ShownExample
from .attention import TokenNames, side_of
from .explorer import ExamplePlace, Explorer, visible
from .heads import attention_layers
from .work import PendingWork, Tell

HELD, ITEMS, BARS, BUILDERS = 12, 12, 40, 7
"""Support tokens, kinds of tokens, bars of a histogram and training examples that are shown."""

ROWS, MOST_ROWS, MOMENTS = 16, 128, 8
"""Examples that heads are looked at with, at most so many, and moments of training."""

A_HEAD = 2.5
"""Seconds that a head takes, as far as one can tell: problems differ."""

NameOf = Callable[[int, int], str]
"""What token of what sequence is called."""


@dataclass(frozen=True)
class SupportTokenLine:
    """A support token: for which query it is held apart from the selected token, and its share of the margin."""

    sequence: int
    query: str
    selected: str
    token: str
    share: float


@dataclass(frozen=True)
class HeadView:
    """One head: what may be read from it, its margins, singular values, and the tokens that hold the margin up."""

    head: int
    sentences: list[str]
    margins: list[int]
    """How many there are, from the smallest to the largest, in equal steps."""
    margin_range: tuple[float, float]
    spectra: dict[str, list[float]]
    """Singular values beside the largest, of the head and of what separates."""
    places: list[float]
    items: list[tuple[str, float]]
    support: list[SupportTokenLine]


@dataclass(frozen=True)
class HeadsView:
    """A layer: its table of heads, and some of them."""

    layer: str
    columns: list[str]
    rows: list[list[str]]
    legend: str
    heads: list[HeadView]


def view_of(
    report: Report, heads: Sequence[int], name: NameOf, item: Callable[[int], str] | None = None
) -> HeadsView:  # fmt: skip
    """A report as it is shown, with some heads one by one.

    ``name`` says what tokens are called, ``item`` what stands there.
    """
    shown = [_head(report[head], name, item) for head in heads]
    return HeadsView(report.layer, list(COLUMNS), [cells(each) for each in report], LEGEND, shown)


def _head(found: HeadReport, name: NameOf, item: Callable[[int], str] | None) -> HeadView:
    low, high = float(found.margins[0]), float(found.margins[-1])
    counts = torch.histc(found.margins, BARS, low, high) if high > low else torch.tensor([len(found.margins)])
    items = list(found.by_item().items())[:ITEMS] if item and found.items is not None and found.found else []
    return HeadView(
        found.head, sentences(found), [int(each) for each in counts], (low, high),
        {kind: (each.singular / each.singular[0].clamp(min=1e-300)).tolist() for kind, each in found.spectra.items()},
        found.by_place().tolist() if found.found else [],
        [(item(number), share) for number, share in items] if item else [], _held(found, name),
    )  # fmt: skip


def _held(found: HeadReport, name: NameOf) -> list[SupportTokenLine]:
    sight = found.sight
    places = zip(sight.sequence.tolist(), sight.place.tolist(), strict=True)
    selected = dict(zip(places, found.selected.tolist(), strict=True))
    return [
        SupportTokenLine(s, name(s, q), name(s, selected[s, q]), name(s, t), share)
        for s, q, t, _, share in found.support(HELD)
    ]


# ------------------------------------------------------------------------------------------- in the explorer


@dataclass(frozen=True)
class SeparationQuestion:
    """Which layer and head, with how many examples, and at which queries: those with a weight above some per cent."""

    layer: str | None = None
    head: int = 0
    rows: int = ROWS
    above: int = 0


@dataclass(frozen=True)
class HeadCurve:
    """One number of a head through training."""

    name: str
    values: list[float]


@dataclass(frozen=True)
class HeadTrajectory:
    """A head through training."""

    head: int
    steps: list[int]
    curves: list[HeadCurve]


@dataclass(frozen=True)
class DirectionExample:
    """A training example, and what it put into the direction that separates."""

    index: Any
    shown: ShownExample | None
    mean: float
    queries: float
    keys: float


@dataclass(frozen=True)
class DirectionExamples:
    """The examples that put most into it, of how much there is in all and what the beginning has of it."""

    total: float
    initial: float
    most: list[DirectionExample]
    least: list[DirectionExample]


@dataclass(frozen=True)
class SeparationView:
    """All that the page shows."""

    layers: list[str]
    heads: int
    available: int
    set: str
    asking: SeparationQuestion
    found: HeadsView | PendingWork
    through: HeadTrajectory | PendingWork | None
    built: DirectionExamples | PendingWork | str | None
    """None without a report; a sentence where it cannot be told."""


def separation(explorer: Explorer, asking: SeparationQuestion) -> SeparationView:
    """What the heads of a layer separate when the network sees some examples."""
    known, name = attention_layers(explorer.model), "test" if explorer.test is not None else "train"
    if not known or not explorer.count(name):
        raise QueryError(
            "heads are looked at with examples: give some with --test or --data, to a network that has any."
        )
    layer = asking.layer or next(iter(known))
    if layer not in known:
        raise QueryError(f"there is no attention layer '{layer}': there are {list(known)}.")
    heads = int(getattr(known[layer], "heads", 0) or getattr(known[layer], "num_heads", 1))
    rows = max(1, min(asking.rows, MOST_ROWS, explorer.count(name)))
    if not 0 <= asking.head < heads or not 0 <= asking.above < 100:
        raise QueryError(
            f"there is no head {asking.head} above {asking.above} %: there are {heads} heads, and 0 to 99 %."
        )
    asking = SeparationQuestion(layer, asking.head, rows, asking.above)
    key = ("heads", layer, rows, asking.above)
    found = explorer.desk.need(
        (*key, "report"), f"what the {heads} heads of {layer} separate", A_HEAD * heads, _report(explorer, name, asking)
    )
    view, through, built = found, None, None
    if not isinstance(found, PendingWork):
        view = _view(explorer, name, found, asking)
        path = explorer.desk.need(
            (*key, "through"), f"the same at {MOMENTS} moments of training", A_HEAD * heads * MOMENTS,
            _trajectory(explorer, name, asking),
        )  # fmt: skip
        through = path if isinstance(path, PendingWork) else through_of(path, layer, asking.head)
        built = _built(explorer, found[asking.head], asking)
    assert isinstance(view, HeadsView | PendingWork)
    return SeparationView(list(known), heads, explorer.count(name), name, asking, view, through, built)


def _inputs(explorer: Explorer, name: str, asking: SeparationQuestion) -> tuple[Any, Any]:
    """Examples as the model takes them, and what their tokens stand for, if they are tokens."""
    inputs, examples = explorer.inputs(name, range(asking.rows)), explorer.examples(name)
    first = inputs if isinstance(inputs, torch.Tensor) else next(iter(inputs.values()))
    text = examples is not None and examples.kind == "text" and first.ndim == 2
    return inputs, first if text else None


def _report(explorer: Explorer, name: str, asking: SeparationQuestion) -> Callable[[Tell], Report]:
    def work(tell: Tell) -> Report:
        mine, (inputs, items), layer = explorer.fork(), _inputs(explorer, name, asking), asking.layer or ""
        weights = mine.memory.weights_for(mine.model)
        return reports_with(
            items, mine.model, inputs, layers=[layer], weights=weights, above=asking.above / 100, progress=tell
        )[layer]

    return work


def reports_with(items: Any, model: Any, inputs: Any, **options: Any) -> dict[str, Report]:
    """Reports that know what tokens stand for, where these are the keys of the layer: a class token is none of them."""
    try:
        return reports(model, inputs, items=items, **options)
    except SizeError:
        if items is None:
            raise
        return reports(model, inputs, **options)


def _trajectory(explorer: Explorer, name: str, asking: SeparationQuestion) -> Callable[[Tell], Trajectory]:
    """At all queries: in the beginning none is sharp."""

    def work(tell: Tell) -> Trajectory:
        mine, (inputs, _) = explorer.fork(), _inputs(explorer, name, asking)
        return trajectory(
            mine.model, inputs, mine.memory, steps=MOMENTS - 1, layers=[asking.layer or ""], nuclear=False,
            progress=tell,
        )  # fmt: skip

    return work


def through_of(path: Trajectory, layer: str, head: int) -> HeadTrajectory:
    """One head of a trajectory."""
    return HeadTrajectory(head, list(path.steps), [HeadCurve(what, path.curve(layer, head, what)) for what in CURVES])


CURVES = ("norm", "above 0.9", "entropy", "efficiency", "cosine", "null cosine", "effective rank", "changed")


def _view(explorer: Explorer, name: str, found: Report, asking: SeparationQuestion) -> HeadsView:
    """With tokens called what they are in the examples."""
    keys = found[asking.head].sight.x.shape[1]

    @cache
    def names(row: int) -> TokenNames:
        shown = explorer.shown(ExamplePlace(name, row))
        count = shown.lines.steps if shown.lines is not None else keys  # a series is shown without its padding
        return TokenNames(shown, count, side_of(keys) if shown.kind == "image" else 0)

    examples = explorer.examples(name)
    words = None if examples is None else examples.vocabulary
    return view_of(
        found, [asking.head], lambda row, token: names(row)([token]),
        None if words is None else lambda number: visible(words.decode([number])[0]),
    )  # fmt: skip


def _built(explorer: Explorer, found: HeadReport, asking: SeparationQuestion) -> DirectionExamples | PendingWork | str:
    """The training examples that put most into the direction, and those that worked against it."""
    layer, tokens = asking.layer or "", found.sight.tokens
    if tokens is None or found.found is None:
        return "This head has no separating direction in the model’s space, so no training example built it."
    sources = list(dict.fromkeys(source_of(explorer.memory, layer, each) for each in (tokens.query, tokens.key)))
    if missing := [name for name in sources if name not in explorer.layers or explorer.info(name).keep != "slots"]:
        return f"Which examples built it cannot be told: no slots of ‘{missing[0]}’ were kept."
    if explorer.index not in explorer.columns:
        return f"Which examples built it cannot be told: no column ‘{explorer.index}’ was noted."
    rows = 2 * tokens.key.weight.shape[1]
    built = explorer.desk.need(
        ("heads", layer, asking.rows, asking.above, asking.head, "built"), "which training examples built it",
        sum(explorer.scanning(name, "contribution", rows) for name in sources),
        lambda tell: origin(explorer.memory, layer, found).by(explorer.index, progress=tell),
    )  # fmt: skip
    if isinstance(built, PendingWork):
        return built
    order = sorted(built, key=lambda each: -each.mean)

    def shown(some: Sequence[DirectionGroup]) -> list[DirectionExample]:
        return [DirectionExample(e.name, explorer.trained_on(e.name), e.mean, e.queries, e.keys) for e in some]

    return DirectionExamples(built.total, built.initial, shown(order[:BUILDERS]), shown(order[::-1][:BUILDERS]))
