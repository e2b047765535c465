"""Figures of answers: the training examples, groups and times that a prediction is made of."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain import ExampleHit, Groups, Hits, Timeline
from dualform.types import Score

from ..text import ends, parts, same_digits
from .canvas import GREY, HATCHES, INK, LINES, ORANGE, STYLES, Figure, bars, empty_axes, picture, remove_frame


def top(
    hits: Hits,
    images: Shaped[Tensor, "N height width *channels"],
    *,
    asked: Shaped[Tensor, "n height width *channels"] | None = None,
    titles: Sequence[str] | None = None,
    shown: int = 8,
) -> Figure:
    """The top training images, one row per query, with contribution, weight, label and step of each.

    ``images`` are the training images in the order of the noted column ``index``, ``asked`` the images of the queries.
    """
    n, k = len(hits), min(shown, hits.weight.shape[1])
    if "index" not in hits.columns.column_names:
        raise QueryError(
            f"training images are found by the column 'index', which is not among {hits.columns.column_names}. Note it "
            "while recording."
        )
    before = 0 if asked is None else 1
    figure, axes = empty_axes(n, k + before, (1.25 * (k + before) + 0.4, 1.95 * n + 0.3))
    for query in range(n):
        if asked is not None:
            picture(axes[query, 0], asked[query], titles[query] if titles else f"query {query}", ORANGE)
        rows = list(hits[query])[:k]
        adds = same_digits(hit.contribution for hit in rows)
        for axis, hit, add in zip(axes[query, before:], rows, adds, strict=True):
            about = [f"label {hit.label}"] if "label" in hit.columns else []
            weight = [] if math.isnan(hit.weight) else [f"α = {hit.weight:.3g}"]
            when = f"seen {hit.visits} ×" if isinstance(hit, ExampleHit) else f"step {hit.step}"
            below = "\n".join([*weight, *about, f"#{hit.index}, {when}"])
            picture(axis, images[hit.index], below, None, head=add)
    place = f"layer {hits.layer}" if hits.layer else "whole network"
    figure.suptitle(f"What each training image adds to {hits.target} ({place})", fontsize=10, wrap=True)
    return figure


def top_by(
    layers: Sequence[Mapping[Any, Hits]],
    totals: Sequence[Groups],
    *,
    query: int = 0,
    family: Callable[[Any], str] = lambda name: "",
    short: Callable[[Any], str] = str,
) -> Figure:
    """The top scores within each group, falling from left to right, and the totals beside them; one row per layer.

    ``layers`` are answers of ``spot.top_by``, ``totals`` of ``spot.by``. Groups of the same ``family`` share a colour
    and a legend entry; ``short`` gives the label of a group below the axis. With ``score="abs"`` these are figures 4
    to 9 of Irie, Csordás, Schmidhuber (2022).
    """
    figure, axes = empty_axes(len(layers), 2, (11.0, 2.1 * len(layers) + 0.5))
    families = list(dict.fromkeys(family(name) for name in totals[0].names))
    for row, (tops, groups) in enumerate(zip(layers, totals, strict=True)):
        names = [name for name in groups.names if name in tops]
        scores = [tops[name].scores[query].sort(descending=True).values.numpy() for name in names]
        width = max(map(len, scores), default=1)
        for axis in axes[row]:
            axis.axis("on")
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
        for i, (name, values) in enumerate(zip(names, scores, strict=True)):
            colour = LINES[families.index(family(name)) % len(LINES)]
            places = (np.arange(len(values)) + 0.5) / width * 0.86 + i + 0.07
            axes[row, 0].plot(places, values, color=colour, linewidth=1.8)
            bar = float(groups.values[query, groups.names.index(name)])
            axes[row, 1].bar(i + 0.5, bar, color=colour, width=0.8, hatch=HATCHES[families.index(family(name)) % 3])
        for axis in axes[row]:
            axis.set_xticks([i + 0.5 for i in range(len(names))], [short(name) for name in names])
            axis.set_xlim(0, max(1, len(names)))
            remove_frame(axis)
        for edge in range(1, len(names)):
            axes[row, 0].axvline(edge, color="#DDDDDD", linewidth=0.6, zorder=0)
        axes[row, 0].set_title(f"layer {groups.layer}: the {width} largest of each group", fontsize=9)
        axes[row, 1].set_title(
            f"layer {groups.layer}: {_heading(groups.score, groups.target)} of each group", fontsize=9
        )
    if len(families) > 1:
        marks = [axes[0, 1].bar(0, 0, color=LINES[i % len(LINES)], hatch=HATCHES[i % 3]) for i in range(len(families))]
        figure.legend(marks, families, fontsize=9, frameon=False, ncols=len(families), loc="outside upper center")
    return figure


def by(groups: Groups, *, query: int = 0, recalled: Groups | None = None, shown: int = 10) -> Figure:
    """The total of each group as a bar; for contributions also the initial part, the bias part and the sum.

    ``recalled`` is a second answer about the same column, drawn beside the first, such as ``score="abs"``: Σ|α|.
    """
    values = groups.values[query].tolist()
    chosen = list(range(len(values))) if len(values) <= 2 * shown else ends(values, shown)
    names = [f"{groups.column} {groups.names[group]}" for group in chosen]
    sums = [values[group] for group in chosen]
    if groups.total is not None:
        left = sum(values) - sum(sums)
        rest = list(parts(groups, query).items())[1:]
        names += [*(["other groups"] if len(sums) < len(values) else []), *(name for name, _ in rest), "sum of all"]
        sums += [*([left] if len(sums) < len(values) else []), *(part for _, part in rest)]
        sums.append(float(groups.total[query]))
    figure, axes = empty_axes(
        1, 1 if recalled is None else 2, (7.5 if recalled is None else 11.0, 0.32 * len(sums) + 1.3)
    )
    bars(axes[0, 0], names, sums, signed=True, last=groups.total is not None)
    axes[0, 0].set_title(_heading(groups.score, groups.target), fontsize=10)
    if recalled is not None:
        sizes = [float(recalled.values[query, group]) for group in chosen]
        bars(axes[0, 1], names[: len(chosen)], sizes, signed=False, last=False)
        axes[0, 1].set_title(_heading(recalled.score, recalled.target), fontsize=10)
    return figure


def timeline(line: Timeline, *, query: int = 0, shown: int = 4) -> Figure:
    """A score over training: one line per group, the largest groups in colour."""
    figure, axes = empty_axes(1, 1, (7.5, 3.4))
    axis, values, middle = axes[0, 0], line.values[query], (line.edges[:-1] + line.edges[1:]) / 2
    axis.axis("on")
    strong = values.abs().sum(1).argsort(descending=True).tolist()
    for rank, group in reversed(list(enumerate(strong))):
        front = rank < min(shown, len(LINES))
        style: dict[str, Any] = {"color": GREY, "linewidth": 0.8}
        if front:
            name = "all visits" if line.column is None else f"{line.column} {line.names[group]}"
            style = {"color": LINES[rank], "linestyle": STYLES[rank], "linewidth": 1.8, "label": name}
        axis.plot(middle.numpy(), values[group].numpy(), zorder=3 if front else 1, **style)
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.set_xlabel("training step")
    axis.set_ylabel("sum over an interval of steps", fontsize=9)
    axis.set_title(f"{_heading(line.score, line.target)}, over training", fontsize=10)
    handles, labels = (list(reversed(artists)) for artists in axis.get_legend_handles_labels())
    if len(strong) > len(labels):
        handles, labels = [*handles, *axis.plot([], [], color=GREY, linewidth=0.8)], [*labels, "the other groups"]
    axis.legend(handles, labels, fontsize=8, frameon=False)
    remove_frame(axis)
    return figure


def spotlight(hits: Hits, *, titles: Sequence[str] | None = None) -> Figure:
    """How sharp the spotlight is: the sorted scores of the top slots, one line per query."""
    figure, axes = empty_axes(1, 1, (6.5, 3.4))
    axis = axes[0, 0]
    axis.axis("on")
    scores = hits.scores
    for query in range(len(hits)):
        name = titles[query] if titles else f"query {query}"
        ranks = np.arange(1, scores.shape[1] + 1)
        style = {"color": LINES[query % len(LINES)], "linestyle": STYLES[query % len(STYLES)]}
        axis.plot(ranks, scores[query].sort(descending=True).values.numpy(), label=name, linewidth=1.8, **style)
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.set_xlabel("rank of the training visit")
    axis.set_title(f"{_heading(hits.score, hits.target)} (layer {hits.layer})", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
    remove_frame(axis)
    return figure


def _heading(score: Score, target: str) -> str:
    return {"contribution": f"adds to {target}", "weight": "weight α", "abs": "attention Σ|α|"}[score]
