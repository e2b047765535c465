"""Examples as points in the space of a layer: what the layer sees of each, in the network as it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain.query import Question, capture
from dualform.progress import Progress

from ...text import need_logits
from ..explorer import BATCH, Explorer
from ..work import PendingWork

SAMPLE = 16
"""How many examples are run to learn how long one takes."""


@dataclass(frozen=True, eq=False)
class LayerSpace:
    """One point an example: the mean of its rows in a layer; and the class that the network predicts for it."""

    points: Float[Tensor, "n d"]
    predicted: Int[Tensor, " n"] | None
    """None where the network gives one number."""


def points_of(explorer: Explorer, name: str, rows: Sequence[int], layer: str, progress: Progress) -> LayerSpace:
    """Run the network on some examples of a set; of an embedding the points are what it gives, not the tokens."""
    info, module = explorer.memory.store.layer(layer)
    weights = explorer.memory.weights_for(explorer.model)
    points, predicted = [], []
    for begin in range(0, len(rows), BATCH):
        batch = rows[begin : begin + BATCH]
        count = len(batch)
        shown = capture(
            explorer.model, explorer.inputs(name, batch), {module.name: (info, module)}, weights,
            lambda _, count=count: torch.zeros(count), explorer.memory.store,
        )  # fmt: skip
        calls = shown.calls[module.name]
        question = Question(
            explorer.memory.store, explorer.memory.view, info, module, shown.target, count, calls, "weight"
        )
        seen = (
            question.outputs if info.indexed else question.queries.rows.unflatten(0, (-1, question.queries.per_example))
        )
        if len(seen) != count:
            raise QueryError(f"the rows of layer '{layer}' cannot be told apart by example. Choose another layer.")
        points.append(seen.float().mean(1).cpu())
        logits = need_logits(shown.output)
        if logits.shape[1] > 1:
            predicted.append(logits.argmax(1).cpu())
        if not isinstance(progress, bool):
            progress("running the network", begin + count, len(rows))
    return LayerSpace(torch.cat(points), torch.cat(predicted) if predicted else None)


def run_seconds(explorer: Explorer, layer: str, rows: int) -> float:
    """Estimated seconds to run the network on some examples, measured once."""

    def measure(_: Progress) -> float:
        name = "test" if explorer.count("test") else "train"
        sample = list(range(min(SAMPLE, explorer.count(name))))
        with explorer.lock:
            points_of(explorer, name, sample, layer, False)
            start = perf_counter()
            points_of(explorer, name, sample, layer, False)
        return (perf_counter() - start) / max(1, len(sample))

    seconds = explorer.work_queue.result(("run seconds", layer), "the speed of the network", 0.0, measure)
    return 0.0 if isinstance(seconds, PendingWork) else rows * seconds
