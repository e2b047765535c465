"""The numbers of all training examples: what they add, how suspicious they are, how often they were visited."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dualform.errors import QueryError
from dualform.explain import Suspects

from ..explorer import Explorer
from ..work import PendingWork
from .examples import TrainingExamples, training_examples
from .question import TrainingSetQuestion
from .sums import ExampleSums, known_sums, sums_of
from .suspicion import known_suspects, suspicion_of


@dataclass(frozen=True, eq=False)
class TrainingTable:
    """The numbers of all training examples, one array each in the order of the examples."""

    examples: TrainingExamples
    numbers: dict[str, Float[np.ndarray, " n"]]
    suspect: Bool[np.ndarray, " n"]
    suggested: Int[np.ndarray, " n"]
    """−1 where no label is suggested."""
    sums: ExampleSums | None
    suspects: Suspects | None
    pending: list[PendingWork]
    notes: list[str]


def training_table(explorer: Explorer, choice: TrainingSetQuestion, start: bool = True) -> TrainingTable:
    """All numbers of the training examples; what takes long is pending, or missing unless it is to ``start``."""
    examples = training_examples(explorer)
    n, pending, notes = len(examples), [], []
    numbers: dict[str, np.ndarray] = {"visits": examples.visits.astype(float)}
    sums = suspects = None
    try:
        sums = sums_of(explorer, choice) if start else known_sums(explorer, choice)
    except QueryError as error:
        notes.append(f"What examples add is not known: {error}")
    if isinstance(sums, PendingWork):
        pending.append(sums)
        sums = None
    if sums is not None:
        places = np.array([examples.place.get(name, -1) for name in sums.names])
        known = places >= 0
        for name, values in (("adds", sums.adds), ("size", sums.size), ("against", sums.against)):
            if values is not None:
                numbers[name] = np.where(examples.visits > 0, 0.0, np.nan)
                numbers[name][places[known]] = values.numpy()[known]
    suspects = suspicion_of(explorer) if start else known_suspects(explorer)
    suspect, suggested = np.zeros(n, bool), np.full(n, -1)
    if isinstance(suspects, PendingWork):
        pending.append(suspects)
    elif isinstance(suspects, str):
        notes.append(suspects)
    elif suspects is not None:
        places = suspects.table["index"].to_numpy()
        columns = set(suspects.table.column_names)
        for name, column in (("suspicion", "score"), ("loss", "loss"), ("confidence", "confidence"), ("own", "own")):
            if column in columns:
                numbers[name] = np.full(n, np.nan)
                numbers[name][places] = suspects.table[column].to_numpy()
        suspect[places], suggested[places] = (suspects.table[name].to_numpy() for name in ("suspect", "suggested"))
    return TrainingTable(
        examples,
        numbers,
        suspect,
        suggested,
        sums,
        suspects if isinstance(suspects, Suspects) else None,
        pending,
        notes,
    )
