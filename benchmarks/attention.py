"""How fast attention layers are beside softmax attention on torch's fused kernel: forward and backward, in turns.

    python benchmarks/attention.py [--threads 1] [--turns 5] [--lengths 128 … 8192] [--batches 1 8]

The saving that counted operations predict (of the layer with its projections, forward) is set beside the one that is
measured; *kept* is the second divided by the first.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from paper_run import machine, save

sys.path.insert(0, str(Path(__file__).parents[1]))
from dualform.attention import build
from experiments.measure import ratios, timed, work
from experiments.primal_dual.cost import counted_flops

NAMES = ("softmax", "bn", "sh", "bn+sh", "sparse", "sparse-sh", "linear", "conv1d")
OTHERS = ((64, 2), (256, 8))
"""Other widths and heads, with batch 1."""


LONG = 2**34
"""batch × tokens² × width from which on a pass takes seconds: two turns are enough, and the main layers."""


def measure(names, width, heads, length, batch, turns):
    """Median seconds of softmax attention, then for each other layer the ratios of time and of operations."""
    makers = [partial(build, name, width, heads) for name in names]
    x = torch.randn(batch, length, width, requires_grad=True)
    long = batch * length**2 * width >= LONG
    times = timed([work(make(), x) for make in makers], 2 if long else turns, warm=not long)
    flops = [counted_flops(make, length, width) for make in makers]
    return statistics.median(times[0]), ratios(times), [each / flops[0] for each in flops]


def row(width, heads, length, batch, turns):
    names = NAMES if batch * length**2 * width < 8 * LONG else NAMES[:4]
    seconds, time, flops = measure(names, width, heads, length, batch, turns)
    cells = [f"{width}", f"{heads}", f"{batch}", f"{length:,}", f"{seconds * 1e3:,.1f}"]
    for name, t, f in zip(names[1:], time[1:], flops[1:], strict=True):
        kept = f", kept {(1 - t) / (1 - f):.2f}" if name in ("sh", "bn+sh") else ""
        cells.append(f"{t:.3f} ({f:.3f}{kept})" if f != 1 else f"{t:.3f}")
    line = f"| {' | '.join([*cells, *['–'] * (len(NAMES) - len(names))])} |"
    print(line, flush=True)
    return line


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    shapes = [(512, 8, n, b) for b in asked.batches for n in asked.lengths]
    shapes += [(d, h, n, 1) for d, h in OTHERS for n in asked.lengths]
    head = ["width", "heads", "batch", "tokens", "softmax, ms", *NAMES[1:]]
    lines = [row(*shape, asked.turns) for shape in shapes]
    table = "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])
    save(
        "attention",
        f"""Time of a forward and backward pass over that of softmax attention on torch's fused kernel, in one run, in
turns (median of the ratios of {asked.turns} turns, 2 where a pass takes seconds); in brackets the same ratio of counted
operations and, for heads of several scales, the share of the predicted saving that is kept. Below 1 is faster.

{table}

Machine: {machine()}, {asked.threads} thread{"s" * (asked.threads > 1)}.""",
    )


if __name__ == "__main__":
    main()
