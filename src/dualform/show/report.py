"""The explorer's views, frozen: one page in a single file that needs nothing else, for any screen."""

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

SHOWN, LOOKED_AT = 8, 2000
"""Training examples for each prediction, and test examples among which the report chooses its own."""


@dataclass(frozen=True)
class ReportedExample:
    """One example of the report: what each layer recalls, the last one first, and what a mask changes."""

    number: int
    title: str
    layers: Sequence[PredictionView]
    masked: str
    without: WhatIfView | None

    @property
    def last(self) -> PredictionView:
        """What the last layer says."""
        return self.layers[0]


def write_report(
    file: Path,
    explorer: Explorer,
    rows: Mapping[ExamplePlace, str],
    *,
    title: str = "Which training examples are these predictions made of?",
    facts: Mapping[str, str] | None = None,
    weigh: int = 200,
) -> Path:
    """Write the page about some examples, each with a title; ``weigh`` test examples judge the training set."""
    asked = [_ask(explorer, number, place, rows[place]) for number, place in enumerate(rows)]
    training = _training(explorer, weigh) if weigh else None
    page = render(
        "report.html", title=title, facts=facts, asked=asked, training=training, run=run(explorer),
        style=Markup(style()),
    )  # fmt: skip
    file.write_text(page, encoding="utf-8")
    return file


def choose(explorer: Explorer, count: int) -> dict[ExamplePlace, str]:
    """Examples that are worth a look: sure mistakes, close calls and sure predictions, in turns."""
    name = "test" if explorer.test is not None else "train"
    examples = explorer.examples(name)
    if examples is None:
        raise QueryError("there are no examples to report on: give some with --test or --data.")
    rows = list(range(0, len(examples), examples.stride))[:LOOKED_AT]
    logits = explorer.logits(name, rows)
    if logits.shape[1] == 1:
        return {ExamplePlace(name, row): f"{name} example {row}" for row in rows[:count]}
    sure, said = logits.double().softmax(1).max(1)
    labels = torch.tensor([-1 if (label := examples.label(row)) is None else label for row in rows])
    wrong = (labels >= 0) & (said != labels)
    by_doubt = torch.where(wrong, 2.0, sure).argsort().tolist()
    kinds = {
        "A mistake": [i for i in torch.where(wrong, sure, -1.0).argsort(descending=True).tolist() if wrong[i]],
        "A close call": by_doubt,
        "A sure prediction": torch.where(wrong, -1.0, sure).argsort(descending=True).tolist(),
    }
    found: dict[ExamplePlace, str] = {}
    while len(found) < min(count, len(rows)):
        for title, order in kinds.items():
            place = next((p for i in order if (p := ExamplePlace(name, rows[i])) not in found), None)
            if place is not None and len(found) < count:
                found[place] = f"{title}: {name} example {place.row}"
    return found


def _ask(explorer: Explorer, number: int, place: ExamplePlace, title: str) -> ReportedExample:
    views = [predict(explorer, place, PredictionQuestion(layer=layer, k=SHOWN)) for layer in reversed(explorer.layers)]
    layers = [view for view in views if not isinstance(view, PendingWork)]
    assert len(layers) == len(views), "a report waits for everything"
    said = layers[0].says[0].number
    if "label" in explorer.columns and said in explorer.groups("label"):
        return ReportedExample(
            number, title, layers, f"label = {said}",
            what_if(explorer, place, WhatIfMasks(by="label", groups=(str(said),))),
        )  # fmt: skip
    return ReportedExample(number, title, layers, "", None)


def _training(explorer: Explorer, weigh: int) -> TrainingSetView | None:
    """The training set, if its examples can be told apart and there is something to judge them by."""
    if explorer.test is None or explorer.index not in explorer.columns:
        return None
    slots = [layer for layer in explorer.layers if explorer.info(layer).keep == "slots"]
    return training_set(explorer, TrainingSetQuestion(layer=slots[-1], rows=weigh)) if slots else None
