"""The map: training and test examples as dots on the two directions in which a layer sees them differ most."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.progress import Progress

from ..explorer import ExamplePlace, Explorer
from ..work import PendingWork
from .examples import training_examples
from .layer_space import points_of, run_seconds
from .lines import label_name
from .sums import test_rows

MOST_DOTS, MOST_TEST = 4000, 1000
"""The most dots of a map, and how many of them are test examples if there are more."""

COLOURS = 10
"""How many classes have a colour and a shape of their own."""

ROUNDS, SUBSPACE = 16, 8
"""Rounds of the search for principal axes, and how many directions it follows."""


@dataclass(frozen=True)
class MapDot:
    """One example on the map."""

    set: str
    name: Any
    """Its index in training, or its number among the test examples."""
    x: float
    y: float
    group: int
    """The place of its class in the legend."""
    says: str | None
    wrong: bool
    selected: bool
    address: str | None


@dataclass(frozen=True)
class MapGroup:
    """A class in the legend."""

    name: str
    style: int
    """Its colour and shape; ``COLOURS`` stands for others."""
    count: int


@dataclass(frozen=True)
class MapView:
    """Everything the page shows. Both axes run from 0 to 1, y downwards."""

    layer: str
    layers: list[str]
    width: int
    dots: list[MapDot]
    groups: list[MapGroup]
    share: float
    """How much of the variance of the training examples the map shows."""
    trained: int
    tested: int
    left_out: int
    selected: int
    pending: PendingWork | None


@dataclass(frozen=True, eq=False)
class MapPoints:
    """The places of examples on the map, training examples first, and what the network says of each."""

    places: Float[Tensor, "n 2"]
    predicted: Tensor | None
    share: float
    width: int


def example_map(explorer: Explorer, layer: str | None = None) -> MapView:
    """The map of a layer; pending work if running the network takes long."""
    layer = layer or explorer.layers[-1]
    explorer.info(layer)
    trained, tested, left_out = _chosen(explorer)
    if len(trained) + len(tested) < 3:
        raise QueryError("there are too few examples for a map: give training examples with --data.")

    def work(progress: Progress) -> MapPoints:
        return _placed(explorer.fork(), layer, trained, tested, progress)

    seconds = run_seconds(explorer, layer, len(trained) + len(tested))
    result = explorer.work_queue.result(("map", layer), f"a map of what layer {layer} sees", seconds, work)
    base = {
        "layer": layer, "layers": list(explorer.layers), "trained": len(trained), "tested": len(tested),
        "left_out": left_out, "selected": len(explorer.selected),
    }  # fmt: skip
    if isinstance(result, PendingWork):
        return MapView(**base, width=0, dots=[], groups=[], share=0.0, pending=result)
    groups, dots = _dots(explorer, result, trained, tested)
    return MapView(**base, width=result.width, dots=dots, groups=groups, share=result.share, pending=None)


def _chosen(explorer: Explorer) -> tuple[list[Any], list[int], int]:
    """Which training and test examples are on the map, evenly spaced among all; and how many are not."""
    names = [name for name in training_examples(explorer).names if explorer.train is not None and _runs(explorer, name)]
    tests = test_rows(explorer, explorer.count("test")) if explorer.test is not None else []
    kept = min(len(tests), max(MOST_TEST, MOST_DOTS - len(names)))
    trained, tested = _spread(names, MOST_DOTS - kept), _spread(tests, kept)
    return trained, tested, len(names) + len(tests) - len(trained) - len(tested)


def _runs(explorer: Explorer, name: Any) -> bool:
    return isinstance(name, int) and 0 <= name < explorer.count("train")


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    if len(values) <= most:
        return list(values)
    return [values[int(place)] for place in torch.linspace(0, len(values) - 1, most).round().tolist()]


def _placed(
    explorer: Explorer, layer: str, trained: Sequence[int], tested: Sequence[int], progress: Progress
) -> MapPoints:
    total, parts = len(trained) + len(tested), []
    for name, rows, before in (("train", trained, 0), ("test", tested, len(trained))):
        if rows:
            parts.append(points_of(explorer, name, rows, layer, _shifted(progress, before, total)))
    first = parts[0].points  # training examples, unless there are only test examples
    mean = first.mean(0)
    axes = principal_axes(first - mean)
    places = torch.cat([(part.points - mean) @ axes for part in parts])
    spread = float((first - mean).square().sum())
    share = float(((first - mean) @ axes).square().sum()) / spread if spread else 1.0
    predicted = [part.predicted for part in parts if part.predicted is not None]
    low, high = places.amin(0), places.amax(0)
    places = (places - low) / (high - low).clamp(min=1e-12)
    return MapPoints(places, torch.cat(predicted) if predicted else None, share, first.shape[1])


def principal_axes(centred: Float[Tensor, "n d"], count: int = 2) -> Float[Tensor, "d c"]:
    """The directions of the largest variance, by iterating a subspace: the same for the same points, every time."""
    draw = torch.Generator().manual_seed(0)
    width = min(centred.shape[1], max(SUBSPACE, count))
    basis = torch.linalg.qr(torch.randn(centred.shape[1], width, generator=draw, dtype=centred.dtype)).Q
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis)).Q
    inside = centred @ basis
    _, vectors = torch.linalg.eigh(inside.mT @ inside)
    axes = basis @ vectors.flip(1)[:, :count]
    if axes.shape[1] < count:
        axes = torch.nn.functional.pad(axes, (0, count - axes.shape[1]))
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return axes * torch.where(largest < 0, -1.0, 1.0)


def _dots(
    explorer: Explorer, points: MapPoints, trained: Sequence[Any], tested: Sequence[int]
) -> tuple[list[MapGroup], list[MapDot]]:
    examples = training_examples(explorer)
    labels = [examples.labels[examples.place[name]] for name in trained]
    labels += [explorer.label(ExamplePlace("test", row)) for row in tested]
    names = [label_name(explorer, label) or "unknown" for label in labels]
    common = [name for name, _ in Counter(names).most_common(COLOURS)]
    others = sum(name not in common for name in names)
    counts = Counter(names)
    order = {label_name(explorer, label) or "unknown": str(label).zfill(9) for label in labels}
    common.sort(key=lambda name: order[name])
    groups = [MapGroup(name, style, counts[name]) for style, name in enumerate(common)]
    if others:
        groups.append(MapGroup("others", COLOURS, others))
    group = {name: place for place, name in enumerate(common)}
    says = [None] * len(names) if points.predicted is None else points.predicted.tolist()
    dots = []
    for number, (x, y) in enumerate(points.places.tolist()):
        is_trained = number < len(trained)
        name = trained[number] if is_trained else tested[number - len(trained)]
        answer, label = says[number], labels[number]
        wrong = answer is not None and isinstance(label, int) and label != answer
        selected = is_trained and name in explorer.selected
        address = f"/example/{name}" if is_trained else f"/prediction/test/{name}"
        dots.append(
            MapDot(
                "train" if is_trained else "test", name, round(x, 4), round(1 - y, 4),
                group.get(names[number], len(common)), None if answer is None else explorer.class_name(answer), wrong,
                selected, address,
            )
        )  # fmt: skip
    return groups, dots


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    if isinstance(progress, bool):
        return progress
    return lambda stage, done, _: progress(stage, before + done, total)
