"""The figures that summarise all runs: the LDS of every method, and how many examples flip a prediction."""

import statistics

import matplotlib.pyplot as plt

from dualform.evaluate import Flips
from dualform.show.figures import flips as draw_flips

from .results import ARCHIVE
from .scores import OURS
from .settings import EXPERIMENTS

SHOWN = "0.1"
"""The share of the examples that is left out in the figure."""


def draw() -> None:
    """Draw what there are results of."""
    ARCHIVE.images.mkdir(parents=True, exist_ok=True)
    draw_correlations()
    kept = [part for variant in EXPERIMENTS["flips"] for part in ARCHIVE.values("flips", variant, "flips", "methods")]
    if kept:
        joined = {
            name: Flips(
                tuple(number for part in kept for number in part[name]["removed"]),
                kept[0][name]["most"],
                sum(part[name]["trainings"] for part in kept),
            )
            for name in kept[0]
        }
        draw_flips(joined).savefig(ARCHIVE.images / "flips.png", dpi=130)


def draw_correlations() -> None:
    """A row for each network, a dot for each method."""
    rows: list[tuple[str, dict[str, float]]] = []
    for experiment, variants in EXPERIMENTS.items():
        for variant in variants:
            judged = ARCHIVE.values(experiment, variant, "judged", "lds")
            if judged:
                parts = [part[SHOWN] for part in judged]
                names = [name for name in parts[0] if all(name in part for part in parts)]
                means = {name: statistics.mean(part[name]["mean"] for part in parts) for name in names}
                rows.append((f"{experiment}, {variant}", means))
    if not rows:
        return
    others = list(dict.fromkeys(name for _, means in rows for name in means if name not in OURS))
    colours = plt.colormaps["tab20"]
    styles = {
        name: {"color": colours(number % 20), "marker": "sD^vPX"[number % 6], "markersize": 6, "linestyle": "none"}
        for number, name in enumerate(others)
    }
    large = {"marker": "o", "markeredgecolor": "white", "linestyle": "none"}
    styles |= {"direct": {"color": "#c44e52", "markersize": 9, **large}}
    styles |= {"through training": {"color": "#1f4e8c", "markersize": 12, **large}}
    figure, axis = plt.subplots(figsize=(9.5, 0.6 * len(rows) + 1.4), layout="constrained")
    for place, (_, means) in enumerate(rows):
        axis.axhline(place, color="#e4e4e4", linewidth=1, zorder=0)
        for name in (*others, *reversed(OURS)):
            if name in means:
                axis.plot(means[name], place, zorder=3, **styles[name])
    handles = [plt.Line2D([], [], label=name, **styles[name]) for name in (*OURS, *others)]
    axis.legend(handles=handles, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.6)
    axis.axvline(0, color="#444444", linewidth=0.8)
    axis.set_xlim(-0.45, 1.02)
    axis.set_xlabel("rank correlation with what training without 10 % of the examples gave (LDS)", fontsize=9)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(left=False)
    figure.savefig(ARCHIVE.images / "lds.png", dpi=130, bbox_inches="tight")
    plt.close(figure)
