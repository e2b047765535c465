"""Draws the figures from the kept results, so no run is needed to redraw them."""

import math
from functools import partial
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .nonlinear import SATURATED
from .references import NONLINEAR_PLOT, OUTCOMES
from .results import ARCHIVE, found
from .settings import EXPERIMENTS

COLOURS = {"frobenius": "tab:blue", "nuclear": "tab:orange", "W": "tab:blue", "KQ": "tab:orange"}
NAMES = {"frobenius": "Frobenius", "nuclear": "nuclear", "W": "W", "KQ": "K Qᵀ"}


def draw_all() -> None:
    """Draw every figure whose results are kept."""
    ARCHIVE.images.mkdir(parents=True, exist_ok=True)
    for name, draw in (
        ("separation", separation), ("two-norms", two_norms), ("local", local), ("outcomes", outcomes),
        ("ranks", ranks), ("nonlinear", nonlinear), ("quadratic", quadratic),
        *((f"trained-{variant}", partial(trained, variant)) for variant in EXPERIMENTS["trained"]),
    ):  # fmt: skip
        drawn = draw()
        if drawn is not None:
            drawn.savefig(ARCHIVE.images / f"{name}.png", dpi=110)
            plt.close(drawn)


def panels(count: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with one row of axes."""
    drawn, axes = plt.subplots(1, count, figsize=(width, height), layout="constrained", squeeze=False, **options)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return drawn, list(axes[0])


def inwards(point: list[float], scale: float) -> tuple[float, float]:
    """Rescale a point's length logarithmically: rays stay rays, and bends near zero become visible."""
    size = math.hypot(*point)
    factor = scale * math.log1p(size) / size if size else 0.0
    return point[0] * factor, point[1] * factor


def separation() -> Figure | None:
    """E1: tokens, paths, rays, and the lines half a margin from the chosen tokens."""
    given = found("paths", "separation")
    if given is None or given["drawn"] is None:
        return None
    shown = given["drawn"]
    drawn, axes = panels(2, 9.6, 4.6, sharex=True, sharey=True)
    for axis, name, norm in zip(axes, ("W", "KQ"), ("frobenius", "nuclear"), strict=True):
        for i, colour in enumerate(("tab:green", "tab:purple")):
            tokens, ray, chosen = shown["tokens"][i], shown["rays"][norm][i], shown["chosen"][i]
            others = [token for t, token in enumerate(tokens) if t != chosen]
            axis.scatter(*zip(*others, strict=True), s=22, color=colour, label=f"tokens of input {i + 1}")
            axis.scatter(*tokens[chosen], s=170, marker="*", color=colour, label="the selected one")
            _ray(axis, ray, colour, 2.4)
            _path(axis, [step[i] for step in shown["paths"][name]], colour, 2.2)
            _half_margin(axis, tokens[chosen], ray, colour)
        axis.set(title=f"training {NAMES[name]}: rays of the {NAMES[norm]} norm", xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
        axis.set_aspect("equal")
    axes[0].legend(frameon=False, fontsize=7, loc="lower left")
    drawn.suptitle(
        "E1: paths W(k) z (solid, length as logarithm), rays of the SVM (dashed), half margins (dotted)", fontsize=10
    )
    return drawn


def two_norms() -> Figure | None:
    """E2: four paths and four rays, one panel per query."""
    given = found("paths", "two-norms")
    if given is None or given["drawn"] is None:
        return None
    shown = given["drawn"]
    drawn, axes = panels(2, 9.6, 4.6, sharex=True, sharey=True)
    for i, axis in enumerate(axes):
        for t, token in enumerate(shown["tokens"][i]):
            chosen = t == shown["chosen"][i]
            axis.scatter(*token, s=150 if chosen else 22, marker="*" if chosen else "o", color="0.45")
        for name, norm in (("W", "frobenius"), ("KQ", "nuclear")):
            _ray(axis, shown["rays"][norm][i], COLOURS[norm], 2.2, label=f"{NAMES[norm]} ray")
            _path(axis, [step[i] for step in shown["paths"][name]], COLOURS[name], 2.0, label=f"training {NAMES[name]}")
        axis.set(title=f"query {i + 1}", xlim=(-2.4, 2.4), ylim=(-2.4, 2.4))
        axis.set_aspect("equal")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    drawn.suptitle("E2: W follows the ray of the Frobenius norm, K Qᵀ that of the nuclear norm", fontsize=10)
    return drawn


def _ray(axis: Axes, ray: list[float], colour: str, length: float, **options: Any) -> None:
    size = math.hypot(*ray) / length
    axis.plot([0, ray[0] / size], [0, ray[1] / size], "--", color=colour, lw=1.2, **options)


def _path(axis: Axes, path: list[list[float]], colour: str, length: float, **options: Any) -> None:
    scale = length / math.log1p(max(math.hypot(*point) for point in path))
    axis.plot(
        *zip(*(inwards(point, scale) for point in path), strict=True), "-", color=colour, lw=2.2, alpha=0.6, **options
    )


def _half_margin(axis: Axes, token: list[float], ray: list[float], colour: str) -> None:
    """The line of points x with (x_chosen − x)ᵀ W z = 1/2."""
    square = ray[0] ** 2 + ray[1] ** 2
    foot = [token[k] - ray[k] / (2 * square) for k in (0, 1)]
    along = [-ray[1] / math.sqrt(square), ray[0] / math.sqrt(square)]
    axis.plot(*([foot[k] - 6 * along[k], foot[k] + 6 * along[k]] for k in (0, 1)), ":", color=colour, lw=1.2)


def local() -> Figure | None:
    """E3: saturation, and correlations when W or K and Q are trained; solid with decay, dashed without."""
    given = {variant: each for variant in ("cross-decay", "cross") if (each := found("local", variant))}
    if not given:
        return None
    drawn, axes = panels(3, 11.5, 3.5)
    for variant, style in (("cross-decay", "-"), ("cross", "--")):
        for name in ("W", "KQ"):
            if variant in given:
                curve, said = given[variant][name]["curve"], "" if variant == "cross-decay" else ", no decay"
                axes[0].plot(curve["steps"], curve["softmax"], style, color=COLOURS[name], label=f"{NAMES[name]}{said}")
                for norm in ("frobenius", "nuclear"):
                    axes[1 if name == "W" else 2].plot(
                        curve["steps"], curve[norm], style, color=COLOURS[norm], label=f"{NAMES[norm]}{said}"
                    )
    axes[0].set(title="largest attention weight", ylim=(0, 1.03))
    axes[1].set(title="training W: correlation with the SVM", ylim=(-0.05, 1.03))
    axes[2].set(title="training K, Q: correlation with the SVM", ylim=(-0.05, 1.03))
    for axis in axes:
        axis.set_xscale("symlog", linthresh=10)
        axis.set(xlabel="steps", xlim=(0, None))
        axis.title.set_fontsize(10)
        axis.legend(frameon=False, fontsize=8)
    return drawn


def outcomes() -> Figure | None:
    """E4: bars of the three outcomes, one panel per n."""
    given = {n: each["widths"] for n in OUTCOMES if (each := found("outcomes", f"n-{n}"))}
    if not given:
        return None
    drawn, axes = panels(len(given), 3.2 * len(given), 3.2, sharey=True)
    for axis, (n, rows) in zip(axes, given.items(), strict=True):
        at, bottom = range(len(rows)), [0.0] * len(rows)
        for key, colour, label in (
            ("global", "tab:green", "all best"), ("local", "tab:olive", "locally optimal"),
            ("not_local", "0.75", "not locally optimal"),
        ):  # fmt: skip
            axis.bar(at, [100 * row[key] for row in rows], 0.8, bottom, color=colour, label=label)
            bottom = [low + 100 * row[key] for low, row in zip(bottom, rows, strict=True)]
        axis.plot(at, [100 * row["all_support"] for row in rows], "k.-", lw=1, label="all tokens support")
        if len(rows) == len(OUTCOMES[n]):
            axis.plot(at, OUTCOMES[n], "kx", ms=5, label="all best, independent measurement")
        axis.set_xticks(at, [str(row["d"]) for row in rows])
        axis.set(title=f"n = {n}", xlabel="width d")
    axes[0].set_ylabel("runs, %")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return drawn


def ranks() -> Figure | None:
    """E5: mean rank over widths; three curves, one panel per n and T."""
    given = {name: each["widths"] for name in EXPERIMENTS["ranks"] if (each := found("ranks", name))}
    if not given:
        return None
    drawn, axes = panels(len(given), 2.7 * len(given), 3.1)
    for axis, (name, rows) in zip(axes, given.items(), strict=True):
        for key, colour, label in (
            ("frobenius", "tab:blue", "Frobenius"), ("nuclear", "tab:orange", "nuclear, accurate"),
        ):  # fmt: skip
            some = [row for row in rows if row[key]["trials"]]
            axis.plot(
                [row["d"] for row in some], [row[key]["mean"] for row in some], "o-", ms=3, color=colour, label=label
            )
        axis.plot(
            [row["d"] for row in rows], [row["published"]["nuclear"]["mean"] for row in rows], "x--", color="0.5",
            label="nuclear, the published way (infeasible as 1)",
        )  # fmt: skip
        _, n, _, T = name.split("-")
        axis.set(title=f"n = {n}, T = {T}", xlabel="width d", ylim=(0, None))
        axis.title.set_fontsize(10)
    axes[0].set_ylabel("mean rank")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawn


def nonlinear() -> Figure | None:
    """E6: means and medians of three predictions, and the formula's error against the largest masked weight."""
    given = {d: each for d in NONLINEAR_PLOT if (each := found("nonlinear", f"d-{d}"))}
    if not given:
        return None
    drawn, axes = panels(3, 13.5, 4.2)
    for k, (key, label) in enumerate(
        (("formula", "both parts"), ("direction", "direction only"), ("token", "single token"))
    ):
        colour, at = f"C{k}", list(given)
        axes[0].plot(at, [each[key]["mean"] for each in given.values()], "o-", color=colour, label=f"{label}, mean")
        axes[0].plot(at, [each[key]["median"] for each in given.values()], "o:", ms=3, color=colour, label="median")
        axes[0].plot(at, [NONLINEAR_PLOT[d][k] for d in given], "x", color=colour, label="stored plot, mean")
    axes[0].set(title="released gradient", xlabel="width d", ylabel="1 − correlation", yscale="log", ylim=(1e-3, 0.5))
    axes[0].set_xticks(list(given))
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=9, frameon=False, fontsize=8)
    for axis, ending, title in ((axes[1], "", "released gradient"), (axes[2], "-stable", "stable gradient")):
        clouds = {d: each["scatter"] for d in given if (each := found("nonlinear", f"d-{d}{ending}"))}
        for d, cloud in clouds.items():
            axis.scatter(*zip(*cloud or [(math.nan, math.nan)], strict=True), s=4, alpha=0.5, label=f"d = {d}")
        axis.axvline(math.log10(SATURATED), color="0.7", lw=0.8)
        axis.set(title=title, xlabel="log₁₀ of the largest masked weight", yscale="log", ylim=(2e-5, 2))
        if clouds:
            axis.legend(frameon=False, fontsize=8, markerscale=3, loc="upper left")
    axes[1].set_ylabel("1 − correlation, both parts")
    return drawn


def quadratic() -> Figure | None:
    """E7: selected tokens over λ, trained and predicted, and the three predictions."""
    given = found("quadratic", "orthonormal")
    if given is None:
        return None
    rows = given["weights"]
    at = [row["lambda"] for row in rows]
    drawn, axes = panels(2, 9.5, 3.4)
    axes[0].plot(
        at, [row["tokens_ideal"] for row in rows], "-", color="0.6", lw=3, label="nearest point of the simplex"
    )
    axes[0].plot(at, [row["tokens"] for row in rows], "o", ms=4, color="tab:blue", label="trained")
    axes[0].set(ylabel="selected tokens of an input")
    for key, label in (("formula", "both parts"), ("direction", "direction only"), ("token", "single token")):
        some = [row for row in rows if row[key]["trials"]]
        axes[1].plot([row["lambda"] for row in some], [row[key]["mean"] for row in some], "o-", ms=4, label=label)
    axes[1].set(ylabel="mean 1 − correlation", yscale="log")
    for axis in axes:
        axis.set_xscale("symlog", linthresh=0.05)
        axis.set(xlabel="λ", xlim=(-0.005, None))
        axis.legend(frameon=False, fontsize=8)
    return drawn


MOMENTS = {
    "norm": "norm of W",
    "entropy": "entropy, nats",
    "above 0.9": "queries with a weight above 0.9",
    "efficiency": "margin efficiency",
    "cosine": "cosine with what separates",
    "effective rank": "effective rank",
}
"""Quantities drawn for a trained transformer, with their labels."""


def trained(variant: str) -> Figure | None:
    """Every head of a transformer through training: one row of axes per layer, random matrices in grey."""
    given = found("trained", variant)
    if given is None:
        return None
    rows = given["moments"]
    layers, heads = (sorted({row[name] for row in rows}) for name in ("layer", "head"))
    drawn, axes = plt.subplots(
        len(layers), len(MOMENTS), figsize=(2.6 * len(MOMENTS), 2.5 * len(layers)), layout="constrained", squeeze=False
    )
    steps = sorted({row["step"] for row in rows})
    for line, layer in zip(axes, layers, strict=True):
        for axis, (what, title) in zip(line, MOMENTS.items(), strict=True):
            for head in heads:
                mine = [row for row in rows if (row["layer"], row["head"]) == (layer, head)]
                axis.plot(steps, [row[what] for row in mine], "o-", ms=2.5, lw=1.3, label=f"head {head}")
            if (null := f"null {what}") in rows[0]:
                axis.plot(steps, [row[null] for row in mine], ":", color="0.4", lw=1.6, label="random")
            axis.set_xscale("symlog", linthresh=steps[1])
            if what == "efficiency":
                axis.set_yscale("log")
            axis.set_title(title, fontsize=9)
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(layer, fontsize=9)
    axes[0, 4].legend(frameon=False, fontsize=6)
    return drawn
