"""The report: the explorer's views of some examples as one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from markupsafe import Markup

from dualform.errors import QueryError

from .views import (
    ExamplePlace,
    Explorer,
    PendingWork,
    PredictionQuestion,
    PredictionView,
    TrainingSetQuestion,
    TrainingSetView,
    WhatIfMasks,
    WhatIfView,
    predict,
    render,
    run,
    style,
    training_set,
    what_if,
)

SHOWN, CANDIDATES = 8, 2000
"""Training examples shown for each prediction, and the number of test examples that the report chooses from."""


@dataclass(frozen=True)
class ReportedExample:
    """One example of the report: what the network and each layer recall, and the prediction under a mask."""

    number: int
    title: str
    network: PredictionView
    """The view of the whole network, or of the last layer where only layers can be asked."""
    layers: Sequence[PredictionView]
    """The views of single layers, the last one first."""
    masked: str
    without: WhatIfView | None


def write_report(
    file: Path,
    explorer: Explorer,
    rows: Mapping[ExamplePlace, str],
    *,
    title: str = "Which training examples are these predictions made of?",
    facts: Mapping[str, str] | None = None,
    weigh: int = 200,
) -> Path:
    """Write a report about some examples, each with a title; ``weigh`` test examples weigh the training set."""
    examples = [_reported_example(explorer, number, place, rows[place]) for number, place in enumerate(rows)]
    training = _training_set(explorer, weigh) if weigh else None
    page = render(
        "report.html", title=title, facts=facts, examples=examples, training=training, run=run(explorer),
        style=Markup(style()),
    )  # fmt: skip
    file.write_text(page, encoding="utf-8")
    return file


def choose(explorer: Explorer, count: int) -> dict[ExamplePlace, str]:
    """Choose the most informative examples: sure mistakes, close calls and sure predictions, in turn."""
    name = "test" if explorer.test is not None else "train"
    examples = explorer.examples(name)
    if examples is None:
        raise QueryError("there are no examples to report on. Give some with --test or --data.")
    rows = list(range(0, len(examples), examples.stride))[:CANDIDATES]
    logits = explorer.logits(name, rows)
    if logits.shape[1] == 1:
        return {ExamplePlace(name, row): f"{name} example {row}" for row in rows[:count]}
    sure, predicted = logits.double().softmax(1).max(1)
    labels = torch.tensor([-1 if (label := examples.label(row)) is None else label for row in rows])
    wrong = (labels >= 0) & (predicted != labels)
    by_doubt = torch.where(wrong, 2.0, sure).argsort().tolist()
    kinds = {
        "A mistake": [
            number for number in torch.where(wrong, sure, -1.0).argsort(descending=True).tolist() if wrong[number]
        ],
        "A close call": by_doubt,
        "A sure prediction": torch.where(wrong, -1.0, sure).argsort(descending=True).tolist(),
    }
    chosen: dict[ExamplePlace, str] = {}
    while len(chosen) < min(count, len(rows)):
        for title, order in kinds.items():
            place = next((p for number in order if (p := ExamplePlace(name, rows[number])) not in chosen), None)
            if place is not None and len(chosen) < count:
                chosen[place] = f"{title}: {name} example {place.row}"
    return chosen


def _reported_example(explorer: Explorer, number: int, place: ExamplePlace, title: str) -> ReportedExample:
    places = (None, *reversed(explorer.layers))
    views = [predict(explorer, place, PredictionQuestion(layer=layer, k=SHOWN)) for layer in places]
    network, *layers = (view for view in views if not isinstance(view, PendingWork))
    assert len(layers) == len(explorer.layers), "a report waits for everything"
    predicted = network.says[0].number
    if "label" in explorer.columns and predicted in explorer.groups("label"):
        return ReportedExample(
            number, title, network, layers, f"label = {predicted}",
            what_if(explorer, place, WhatIfMasks(by="label", groups=(str(predicted),))),
        )  # fmt: skip
    return ReportedExample(number, title, network, layers, "", None)


def _training_set(explorer: Explorer, weigh: int) -> TrainingSetView | None:
    """The view of the training set; None without a test set, or without a column that names training examples."""
    if explorer.test is None or explorer.index not in explorer.columns:
        return None
    slots = [layer for layer in explorer.layers if explorer.info(layer).keep == "slots"]
    return training_set(explorer, TrainingSetQuestion(layer=slots[-1], rows=weigh)) if slots else None
