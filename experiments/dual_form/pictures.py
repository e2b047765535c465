"""Draw figures 4 to 9: top training images of one test image by class and layer, and the closest ones overall."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import dualform
from dualform.explain import Groups, Hits, SlotHits
from experiments.runs import Run

from .settings import ImageSettings
from .training import all_training, pictures, trained

LAYERS = ("fc1", "fc2", "fc3")
BEST, CLOSEST = 500, 3


def chosen(experiment: str, settings: ImageSettings, model: torch.nn.Module) -> tuple[str, int]:
    """The test image of a figure, the first of its kind: the paper shows a 6, a boot and a misclassified 1."""
    name, label, wrong = {
        "joint": ("fashion-mnist", 9, False),
        "continual": ("mnist", 1, True),
        "continual-long": ("mnist", 1, True),
    }.get(experiment, (settings.sets[0], 6, False))
    images = pictures(name, settings.small)
    with torch.no_grad():
        said = model(images.test_x).argmax(1)
    fits = (images.test_y == label) & ((said != images.test_y) if wrong else (said == images.test_y))
    fits = fits if bool(fits.any()) else images.test_y == label
    return name, int(fits.nonzero()[0])


def draw(experiment: str, run: Run, settings: ImageSettings) -> dict[str, Any]:
    """Draw the top training images of one test image, by |α| as in the paper and by contribution."""
    model, memory = trained(run, settings), dualform.open(run.memory)
    name, number = chosen(experiment, settings, model)
    images = pictures(name, settings.small)
    spot = memory.attend(model, images.test_x[number : number + 1])
    _, labels, pixels, names = all_training(settings)
    column = "group" if len(settings.sets) > 1 else "label"
    files, answers = [], {}
    for score in ("abs", "contribution"):
        tops: list[dict[Any, Hits]] = []
        totals: list[Groups] = []
        for layer in LAYERS:
            tops.append(spot.top_by(column, BEST, layer=layer, score=score, progress=False, per="slot"))
            totals.append(spot.by(column, layer=layer, score=score, progress=False))
        figure = dualform.plot.top_by(tops, totals, family=_family, short=lambda group: str(group).split()[-1])
        files += save(run, f"classes-{score}", figure)
        answers[score] = {
            layer: {str(group): value for group, value in groups[0]}
            for layer, groups in zip(LAYERS, totals, strict=True)
        }
        closest = [spot.top(CLOSEST, layer=layer, score=score, progress=False, per="slot") for layer in LAYERS]
        answers[f"{score}, closest"] = {
            layer: [
                {"index": hit.index, "label": int(labels[hit.index]), "source": names[hit.index], "step": hit.step,
                 "weight": hit.weight, "contribution": hit.contribution}
                for hit in hits
            ]
            for layer, hits in zip(LAYERS, closest, strict=True)
        }  # fmt: skip
        files += save(run, f"closest-{score}", closest_figure(closest, pixels, images.test_bytes[number]))
    said = int(spot.prediction.argmax())
    about = {"set": name, "image": number, "label": int(images.test_y[number]), "answer": said}
    return {"asked": about, "figures": files, "totals": answers}


def closest_figure(closest: list[SlotHits], pixels: Tensor, asked: Tensor) -> Any:
    """The closest training images, one row per layer, next to the test image."""
    rows = [hits[0] for hits in closest]
    parts = ("slots", "steps", "positions", "visits", "weight", "contribution")
    joined = replace(
        rows[0],
        layer="of each row",
        columns=_concat([hits.columns for hits in rows]),
        **{part: torch.cat([getattr(hits, part) for hits in rows]) for part in parts},
    )
    titles = [f"layer {i}" for i in range(len(rows))]
    return dualform.plot.top(joined, pixels, asked=asked.expand(len(rows), *asked.shape), titles=titles, shown=CLOSEST)


def save(run: Run, name: str, figure: Any) -> list[str]:
    """Save a figure as PNG and PDF."""
    for kind in ("png", "pdf"):
        figure.savefig(run.figures / f"{name}.{kind}", dpi=200)
    return [f"figures/{name}.png"]


def _family(group: Any) -> str:
    return group.rpartition(" ")[0] if isinstance(group, str) else ""


def _concat(tables: list[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(tables)
