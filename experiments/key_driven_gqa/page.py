"""docs/results/key-driven-gqa.md, made of what is kept of the runs: every number on it stands in one of their files.

python -m experiments.key_driven_gqa.page [--runs runs/key-driven-gqa] [--restore]
"""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.page import Page, gain, gain_over, helps, missing_of, sides, times_of, worst_errors
from experiments.results import DOCS, spread, table

from .results import ARCHIVE
from .settings import EXPERIMENTS, GROUPED, NETWORKS, ONCE, WINDOW, Start, Uptraining

PAGE = Page(DOCS / "results" / "key-driven-gqa.md", "key-driven-gqa", ARCHIVE)
TASKS = ("fashion-mnist", "cifar10")

TOLD = {
    "mha": "multi-head attention, only trained on: the control",
    "gqa": "grouped-query attention, equal groups",
    "kdgqa": "key-driven, each picture its own allocation",
    "kdgqa-least": "the same, every group has at least one head",
    "kdgqa-reference": "key-driven as released: one allocation for a batch",
    "dgqa-diff": f"dynamic, by changes of norms, updated every {WINDOW} passes",
    "dgqa-ema": f"dynamic, by a moving average of norms, updated every {WINDOW} passes",
    "dgqa-reference": "dynamic (ema) as released: evaluation changes the allocation",
    "pgqa": "perturbed: Gaussian noise of mean 0 on attention maps, in training alone",
    "pgqa-reference": "perturbed as released: uniform noise on outputs, in evaluation too",
    "pgqa-mean": "the same with the mean of the rows, as the released noise has it",
    "mqa": "multi-query attention: one group",
}


def kind_of(variant: str) -> str:
    """A variant without its number of groups."""
    return variant if variant in TOLD else variant.rpartition("-")[0]


def of(task: str, variant: str, *path: str | int) -> list[Any]:
    """Something of every network."""
    return ARCHIVE.values(task, variant, "training", *path)


def percent(values: Sequence[float]) -> list[float]:
    """Shares in per cent."""
    return [100 * value for value in values]


def variants_of(task: str) -> list[str]:
    """Those with a result."""
    return [variant for variant in EXPERIMENTS[task] if of(task, variant, "accuracy")]


def base_of(task: str, variant: str) -> str:
    """Equal groups of the same number."""
    groups = variant.rpartition("-")[2]
    return f"gqa-{groups}"


# ------------------------------------------------------------------------------------------- parts of the page


def answer() -> str:
    """Does key-driven grouping help here? Counted."""
    lines = []
    for task in TASKS:
        lie = sides({
            variant: gain(*(percent(of(task, name, "accuracy")) for name in (base_of(task, variant), variant)))
            for variant in variants_of(task)
            if kind_of(variant) not in ("mha", "gqa", "mqa")
        })  # fmt: skip
        if any(lie.values()):
            told = {key: ", ".join(each) or "none" for key, each in lie.items()}
            lines.append(
                f"- **{task}**: above equal groups of the same number by more than chance: {told['above']}; below: "
                f"{told['below']}; neither: {told['neither']}."
            )
    return helps(
        f"After uptraining, against `gqa` with as many groups, {NETWORKS} networks each:",
        lines,
        "With so few networks and so many comparisons some such differences are chance; nothing more is claimed.",
        *filter(None, map(reading, TASKS)),
    )


def reading(task: str) -> str:
    """Where key-driven groups begin, and how often dynamic ones leave equal groups."""
    begin = [statistics.mean(percent(of(task, name, "converted"))) for name in ("gqa-4", "kdgqa-4") if of(task, name)]
    held = [each["changes"] for net in of(task, "dgqa-ema-4", "allocations") for each in net.values()]
    if len(begin) < 2 or not held:
        return ""
    return (
        f"On {task}, `kdgqa-4` begins at {begin[1]:.1f} % right after conversion and `gqa-4` at {begin[0]:.1f} %: query heads are given keys that were pooled of others, which training has to make up for. "
        f"Norms of keys are so near to each other that `dgqa-ema-4` changed its allocation in {sum(map(bool, held))} of {len(held)} layers; where it did not, it is grouped-query attention."
    )


def checkpoints() -> str:
    """What is converted."""
    rows = []
    for task in TASKS:
        settings = EXPERIMENTS["checkpoints"][task]
        assert isinstance(settings, Start)
        found = ARCHIVE.values("checkpoints", task, "training")
        if found:
            rows.append([
                task, spread(percent([each["accuracy"] for each in found])), f"{found[0]['updates']:,}", f"{found[0]['passes']:.1f}",
                f"{found[0]['parameters']:,}", f"{found[0]['tested_on']:,}",
            ])  # fmt: skip
    if not rows:
        return ""
    start = EXPERIMENTS["checkpoints"]["fashion-mnist"]
    assert isinstance(start, Start)
    return "\n\n".join([
        "## What is converted",
        f"Vision transformers with multi-head attention ({start.layers} layers, width {start.width}, {start.heads} heads, patches of {start.patch} × {start.patch} and a class token), trained here from the beginning: AdamW, rate "
        f"{start.rate:g} after a warm-up of 100 updates, decay {start.decay:g}, batches of {start.batch}, no augmentation. {NETWORKS} of each, and each variant begins with each of them.",
        table(["pictures", "test accuracy, %", "updates", "passes over the data", "parameters", "test pictures"], rows),
    ])  # fmt: skip


def accuracies(task: str) -> str:
    """What conversion takes away, and what uptraining gives back."""
    variants = variants_of(task)
    if not variants:
        return ""
    points = sorted(map(int, of(task, variants[0], "points")[0]))
    whole = ARCHIVE.values("checkpoints", task, "training", "updates")[0]
    share = [100 * each / whole for each in points]
    rows = []
    for variant in variants:
        kind = kind_of(variant)
        curve = [spread(percent(of(task, variant, "points", str(each)))) for each in points]
        base = percent(of(task, base_of(task, variant), "accuracy"))
        more = "–" if kind in ("mha", "gqa", "mqa") else gain_over(base, percent(of(task, variant, "accuracy")))
        rows.append([variant, TOLD[kind], *curve, more])
    return "\n\n".join([
        f"## Uptraining on {task}",
        f"Test accuracy in per cent on all test pictures, mean ± sample deviation over {NETWORKS} networks: right after conversion (0), and after so many updates with the recipe of before; "
        f"{', '.join(f'{each:g} %' for each in share[1:])} of the first training. Nothing is selected; the same pictures in the same order for all variants. The number at the end of a name is that of its groups. *Gain*: over `gqa` with as many groups "
        "at the end, checkpoint by checkpoint: mean, and what holds it in 95 % of all cases by Student's t; bold where it is more.",
        table(["variant", "what it is", *(f"{each}" for each in points), "gain"], rows),
        curves(task),
    ])  # fmt: skip


def curves(task: str) -> str:
    """The figure."""
    image = ARCHIVE.images / f"{task}-curves.png"
    return (
        f"![Test accuracy through uptraining, {task}](../images/key-driven-gqa/{image.name})" if image.exists() else ""
    )


def costs(task: str) -> str:
    """Memory, time, parameters."""
    rows = []
    base = of(task, "mha", "median_seconds_of_an_update")
    for variant in variants_of(task):
        seconds = of(task, variant, "median_seconds_of_an_update")
        times = [b / a for a, b in zip(base, seconds, strict=False)]
        rows.append([
            variant, f"{of(task, variant, 'parameters')[0]:,}", of(task, variant, "key_value_heads")[0],
            f"{of(task, variant, 'kept_megabytes')[0]:.1f}", spread(times, 2) if times else "–",
        ])  # fmt: skip
    if not rows:
        return ""
    return "\n\n".join([
        f"## Cost of an update on {task}",
        "*Kept* are megabytes that a forward pass keeps for the backward pass; *time* is that of an update over `mha`'s of the same seed. Runs follow each other beside other work, so times are rough; "
        "[results/grouped.md](grouped.md) has them measured in turns.",
        table(["variant", "parameters", "key/value heads", "kept, MB", "time"], rows),
    ])  # fmt: skip


def histories(task: str) -> str:
    """Who got how many heads."""
    rows, figures = [], []
    for variant in variants_of(task):
        found = of(task, variant, "allocations") if kind_of(variant).startswith(("kdgqa", "dgqa")) else []
        if not found:
            continue
        layers = list(found[0])
        last = [f"{' '.join(f'{value:.1f}' for value in found[0][layer]['heads'][-1])}" for layer in layers]
        unused = [statistics.mean(each["unused"]) for net in found for each in net.values()]
        changes = [each["changes"] for net in found for each in net.values()]
        rows.append([variant, *last, f"{100 * statistics.mean(unused):.0f}", f"{statistics.mean(changes):.1f}"])
        image = ARCHIVE.images / f"{task}-{variant}-allocations.png"
        if image.exists() and any(each["changes"] for each in found[0].values()):
            figures.append(f"### {variant}\n\n![Allocations, {variant}](../images/key-driven-gqa/{image.name})")
    if not rows:
        return ""
    names = [f"layer {i + 1}" for i in range(len(rows[0]) - 3)]
    return "\n\n".join([
        f"## Allocations on {task}",
        "Query heads of each key/value head in the last pass of the first network (for `kdgqa` the mean over a batch), layer by layer; the share of key/value heads without any, in per cent, over all passes, layers and networks; "
        "and in how many passes a layer's allocation differed from that of the pass before, mean over layers and networks.",
        table(["variant", *names, "unused, %", "changes"], rows),
        "In the figures each band is a key/value head of the first network, and as high as its share of the query heads; there is none where it never changed.",
        *figures,
    ])  # fmt: skip


def alike(task: str) -> str:
    """Similarity of heads inside groups."""
    rows = []
    for variant in variants_of(task):
        layers = of(task, variant, "similarity")
        cells = []
        for which in ("within", "between"):
            values = [[layer[which] for layer in net] for net in layers]
            cells.append("–" if values[0][0] is None else spread([statistics.mean(net) for net in values], 2))
        rows.append([variant, *cells])
    if not rows:
        return ""
    return "\n\n".join([
        f"## How alike heads are on {task}",
        "Mean cosine of the centred attention maps of two heads of one run (H/G heads that plain groups share keys with), and of two runs; mean over layers, 64 test pictures, without noise. Perturbed groups are meant to lower the first.",
        table(["variant", "within a run", "between runs"], rows),
    ])  # fmt: skip


def certificates(of: dict[str, float]) -> tuple[float, float]:
    """The worst relative error of a parameter, and apart from it that of key biases, which have no effect."""
    return worst_errors(of, ".attn.key.")


def recorded() -> str:
    """Certificates."""
    rows = []
    for variant in EXPERIMENTS["recorded"]:
        for found in ARCHIVE.values("recorded", variant, "training"):
            worst, noise = certificates(found["certificate"])
            rows.append([
                variant, f"{100 * found['accuracy']:.1f}", f"{worst:.1e}", f"{noise:.1e}", f"{found['residual']:.0e}", found["marks"],
                f"{found['memory_megabytes']:,}",
            ])  # fmt: skip
    if not rows:
        return ""
    start = EXPERIMENTS["recorded"]["mha"].start  # pyright: ignore
    return "\n\n".join([
        "## Recorded",
        f"A network of each attention (4 groups), trained on the 8 × 8 digits ({start.updates} updates of {start.batch}, RAdam) while it is recorded in float32, allocations, noise and all. *Certificate*: the worst relative error of a parameter rebuilt from "
        "the memory. *Of key biases*: a shift of all keys changes no weight, so their gradient is nothing but rounding, which RAdam makes as large as any other. *Residual*: parts by class of the last values against the layer's own change, relative.",
        table(["attention", "accuracy, %", "certificate", "of key biases", "residual", "marks", "memory, MB"], rows),
    ])  # fmt: skip


HEAD = f"""# Key-driven grouped-query attention

After Khan et al. (2024), *Beyond Uniform Query Distribution: Key-Driven Grouped Query Attention*, arXiv 2408.08454, and its baseline, Ainslie et al.
(2023), *GQA*, arXiv 2305.13245. This page is made by `python -m experiments.key_driven_gqa.page` from the run folders of

    dualform reproduce key-driven-gqa

**Claim of the paper.** Where query heads share keys and values, groups should not be equal: heads whose keys are larger should serve more queries
(KDGQA), by an allocation that is held for a while (DGQA); noise may keep the heads of a group apart (PGQA). Up to 8 % better than GQA is reported, with
DGQA on ViT-L. The way: convert a trained network by averaging keys and values, then train it on for a while.

## Where we differ

1. The paper's text and tables were not at hand: the layers are those of a specification after its abstract and released code, and both readings are
   options. ImageNet weights, CIFAR-100, Food-101 and Tiny ImageNet are not at hand either. Small networks are trained here, converted, and trained on with
   the same pictures. No accuracy of the paper is quoted but the claim above.
2. The final LayerNorm and the head are copied; the released code begins with new ones. No RandAugment, no fine-tuning on other pictures.
3. The window of dynamic groups is {WINDOW} passes instead of 300, since there are {Uptraining(Start("")).points[-1]} updates instead of thousands.
4. Accuracy is over all test pictures after the last update. The released code averages over batches and selects by test loss.
5. `kdgqa` and `dgqa` are clean variants: what comes out never depends on the other pictures of a batch. `…-reference` are as released; they are tested in
   batches of 250 in the order of the set, which their results depend on."""


def draw() -> None:
    """Accuracy through uptraining, a panel for each number of groups."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    colours = plt.get_cmap("tab10").colors  # pyright: ignore
    for task in TASKS:
        variants = variants_of(task)
        numbers = sorted({each.rpartition("-")[2] for each in variants if kind_of(each) in GROUPED}, reverse=True)
        if not numbers:
            continue
        figure, axes = plt.subplots(
            1, len(numbers), figsize=(5.2 * len(numbers), 3.6), layout="constrained", squeeze=False
        )
        for axis, number in zip(axes[0], numbers, strict=True):
            shown = [each for each in variants if each in ("mha", "mqa") or each.rpartition("-")[2] == number]
            for i, variant in enumerate(shown):
                points = of(task, variant, "points")
                places = sorted(map(int, points[0]))[1:]  # conversion itself is far below
                means = [statistics.mean(100 * net[str(t)] for net in points) for t in places]
                style = {"mha": ("black", "-"), "mqa": ("grey", ":")}.get(
                    variant, (colours[i % 10], "--" if "reference" in variant else "-")
                )
                axis.plot(places, means, marker="o", ms=3, color=style[0], linestyle=style[1], label=variant)
            axis.set(xlabel="updates after conversion", ylabel="test accuracy, %", title=f"{number} groups")
            axis.legend(fontsize=6, frameon=False)
        ARCHIVE.images.mkdir(parents=True, exist_ok=True)
        figure.savefig(ARCHIVE.images / f"{task}-curves.png", dpi=110)
        plt.close(figure)


def main() -> None:
    """Collect results and write the page, or restore run folders."""
    parts = [
        lambda: missing_of(ARCHIVE, EXPERIMENTS, lambda name: 1 if name in ONCE else NETWORKS),
        answer,
        checkpoints,
    ]
    for task in TASKS:
        parts += [lambda task=task, part=part: part(task) for part in (accuracies, histories, alike, costs)]
    PAGE.main(HEAD, [*parts, recorded, lambda: times_of(ARCHIVE, EXPERIMENTS, "key-driven-gqa")], draw)


if __name__ == "__main__":
    main()
