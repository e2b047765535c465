"""Figures 1 to 4: cost of a block with scaled heads, compared with the same block without them."""

import csv
from functools import partial
from typing import Any

import torch
from rich.progress import track

from dualform.attention import default_scales
from experiments.measure import peak_bytes, ratios, timed, unfused, work
from experiments.runs import Run, console

from .cost import block, counted_flops, formula_bytes, formula_flops, saved_bytes
from .settings import CostSettings

FIGURES = {1: ("bn+sh", "softmax"), 2: ("sh", "softmax"), 3: ("sparse-bn+sh", "sparse"), 4: ("sparse-sh", "sparse")}
"""The compared attentions of each figure: with and without scaled heads."""


def measure(run: Run, settings: CostSettings) -> dict[str, Any]:
    """Operations, saved memory, memory growth and time of every point, as ratios to the attention without scales."""
    torch.set_num_threads(1)
    points = [(figure, d, n) for figure in FIGURES for d in settings.widths for n in settings.lengths]
    rows = [row(*point, settings) for point in track(points, "measuring", console=console, transient=True)]
    with (run.folder / "efficiency.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(run, rows)
    return {"rows": rows}


def row(figure: int, width: int, length: int, settings: CostSettings) -> dict[str, Any]:
    """Measure one point of a figure."""
    scales, plain = default_scales(settings.heads), (1,) * settings.heads
    make, base = (partial(block, name, width, settings.heads) for name in FIGURES[figure])
    found: dict[str, Any] = {"figure": figure, "width": width, "length": length}
    found["flops"] = counted_flops(make, length, width) / counted_flops(base, length, width)
    if figure < 3:
        found["flops_formula"] = formula_flops(length, width, scales, prepool=True) / formula_flops(
            length, width, plain
        )
        found["bytes_formula"] = formula_bytes(length, width, scales) / formula_bytes(length, width, plain)
    else:
        found |= {"flops_formula": None, "bytes_formula": None}
    for fused in (False, True):
        kept = [saved_bytes(each, length, width, fused=fused) for each in (make, base)]
        found["bytes_fused" if fused else "bytes_unfused"] = kept[0] / kept[1]
    x = torch.randn(1, length, width)
    found["time"] = ratios(timed([work(base(), x), work(make(), x)], settings.turns))[1]
    grown = [peak_bytes(lambda each=each: unfused_work(each(), x)) for each in (make, base)]
    found["peak_unfused_megabytes"], found["peak_unfused_megabytes_of_base"] = (round(g / 1e6, 1) for g in grown)
    return found


def unfused_work(layer: torch.nn.Module, x: torch.Tensor) -> Any:
    """A forward and backward pass without a fused kernel."""
    once = work(layer, x)

    def do() -> None:
        with unfused():
            once()

    return do


def draw(run: Run, rows: list[dict[str, Any]]) -> None:
    """Draw operations, saved memory and time against length, with one line per width."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    for figure, (name, base) in FIGURES.items():
        way = "gathered blocks" if base == "sparse" else "dense"
        drawn, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharey=True)
        titles = ("operations (matrix products)", "kept for backward, unfused", "time, forward and backward, fused")
        for axis, key, title in zip(axes, ("flops", "bytes_unfused", "time"), titles, strict=True):
            for width in sorted({r["width"] for r in rows}):
                line = [r for r in rows if (r["figure"], r["width"]) == (figure, width)]
                axis.plot([r["length"] for r in line], [r[key] for r in line], "o-", ms=3, label=f"width {width}")
            axis.set_xscale("log", base=2)
            axis.axhline(1.0, color="0.6", lw=0.8)
            axis.set(title=title, xlabel="tokens")
            axis.title.set_fontsize(10)
        axes[0].set_ylabel(f"{name} / {base}")
        axes[0].legend(frameon=False, fontsize=8)
        drawn.suptitle(f"{name} against {base} ({way})", fontsize=11)
        drawn.savefig(run.figures / f"figure-{figure}.png", dpi=110)
        plt.close(drawn)
