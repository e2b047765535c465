"""The training examples that a layer sees as most like one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.progress import Progress

from ...examples import ShownExample
from ..explorer import Explorer
from ..work import PendingWork
from .examples import training_examples
from .layer_space import points_of, run_seconds
from .lines import features_of, label_name

SHOWN, MOST_COMPARED = 8, 20_000
"""How many neighbours are shown, and the most training examples among which they are looked for."""


@dataclass(frozen=True)
class Neighbour:
    """A training example that the last layer sees as similar."""

    index: Any
    shown: ShownExample | None
    label_name: str | None
    cosine: float
    selected: bool
    features: tuple[str, ...]


@dataclass(frozen=True)
class Neighbours:
    """The most similar training examples, by the angle between what a layer sees of them."""

    layer: str
    nearest: list[Neighbour]
    compared: int
    count: int


def neighbours_of(explorer: Explorer, index: int) -> Neighbours | PendingWork:
    """The training examples that are most like one, as the last layer sees them."""
    layer, examples = explorer.layers[-1], training_examples(explorer)
    rows = [name for name in examples.names if isinstance(name, int) and 0 <= name < explorer.count("train")]
    stride = ceil(len(rows) / MOST_COMPARED)
    compared = rows[::stride]

    def work(progress: Progress) -> Float[Tensor, "n d"]:
        points = points_of(explorer.fork(), "train", compared, layer, progress).points
        return points - points.mean(0)

    seconds = run_seconds(explorer, layer, len(compared))
    title = f"what layer {layer} sees of {len(compared):,} training examples"
    points = explorer.work_queue.result(("neighbours", layer), title, seconds, work)
    if isinstance(points, PendingWork):
        return points
    own = points[compared.index(index)] if index in compared else _point(explorer, index, layer, compared, points)
    unit = torch.nn.functional.normalize(points, dim=1)
    cosines = unit @ torch.nn.functional.normalize(own, dim=0)
    best = cosines.topk(min(SHOWN + 1, len(compared))).indices.tolist()
    nearest = [
        Neighbour(
            compared[place],
            shown := explorer.trained_on(compared[place]),
            label_name(explorer, examples.labels[examples.place[compared[place]]]),
            float(cosines[place]),
            compared[place] in explorer.selected,
            features_of(explorer, shown),
        )
        for place in best
        if compared[place] != index
    ]
    return Neighbours(layer, nearest[:SHOWN], len(compared), len(rows))


def _point(
    explorer: Explorer, index: int, layer: str, compared: Sequence[int], points: Float[Tensor, "n d"]
) -> Float[Tensor, " d"]:
    """One more example in the space whose mean the others have: an example that is there says where the mean is."""
    with explorer.lock:
        two = points_of(explorer, "train", [index, compared[0]], layer, False).points
    return two[0] - (two[1] - points[0])
