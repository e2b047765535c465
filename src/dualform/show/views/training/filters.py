"""Which training examples the filters of a question show, and in which order."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from dualform.errors import FilterError, QueryError
from dualform.explain import matching

from ..explorer import Explorer
from ..work import PendingWork
from .examples import TrainingExamples, texts_of
from .question import TrainingSetQuestion, settle_choice
from .table import TrainingTable, training_table


def chosen_examples(
    explorer: Explorer, choice: TrainingSetQuestion, table: TrainingTable
) -> tuple[Int[np.ndarray, " m"], dict[str, str], list[PendingWork]]:
    """The places of the examples that the filters show, in the chosen order; and what is wrong with which field."""
    examples = table.examples
    kept, problems, pending = np.ones(len(examples), bool), {}, []
    if choice.label is not None:
        kept &= np.array([label == choice.label for label in examples.labels])
    if choice.column is not None and choice.value is not None:
        kept &= _with_value(explorer, examples, choice.column, choice.value)
    if choice.filter:
        try:
            holds = matching(explorer.memory.visits, choice.filter, plain=True)
            places = examples.place_of_visit[holds]
            matched = np.zeros(len(examples), bool)
            matched[places[places >= 0]] = True
            kept &= matched
        except FilterError as error:
            problems["filter"], kept = str(error), np.zeros(len(examples), bool)
    if choice.text:
        if explorer.train is None or explorer.train.kind != "text":
            problems["text"] = "The training examples are no texts."
        elif isinstance(texts := texts_of(explorer, examples), PendingWork):
            pending.append(texts)
        else:
            wanted = choice.text.lower()
            kept &= np.array([wanted in text for text in texts])
    if choice.only == "selected":
        kept &= np.array([name in explorer.selected for name in examples.names])
    elif choice.only == "unseen":
        kept &= examples.visits == 0
    elif choice.only == "suspects":
        kept &= table.suspect
        if table.suspects is None:
            problems["only"] = "The suspects are not known yet."
    places = np.flatnonzero(kept)
    return places[np.argsort(_ranks(choice, table)[places], kind="stable")], problems, pending


def shown_indices(explorer: Explorer, choice: TrainingSetQuestion) -> list[Any]:
    """The indices of all examples that the filters of a question show, on whichever page."""
    choice = settle_choice(explorer, choice)
    table = training_table(explorer, choice)
    order, problems, pending = chosen_examples(explorer, choice, table)
    if problems or pending:
        raise QueryError(" ".join(problems.values()) or "The texts are not ready to be searched yet.")
    return [table.examples.names[place] for place in order]


def _with_value(explorer: Explorer, examples: TrainingExamples, column: str, value: str) -> Bool[np.ndarray, " n"]:
    """Whether an example has a visit with a value, which is written as text."""
    wanted = {noted for noted in explorer.groups(column) if str(noted) == value}
    noted = examples.noted[column]
    holds = np.array([first in wanted for first in noted.values])
    if noted.varies.any():
        values = explorer.memory.visits[column].to_pylist()
        places = examples.place_of_visit[np.array([each in wanted for each in values], bool)]
        holds[places[places >= 0]] = True
    return holds


def _ranks(choice: TrainingSetQuestion, table: TrainingTable) -> Float[np.ndarray, " n"]:
    """What to sort by, ascending; what is not known comes last."""
    examples, sort = table.examples, choice.sort or "index"
    if sort in table.numbers:
        values = table.numbers[sort]
    elif sort == "label":
        values = _places_in_order(examples.labels)
    elif sort.startswith("noted."):
        values = _places_in_order(examples.noted[sort.removeprefix("noted.")].values)
    else:
        values = np.arange(float(len(examples)))
        return -values if sort == "index" and choice.order == "down" else values
    values = -values if choice.order == "down" else values
    return np.where(np.isnan(values), np.inf, values)


def _places_in_order(values: Sequence[Any]) -> Float[np.ndarray, " n"]:
    """The rank of each value; NaN for None."""
    different = sorted({value for value in values if value is not None}, key=lambda value: (str(type(value)), value))
    rank = {value: float(number) for number, value in enumerate(different)}
    return np.array([rank.get(value, np.nan) for value in values])
