"""What asking costs: exact top-10 and Σ|α| per class for 64 test images over all slots of each layer.

Compared with the bare float32 matrix products of the same size on data that is in memory already, in the same run.

    python benchmarks/exactness.py      # makes runs/mnist-float32 and runs/mnist-float16
    python benchmarks/asking.py [--repeats 7] [--folder runs]
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from paper_run import images, machine, save

import dualform
from dualform.engine import StoreView, stream
from dualform.models import MLP


def timed(works, repeats):
    """Median seconds of each, in turns: what else the machine does meets them alike. The first turn warms up."""
    times = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, took in zip(works, times, strict=True):
            begin = time.perf_counter()
            work()
            took.append(time.perf_counter() - begin)
    return [statistics.median(took[1:]) for took in times]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--queries", type=int, default=64)
    options.add_argument("--folder", type=Path, default=Path("runs"))
    asked = options.parse_args()
    torch.set_num_threads(2)
    test, _ = images("test")
    lines = []
    for dtype in ("float32", "float16"):
        memory = dualform.open(asked.folder / f"mnist-{dtype}")
        model = memory.load_into(MLP(784, 800, 800, 10))
        spot = memory.attend(model, test[: asked.queries])
        total = {"ours": 0.0, "bare": 0.0}
        for layer in memory.layers:
            ask = partial(spot.ask, layer, per="slot", top=10, by=("label",), score="abs", progress=False)
            keys = torch.cat([slots.keys.clone() for slots in stream_keys(memory, layer)])
            queries = spot._question(*memory.store.layer(layer), "abs", None, None).queries.rows
            ours, bare = timed([ask, partial(torch.matmul, queries, keys.mT)], asked.repeats)
            check(memory, layer, queries, keys, ask())
            total["ours"], total["bare"] = total["ours"] + ours, total["bare"] + bare
            lines.append(row(dtype, layer, f"{len(keys):,}", ours, bare))
            print(lines[-1], flush=True)
            del keys
        lines.append(row(dtype, "all", "", total["ours"], total["bare"]))
    table = "\n".join(lines)
    save(
        "asking",
        f"""{asked.queries} test images, exact top-10 and Σ|α| per class; equal to the full matrix (checked in the run).

| memory | layer | slots | bare products, ms | ours, from disk (page cache warm), ms | ratio |
|---|---|---|---|---|---|
{table}

Machine: {machine()}, 2 threads, median of {asked.repeats}, in turns.""",
    )


def row(dtype, layer, slots, ours, bare):
    return f"| {dtype} | {layer} | {slots} | {bare * 1e3:.0f} | {ours * 1e3:.0f} | {ours / bare:.2f} |"


def stream_keys(memory, layer):
    return stream(memory.store, layer, StoreView(memory.step), errors=False)


def check(memory, layer, queries, keys, answer):
    """The same answers from the full matrix of queries and slots."""
    weights = (queries @ keys.mT).abs()
    best = weights.topk(10, dim=1).values
    torch.testing.assert_close(answer.hits.weight.abs(), best, rtol=1e-5, atol=1e-4)
    picked = weights.gather(1, answer.hits.slots)
    torch.testing.assert_close(picked, best, rtol=1e-5, atol=1e-4)
    labels = torch.from_numpy(memory.store.visits["label"].to_numpy())
    visits = torch.from_numpy(memory.store.calls(layer).visits_of(torch.arange(len(keys)).numpy()))
    sums = torch.zeros(len(queries), 10, dtype=torch.float64).index_add_(1, labels[visits], weights.double())
    torch.testing.assert_close(answer.groups["label"].values, sums, rtol=1e-5, atol=1e-2)


if __name__ == "__main__":
    main()
