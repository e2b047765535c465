"""Which training examples have labels that look wrong, with the labels that the others suggest."""

import torch

from dualform.errors import QueryError
from dualform.explain import Suspects
from dualform.progress import Progress

from ...inputs import together
from ..explorer import Explorer
from ..work import PendingWork
from .examples import trained_label

KEYS = ("slots", "keys", "keys+ledger")
"""What must be kept of a layer for it to have a voice."""

FIXED, READ, EXAMPLE = 0.1, 1.2e-9, 1.5e-6
"""Measured: seconds that a search takes in any case, for each number that is read, and for each example and class."""

SOLVE = 25.0
"""The cost of the principal axes of a matrix, relative to a matrix product of the same width."""


def suspicion_of(explorer: Explorer) -> Suspects | PendingWork | str:
    """The suspects among all training examples, cached; pending work if they take long; a sentence if there are none.

    The labels are those that were noted while recording, else those of the data.
    """
    if results := explorer.work_queue.latest("suspects"):
        return results[0]
    train = explorer.train
    if train is None:
        return "To find suspects, give the training examples with --data."
    if train.is_stream:
        return "Suspects are examples with a class each; a long text has none."
    if explorer.index not in explorer.memory.store.visits.column_names:
        return f"To find suspects, note a column ‘{explorer.index}’ while recording."
    labels = [trained_label(explorer, row) for row in range(len(train))]
    if not all(isinstance(label, int) for label in labels):
        return "To find suspects, give training examples with labels that are whole numbers, a class each."

    def work(progress: Progress) -> Suspects | str:
        own = explorer.fork()
        rows = list(range(len(train)))
        inputs = together(train.rows(rows), train.beside(rows), own.model)
        try:
            return own.memory.suspects(
                own.model, inputs, torch.tensor(labels), column=explorer.index,
                classes=tuple(explorer.classes or ()), progress=progress,
            )  # fmt: skip
        except QueryError as error:
            return f"There are no suspects here: {error}"

    return explorer.work_queue.result(("suspects",), "which labels look wrong", suspicion_seconds(explorer), work)


def known_suspects(explorer: Explorer) -> Suspects | None:
    """The suspects if they have been computed."""
    results = explorer.work_queue.latest("suspects")
    return results[0] if results and isinstance(results[0], Suspects) else None


def suspicion_seconds(explorer: Explorer) -> float:
    """Estimated seconds to find the suspects: reading the keys, one regression a layer, and comparing all pairs."""
    assert explorer.train is not None
    n, store, seconds = len(explorer.train), explorer.memory.store, FIXED
    width = 0
    for info in store.manifest.layers:
        if info.keep not in KEYS:
            continue
        width = min(2048, info.width if info.indexed else info.key_size)
        rank = min(n, width)
        seconds += store.slots(info.name) * info.key_size * READ + n * EXAMPLE * max(1, explorer.outputs)
        seconds += (4 * n * width * rank + SOLVE * rank**3) * explorer.estimates.speed.product / 2
    return seconds + min(2.0**37, n * n * width) * 2 * explorer.estimates.speed.product / 2
