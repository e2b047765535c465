"""What the heads of an attention layer separate: a report on them in the form that pages display."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dualform.errors import QueryError, SizeError
from dualform.progress import Progress
from dualform.svm import HeadReport, Report, Trajectory, origin, reports, trajectory
from dualform.svm.heads import COLUMNS, LEGEND, DirectionGroup, cells, is_separating, sentences, source_of, verdict

from ...examples import ShownExample
from ..explorer import ExamplePlace, Explorer, visible
from ..work import PendingWork
from .heads import attention_layers
from .page import TokenNames, side_of

SUPPORT_LINES, ITEMS, BARS, BUILDERS = 12, 12, 40, 7
"""How many support tokens, vocabulary items, histogram bars and training examples are shown."""

ROWS, MOST_ROWS, MOMENTS = 16, 128, 8
"""How many examples a report uses by default and at most, and how many moments of training."""

A_HEAD = 2.5
"""Estimated seconds for one head; the time varies with the problem."""

NameOf = Callable[[int, int], str]
"""Gives the name of a token from the numbers of its sequence and place."""


@dataclass(frozen=True)
class SupportTokenLine:
    """A support token: the query and selected token that it is separated from, and its share of the margin."""

    sequence: int
    query: str
    selected: str
    token: str
    share: float


@dataclass(frozen=True)
class HeadView:
    """One head: its findings in words, its margins, its singular values, and the support tokens of the margin."""

    head: int
    sentences: list[str]
    margins: list[int]
    """A histogram from the smallest to the largest margin."""
    margin_range: tuple[float, float]
    spectra: dict[str, list[float]]
    """Singular values relative to the largest, of the head's matrix and of the separating ones."""
    places: list[float]
    items: list[tuple[str, float]]
    support: list[SupportTokenLine]


@dataclass(frozen=True)
class HeadsView:
    """A layer: its table of heads, and the details of some heads."""

    layer: str
    columns: list[str]
    rows: list[list[str]]
    legend: str
    verdicts: list[str]
    """One sentence for each head."""
    separating: int
    """How many heads separate better than chance."""
    heads: list[HeadView]


def view_of(
    report: Report, heads: Sequence[int], token_name: NameOf, item_name: Callable[[int], str] | None = None
) -> HeadsView:  # fmt: skip
    """A report in the form that pages display, with the details of some heads.

    ``token_name`` gives the name of a token in a sequence, ``item_name`` the text of a vocabulary item.
    """
    shown = [_head(report[head], token_name, item_name) for head in heads]
    return HeadsView(
        report.layer,
        list(COLUMNS),
        [cells(head_report) for head_report in report],
        LEGEND,
        [verdict(head_report) for head_report in report],
        sum(is_separating(head_report) is True for head_report in report),
        shown,
    )


def _head(report: HeadReport, token_name: NameOf, item_name: Callable[[int], str] | None) -> HeadView:
    low, high = float(report.margins[0]), float(report.margins[-1])
    counts = torch.histc(report.margins, BARS, low, high) if high > low else torch.tensor([len(report.margins)])
    items = list(report.by_item().items())[:ITEMS] if item_name and report.items is not None and report.found else []
    return HeadView(
        report.head, sentences(report), [int(count) for count in counts], (low, high),
        {kind: _relative(spectrum.singular) for kind, spectrum in report.spectra.items()},
        report.by_place().tolist() if report.found else [],
        [(item_name(number), share) for number, share in items] if item_name else [],
        _support_lines(report, token_name),
    )  # fmt: skip


def _relative(singular: Tensor) -> list[float]:
    """Singular values relative to the largest."""
    return (singular / singular[0].clamp(min=1e-300)).tolist()


def _support_lines(report: HeadReport, token_name: NameOf) -> list[SupportTokenLine]:
    sight = report.sight
    places = zip(sight.sequence.tolist(), sight.place.tolist(), strict=True)
    selected = dict(zip(places, report.selected.tolist(), strict=True))
    return [
        SupportTokenLine(s, token_name(s, q), token_name(s, selected[s, q]), token_name(s, t), share)
        for s, q, t, _, share in report.support(SUPPORT_LINES)
    ]


# ------------------------------------------------------------------------------------------- in the explorer


@dataclass(frozen=True)
class SeparationQuestion:
    """The controls of the page: layer, head, number of examples, and the least weight of a query in per cent."""

    layer: str | None = None
    head: int = 0
    rows: int = ROWS
    above: int = 0


@dataclass(frozen=True)
class HeadCurve:
    """One quantity of a head through training."""

    name: str
    values: list[float]


@dataclass(frozen=True)
class HeadTrajectory:
    """The quantities of one head at some steps of training."""

    head: int
    steps: list[int]
    curves: list[HeadCurve]


@dataclass(frozen=True)
class DirectionExample:
    """A training example and what it put into the separating direction."""

    index: Any
    shown: ShownExample | None
    mean: float
    queries: float
    keys: float


@dataclass(frozen=True)
class DirectionExamples:
    """The training examples that put most into the direction, with the total and the part of the initial weights."""

    total: float
    initial: float
    most: list[DirectionExample]
    least: list[DirectionExample]


@dataclass(frozen=True)
class SeparationView:
    """Everything the page shows."""

    layers: list[str]
    heads: int
    available: int
    set: str
    asking: SeparationQuestion
    found: HeadsView | PendingWork
    through: HeadTrajectory | PendingWork | None
    built: DirectionExamples | PendingWork | str | None
    """None without a report; a sentence if it cannot be computed."""


def separation(explorer: Explorer, asking: SeparationQuestion) -> SeparationView:
    """What the heads of a layer separate on some examples."""
    layers, name = attention_layers(explorer.model), "test" if explorer.test is not None else "train"
    if not layers or not explorer.count(name):
        raise QueryError(
            "this page needs a network with attention heads, and examples: give some with --test or --data."
        )
    layer = asking.layer or next(iter(layers))
    if layer not in layers:
        raise QueryError(f"there is no attention layer '{layer}': there are {list(layers)}.")
    heads = int(getattr(layers[layer], "heads", 0) or getattr(layers[layer], "num_heads", 1))
    rows = max(1, min(asking.rows, MOST_ROWS, explorer.count(name)))
    if not 0 <= asking.head < heads or not 0 <= asking.above < 100:
        raise QueryError(
            f"there is no head {asking.head} with queries above {asking.above} %: choose a head from 0 to {heads - 1} "
            "and a weight from 0 to 99 %."
        )
    asking = SeparationQuestion(layer, asking.head, rows, asking.above)
    key = ("heads", layer, rows, asking.above)
    report = explorer.work_queue.result(
        (*key, "report"), f"what the {heads} heads of {layer} separate", A_HEAD * heads, _report(explorer, name, asking)
    )
    view, through, built = report, None, None
    if not isinstance(report, PendingWork):
        view = _view(explorer, name, report, asking)
        path = explorer.work_queue.result(
            (*key, "through"), f"the same at {MOMENTS} moments of training", A_HEAD * heads * MOMENTS,
            _trajectory(explorer, name, asking),
        )  # fmt: skip
        through = path if isinstance(path, PendingWork) else through_of(path, layer, asking.head)
        built = _built(explorer, report[asking.head], asking)
    assert isinstance(view, HeadsView | PendingWork)
    return SeparationView(list(layers), heads, explorer.count(name), name, asking, view, through, built)


def _inputs(explorer: Explorer, name: str, asking: SeparationQuestion) -> tuple[Any, Any]:
    """A batch of examples, and its token ids if the examples are text."""
    inputs, examples = explorer.inputs(name, range(asking.rows)), explorer.examples(name)
    first = inputs if isinstance(inputs, torch.Tensor) else next(iter(inputs.values()))
    text = examples is not None and examples.kind == "text" and first.ndim == 2
    return inputs, first if text else None


def _report(explorer: Explorer, name: str, asking: SeparationQuestion) -> Callable[[Progress], Report]:
    def work(progress: Progress) -> Report:
        fork, (inputs, items), layer = explorer.fork(), _inputs(explorer, name, asking), asking.layer or ""
        weights = fork.memory.weights_for(fork.model)
        return reports_with(
            items, fork.model, inputs, layers=[layer], weights=weights, above=asking.above / 100, progress=progress
        )[layer]

    return work


def reports_with(items: Any, model: Any, inputs: Any, **options: Any) -> dict[str, Report]:
    """Reports with token ids if these match the keys of the layer; they do not if the layer adds a class token."""
    try:
        return reports(model, inputs, items=items, **options)
    except SizeError:
        if items is None:
            raise
        return reports(model, inputs, **options)


def _trajectory(explorer: Explorer, name: str, asking: SeparationQuestion) -> Callable[[Progress], Trajectory]:
    """The work of a trajectory, over all queries: at the beginning no query attends sharply."""

    def work(progress: Progress) -> Trajectory:
        fork, (inputs, _) = explorer.fork(), _inputs(explorer, name, asking)
        return trajectory(
            fork.model, inputs, fork.memory, steps=MOMENTS - 1, layers=[asking.layer or ""], nuclear=False,
            progress=progress,
        )  # fmt: skip

    return work


def through_of(path: Trajectory, layer: str, head: int) -> HeadTrajectory:
    """The curves of one head of a trajectory."""
    return HeadTrajectory(
        head, list(path.steps), [HeadCurve(curve, path.curve(layer, head, curve)) for curve in CURVES]
    )


CURVES = ("norm", "above 0.9", "entropy", "efficiency", "cosine", "null cosine", "effective rank", "changed")


def _view(explorer: Explorer, name: str, report: Report, asking: SeparationQuestion) -> HeadsView:
    """The report with tokens named after the examples."""
    keys = report[asking.head].sight.x.shape[1]

    @cache
    def names(row: int) -> TokenNames:
        shown = explorer.shown(ExamplePlace(name, row))
        count = shown.lines.steps if shown.lines is not None else keys  # a series is shown without its padding
        return TokenNames(shown, count, side_of(keys) if shown.kind == "image" else 0)

    examples = explorer.examples(name)
    words = None if examples is None else examples.vocabulary
    return view_of(
        report, [asking.head], lambda row, token: names(row)([token]),
        None if words is None else lambda number: visible(words.decode([number])[0]),
    )  # fmt: skip


def _built(
    explorer: Explorer, head_report: HeadReport, asking: SeparationQuestion
) -> DirectionExamples | PendingWork | str:
    """The training examples that built the separating direction, and those that worked against it."""
    layer, tokens = asking.layer or "", head_report.sight.tokens
    if tokens is None or head_report.found is None:
        return "This head has no separating direction in the model’s space, so there is nothing to attribute."
    sources = list(dict.fromkeys(source_of(explorer.memory, layer, part) for part in (tokens.query, tokens.key)))
    if missing := [name for name in sources if name not in explorer.layers or explorer.info(name).keep != "slots"]:
        return f"The training examples behind it are unknown: no slots of ‘{missing[0]}’ were kept."
    if explorer.index not in explorer.columns:
        return f"The training examples behind it are unknown: no column ‘{explorer.index}’ was noted."
    rows = 2 * tokens.key.weight.shape[1]
    built = explorer.work_queue.result(
        ("heads", layer, asking.rows, asking.above, asking.head, "built"), "which training examples built it",
        sum(explorer.scan_seconds(name, "contribution", rows) for name in sources),
        lambda progress: origin(explorer.memory, layer, head_report).by(explorer.index, progress=progress),
    )  # fmt: skip
    if isinstance(built, PendingWork):
        return built
    order = sorted(built, key=lambda part: -part.mean)

    def shown(groups: Sequence[DirectionGroup]) -> list[DirectionExample]:
        return [DirectionExample(e.name, explorer.trained_on(e.name), e.mean, e.queries, e.keys) for e in groups]

    return DirectionExamples(built.total, built.initial, shown(order[:BUILDERS]), shown(order[::-1][:BUILDERS]))
