"""The page *Training set*: all training examples, sorted, filtered and paged, as a gallery or as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..explorer import MANY, Explorer
from ..numbers import signed_alike
from ..render import minus
from ..work import PendingWork
from .filters import chosen_examples
from .lines import ExampleLine, feature_names, lines_of
from .question import PAGE, TrainingSetQuestion, noted_columns, settle_choice, sorts_of
from .sums import Misprediction, mistakes_of, right_target
from .table import training_table

SIGNED, UNSIGNED = ("adds", "against", "own"), ("size", "suspicion", "loss", "confidence")
"""The columns of numbers: those whose sign means something, and the others."""

MISTAKES = 24
"""How many mistakes of the network are shown."""


@dataclass(frozen=True)
class TrainingSetView:
    """Everything the page shows."""

    question: TrainingSetQuestion
    layers: list[str]
    kind: str
    sorts: dict[str, str]
    labels: list[tuple[int, str]]
    """The labels that can be filtered by, with their names."""
    columns: dict[str, list[str]]
    """The noted columns that can be filtered by, with their values."""
    features: tuple[str, ...]
    """The names of the features of a row of a table."""
    lines: list[ExampleLine]
    figures: dict[str, list[str]]
    """The numbers of the lines as text, those of a column with equal digits; a dash where nothing is known."""
    first: int
    """The number of the first line among all that the filters show."""
    shown: int
    count: int
    pages: int
    selected: int
    target: str
    asked: int
    """How many test examples the training examples were weighed over; 0 if they were not."""
    available: int
    right: float | None
    left_out: tuple[str, ...]
    pending: list[PendingWork]
    notes: list[str]
    problems: dict[str, str]
    """What is wrong with a field, by its name."""
    suspects: int | None
    """How many labels look wrong; None if that is not known."""
    voices: str
    """How the suspects were found."""
    mistakes: list[Misprediction]
    mistaken: int


def training_set(explorer: Explorer, choice: TrainingSetQuestion) -> TrainingSetView:
    """One page of the training examples. What takes long is announced, and missing until it is done."""
    choice = settle_choice(explorer, choice)
    assert choice.sort is not None
    table = training_table(explorer, choice)
    examples, sums = table.examples, table.sums
    order, problems, pending = chosen_examples(explorer, choice, table)
    pages = max(1, -(-len(order) // PAGE))
    choice = replace(choice, page=min(choice.page, pages))
    first = (choice.page - 1) * PAGE
    notes = list(table.notes)
    if choice.sort in ("adds", "size", "against", "suspicion", "own") and choice.sort not in table.numbers:
        notes.insert(0, f"Not sorted yet: {sorts_of(explorer)[choice.sort]} is not known.")
    like = explorer.train or explorer.test
    lines = lines_of(explorer, table, order[first : first + PAGE])
    labels = {label for label in examples.labels if isinstance(label, int)}
    return TrainingSetView(
        question=choice,
        layers=list(explorer.layers),
        kind="none" if like is None else like.kind,
        sorts=sorts_of(explorer),
        labels=[(label, explorer.class_name(label)) for label in sorted(labels)] if len(labels) <= MANY else [],
        columns={name: values for name in noted_columns(explorer) if (values := _values(explorer, name))},
        features=feature_names(explorer),
        lines=lines,
        figures={name: _figures(lines, name) for name in SIGNED + UNSIGNED},
        first=first,
        shown=len(order),
        count=len(examples),
        pages=pages,
        selected=len(explorer.selected),
        target=right_target(explorer),
        asked=0 if sums is None else len(sums.test_rows),
        available=explorer.count("test"),
        right=None if sums is None else sums.right,
        left_out=() if sums is None else sums.left_out,
        pending=[*table.pending, *pending],
        notes=notes,
        problems=problems,
        suspects=None if table.suspects is None else int(table.suspect.sum()),
        voices="" if table.suspects is None else ", ".join(table.suspects.voices),
        mistakes=[] if sums is None else mistakes_of(explorer, sums, MISTAKES),
        mistaken=0 if sums is None else len(sums.wrong),
    )


def _figures(lines: Sequence[ExampleLine], name: str) -> list[str]:
    """A column of numbers as text."""
    values = [getattr(line, name) for line in lines]
    known = [value for value in values if value is not None]
    texts = signed_alike(known) if name in SIGNED else [text.removeprefix("+") for text in signed_alike(known)]
    waiting = iter(minus(text) for text in texts)
    return ["–" if value is None else next(waiting) for value in values]


def _values(explorer: Explorer, column: str) -> list[str]:
    groups = explorer.groups(column)
    return [str(value) for value in groups] if len(groups) <= MANY else []
