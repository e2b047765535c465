"""Grouped heads: ways to share keys, what layers cost beside multi-head attention, and decoding from a cache.

    python benchmarks/grouped.py [--turns 7] [--lengths 197 2048]

All times are of one thread, in turns in one run; ratios are medians over the turns.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from paper_run import machine, save
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from dualform.attention import build
from dualform.attention.allocation import head_norms, key_driven, repeat_for_query_heads
from dualform.attention.cache import Cache
from dualform.attention.masked_attention import split_heads
from experiments.measure import ratios, timed, work

WIDTH = 384
SDPA = F.scaled_dot_product_attention


def fused(q, k, v):
    """torch's own: the kernel shares keys, nothing is copied."""
    return SDPA(q, k, v, enable_gqa=True)


def views(q, k, v):
    """A call for each group, its keys as views for all its heads."""
    runs = zip(q.chunk(k.shape[1], 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat(
        [SDPA(a, b.expand(-1, a.shape[1], -1, -1), c.expand(-1, a.shape[1], -1, -1)) for a, b, c in runs], 1
    )


def folded(q, k, v):
    """Heads of a group as more queries of one head: not causal, equal groups alone."""
    return SDPA(q.reshape(*k.shape[:2], -1, q.shape[-1]), k, v).reshape(q.shape)


def gathered(q, k, v):
    """Keys copied for every head: any allocation."""
    owner = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    return SDPA(q, k.index_select(1, owner), v.index_select(1, owner))


WAYS = {"fused": fused, "views": views, "folded": folded, "gathered": gathered}


def of_heads(batch, length, heads, groups):
    """Queries, keys and values as projections leave them."""
    made = (torch.randn(batch, length, n * WIDTH // heads, requires_grad=True) for n in (heads, groups, groups))
    return [split_heads(each, n) for each, n in zip(made, (heads, groups, groups), strict=True)]


def repeats(batch, length):
    """As often as makes some 4,000 tokens: single runs are too short to be timed."""
    return max(1, 4000 // (batch * length))


def often(run, batch, length):
    for _ in range(repeats(batch, length)):
        run()


def forward(run):
    with torch.no_grad():
        run()


def ways(batch, length, heads, groups, turns):
    """Milliseconds with a key head for each query head, then each way over that: forward / forward and backward."""
    whole, shared = of_heads(batch, length, heads, heads), of_heads(batch, length, heads, groups)
    runs = [partial(SDPA, *whole), *(partial(each, *shared) for each in WAYS.values())]
    both = [lambda each=each: each().sum().backward(retain_graph=True) for each in runs]
    return [
        batch,
        f"{length:,}",
        heads,
        groups,
        *beside([partial(forward, each) for each in runs], both, batch, length, turns),
    ]


def beside(ahead, both, batch, length, turns):
    """Milliseconds of the first, forward / forward and backward, then the others over it."""
    times = [timed([partial(often, each, batch, length) for each in runs], turns) for runs in (ahead, both)]
    first = (1e3 * statistics.median(each[0]) / repeats(batch, length) for each in times)
    others = (f"{a:.2f} / {b:.2f}" for a, b in zip(*(ratios(each)[1:] for each in times), strict=True))
    return [" / ".join(f"{each:.1f}" for each in first), *others]


LAYERS = {
    "gqa, H/2": ("gqa", 2, {}), "mqa": ("gqa", 0, {}), "kdgqa, H/2": ("kdgqa", 2, {}), "dgqa, H/2": ("dgqa", 2, {}),
    "pgqa, H/2": ("pgqa", 2, {}),
}  # fmt: skip


def layers(batch, length, heads, turns):
    """The same of whole layers with their projections, beside softmax attention."""
    made = [build("softmax", WIDTH, heads)]
    made += [build(name, WIDTH, heads, groups=heads // by if by else 1, **more) for name, by, more in LAYERS.values()]
    x = torch.randn(batch, length, WIDTH)
    ahead = [partial(forward, partial(evaluated, each, x)) for each in made]
    both = [partial(trained, each, x) for each in made]
    return [batch, f"{length:,}", heads, *beside(ahead, both, batch, length, turns)]


def evaluated(layer, x):
    layer.eval()(x)


def trained(layer, x):
    work(layer.train(), x)()


@torch.no_grad()
def allocation(batch, length, heads, turns):
    """What key-driven allocation adds: norms and shares, and handing keys out, beside the attention itself."""
    q, k, v = (each.detach() for each in of_heads(batch, length, heads, heads // 2))
    given = key_driven(head_norms(k), heads)

    def out():
        return repeat_for_query_heads(k, given, heads), repeat_for_query_heads(v, given, heads)

    keys = out()
    runs = [lambda: SDPA(q, *keys), lambda: key_driven(head_norms(k), heads), out]
    times = timed([partial(often, each, batch, length) for each in runs], turns)
    share, once = ratios(times), 1e3 * statistics.median(times[0]) / repeats(batch, length)
    return [
        batch,
        f"{length:,}",
        heads,
        f"{once:.2f}",
        f"{share[1]:.3f}",
        f"{share[2]:.3f}",
    ]


@torch.no_grad()
def decoding(length, heads, turns):
    """One more token after so many: microseconds of a step, over multi-head attention, and kilobytes of the cache."""
    cells = []
    groups = [heads, heads // 2, heads // 4, 1]
    made = [build("gqa", WIDTH, heads, groups=each).eval() for each in groups]
    caches = [Cache(*(torch.randn(1, each, length, WIDTH // heads) for _ in range(2))) for each in groups]
    x = torch.randn(1, 1, WIDTH)
    times = timed([partial(layer.step, x, cache) for layer, cache in zip(made, caches, strict=True)], 5 * turns)
    for each, share, cache in zip(times, ratios(times), caches, strict=True):
        cells.append(f"{1e6 * statistics.median(each):,.0f} ({share:.2f}), {cache.bytes / 1024:,.0f}")
    return [f"{length:,}", heads, *cells]


def table(head, rows):
    lines = [f"| {' | '.join(map(str, each))} |" for each in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--turns", type=int, default=7)
    options.add_argument("--lengths", type=int, nargs="+", default=[197, 2048])
    asked = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    turns = asked.turns
    shapes = [(b, n, h) for n in asked.lengths for b in ((1, 16) if n < 1000 else (1,)) for h in (6, 8)]
    groups = {6: (3, 1), 8: (4, 2, 1)}
    shared = [ways(b, n, h, g, turns) for b, n, h in shapes for g in groups[h]]
    whole = [layers(*each, turns) for each in shapes]
    added = [allocation(*each, 3 * turns) for each in shapes]
    steps = [decoding(m, 8, turns) for m in (512, 2048, 8192)]
    save(
        "grouped",
        f"""Width {WIDTH}, float32. Ratios are over multi-head attention in the same run, in turns (medians of
{turns} turns), forward / forward and backward; below 1 is faster.

**Ways to share keys**, the kernel alone: *fused* is `enable_gqa=True` of scaled_dot_product_attention, *views* a
call for each group, *folded* makes the heads of a group more queries of one, *gathered* copies keys for every head. The
library takes *fused* for equal groups, and *gathered* where groups are not equal (views are exact for any allocation
too, and need no copies, but a call for each group).

{table(["batch", "tokens", "H", "G", "a head each, ms", *WAYS], shared)}

**Layers** with their projections, beside `softmax`; forward is evaluation. `kdgqa`, `dgqa` copy keys for their heads,
`pgqa` writes its maps out in training.

{table(["batch", "tokens", "H", "softmax, ms", *LAYERS], whole)}

**What key-driven allocation adds** (G = H/2): norms of all keys and the shares, and handing keys and values out, as
parts of the time of the attention itself.

{table(["batch", "tokens", "H", "attention, ms", "norms and shares", "handing out"], added)}

Shares are a few small operations on G numbers, whatever the batch: they count where the attention itself takes a
millisecond or two, and are a small fraction of it for a batch or a long sequence.

**One more token from a cache** (`layer.step`): microseconds of a step (over a key head for each query head), and
kilobytes of keys and values.

{table(["tokens before", "H", "G = H", "G = H/2", "G = H/4", "G = 1"], steps)}

Machine: {machine()}, 1 thread.""",
    )


if __name__ == "__main__":
    main()
