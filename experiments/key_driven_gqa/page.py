"""Generate docs/results/key-driven-gqa.md from the stored results: every number comes from a result file of a run.

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

DESCRIPTIONS = {
    "mha": "control: multi-head attention, trained further without conversion",
    "gqa": "grouped-query attention, equal groups",
    "kdgqa": "key-driven, one allocation per image",
    "kdgqa-least": "the same, with at least one query head per group",
    "kdgqa-reference": "key-driven as released: one allocation per batch",
    "dgqa-diff": f"dynamic, by changes of key norms, updated every {WINDOW} passes",
    "dgqa-ema": f"dynamic, by a moving average of key norms, updated every {WINDOW} passes",
    "dgqa-reference": "dynamic (ema) as released: evaluation changes the allocation",
    "pgqa": "perturbed: Gaussian noise of mean 0 on attention maps, in training only",
    "pgqa-reference": "perturbed as released: uniform noise on outputs, also in evaluation",
    "pgqa-mean": "like `pgqa`, but the noise has the mean of the rows, as in the released code",
    "mqa": "multi-query attention: one group",
}


def kind_of(variant: str) -> str:
    """A variant without its number of groups."""
    return variant if variant in DESCRIPTIONS else variant.rpartition("-")[0]


def of(task: str, variant: str, *path: str | int) -> list[Any]:
    """A value from the results of each network."""
    return ARCHIVE.values(task, variant, "training", *path)


def percent(values: Sequence[float]) -> list[float]:
    """Fractions in per cent."""
    return [100 * value for value in values]


def variants_of(task: str) -> list[str]:
    """The variants with a result."""
    return [variant for variant in EXPERIMENTS[task] if of(task, variant, "accuracy")]


def base_of(task: str, variant: str) -> str:
    """The variant with the same number of groups, all of equal size."""
    groups = variant.rpartition("-")[2]
    return f"gqa-{groups}"


# ------------------------------------------------------------------------------------------- parts of the page


def answer() -> str:
    """Which variants are significantly better or worse than equal groups."""
    lines = []
    for task in TASKS:
        variants_of_side = sides({
            variant: gain(*(percent(of(task, name, "accuracy")) for name in (base_of(task, variant), variant)))
            for variant in variants_of(task)
            if kind_of(variant) not in ("mha", "gqa", "mqa")
        })  # fmt: skip
        if any(variants_of_side.values()):
            listed = {side: ", ".join(names) or "none" for side, names in variants_of_side.items()}
            lines.append(
                f"- **{task}**: significantly above equal groups: {listed['above']}; significantly below: "
                f"{listed['below']}; neither: {listed['neither']}."
            )
    return helps(
        f"After uptraining, compared with `gqa` with the same number of groups, {NETWORKS} networks each. *Significantly* means that the confidence interval of the gain, defined below, excludes zero.",
        lines,
        "With so few networks and so many comparisons, some such differences are due to chance; nothing more is claimed.",
        *filter(None, map(reading, TASKS)),
    )


def reading(task: str) -> str:
    """Accuracy of key-driven groups right after conversion, and how often dynamic groups leave equal groups."""
    converted = [
        statistics.mean(percent(of(task, name, "converted"))) for name in ("gqa-4", "kdgqa-4") if of(task, name)
    ]
    changes = [layer["changes"] for network in of(task, "dgqa-ema-4", "allocations") for layer in network.values()]
    if len(converted) < 2 or not changes:
        return ""
    return (
        f"On {task}, `kdgqa-4` starts at {converted[1]:.1f} % right after conversion and `gqa-4` at {converted[0]:.1f} %: key-driven groups assign query heads to keys that were pooled from other heads, and training has to compensate for this. "
        f"The key norms are so similar that `dgqa-ema-4` changed its allocation in {sum(map(bool, changes))} of {len(changes)} layers; in a layer without changes it is plain grouped-query attention."
    )


def checkpoints() -> str:
    """The checkpoints that are converted."""
    rows = []
    for task in TASKS:
        settings = EXPERIMENTS["checkpoints"][task]
        assert isinstance(settings, Start)
        trainings = ARCHIVE.values("checkpoints", task, "training")
        if trainings:
            first = trainings[0]
            rows.append([
                task, spread(percent([training["accuracy"] for training in trainings])), f"{first['updates']:,}", f"{first['passes']:.1f}",
                f"{first['parameters']:,}", f"{first['tested_on']:,}",
            ])  # fmt: skip
    if not rows:
        return ""
    start = EXPERIMENTS["checkpoints"]["fashion-mnist"]
    assert isinstance(start, Start)
    return "\n\n".join([
        "## Converted checkpoints",
        f"Vision transformers with multi-head attention ({start.layers} layers, width {start.width}, {start.heads} heads, patches of {start.patch} × {start.patch} and a class token), trained here from scratch: AdamW, learning rate "
        f"{start.rate:g} after a warm-up of 100 updates, weight decay {start.decay:g}, batches of {start.batch}, no augmentation. There are {NETWORKS} checkpoints per data set, and each variant starts from each of them.",
        table(["data set", "test accuracy, %", "updates", "epochs", "parameters", "test images"], rows),
    ])  # fmt: skip


def accuracies(task: str) -> str:
    """Test accuracy after conversion and during uptraining."""
    variants = variants_of(task)
    if not variants:
        return ""
    points = sorted(map(int, of(task, variants[0], "points")[0]))
    pretraining_updates = ARCHIVE.values("checkpoints", task, "training", "updates")[0]
    shares = [100 * updates / pretraining_updates for updates in points]
    rows = []
    for variant in variants:
        kind = kind_of(variant)
        curve = [spread(percent(of(task, variant, "points", str(updates)))) for updates in points]
        base = percent(of(task, base_of(task, variant), "accuracy"))
        improvement = "–" if kind in ("mha", "gqa", "mqa") else gain_over(base, percent(of(task, variant, "accuracy")))
        rows.append([variant, DESCRIPTIONS[kind], *curve, improvement])
    return "\n\n".join([
        f"## Uptraining on {task}",
        f"Test accuracy in per cent on all test images, mean ± sample standard deviation over {NETWORKS} networks: right after conversion (0), and after the given number of updates with the same recipe as in pretraining. These numbers are "
        f"{', '.join(f'{share:g} %' for share in shares[1:])} of the updates in pretraining. No network was selected; all variants see the same images in the same order. The number at the end of a name is the number of groups. *Gain*: the difference from `gqa` with the same number of groups "
        "after the last update; mean paired difference over checkpoints ± half-width of its 95 % confidence interval (Student's t), bold if the interval excludes zero.",
        table(["variant", "what it is", *map(str, points), "gain"], rows),
        curves(task),
    ])  # fmt: skip


def curves(task: str) -> str:
    """The figure of test accuracy during uptraining."""
    image = ARCHIVE.images / f"{task}-curves.png"
    return (
        f"![Test accuracy during uptraining, {task}](../images/key-driven-gqa/{image.name})" if image.exists() else ""
    )


def costs(task: str) -> str:
    """Memory, time and parameters of every variant."""
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
        "*Kept*: megabytes that a forward pass saves for the backward pass. *Time*: that of an update, divided by that of `mha` with the same seed. Variants ran one after the other on a machine with other jobs, so times are rough; "
        "[results/grouped.md](grouped.md) measures them interleaved.",
        table(["variant", "parameters", "key/value heads", "kept, MB", "time"], rows),
    ])  # fmt: skip


def histories(task: str) -> str:
    """How many query heads each key/value head got."""
    rows, figures = [], []
    for variant in variants_of(task):
        networks = of(task, variant, "allocations") if kind_of(variant).startswith(("kdgqa", "dgqa")) else []
        if not networks:
            continue
        last = [" ".join(f"{count:.1f}" for count in layer["heads"][-1]) for layer in networks[0].values()]
        unused = [statistics.mean(layer["unused"]) for network in networks for layer in network.values()]
        changes = [layer["changes"] for network in networks for layer in network.values()]
        rows.append([variant, *last, f"{100 * statistics.mean(unused):.0f}", f"{statistics.mean(changes):.1f}"])
        image = ARCHIVE.images / f"{task}-{variant}-allocations.png"
        if image.exists() and any(layer["changes"] for layer in networks[0].values()):
            figures.append(f"### {variant}\n\n![Allocations, {variant}](../images/key-driven-gqa/{image.name})")
    if not rows:
        return ""
    names = [f"layer {i + 1}" for i in range(len(rows[0]) - 3)]
    return "\n\n".join([
        f"## Allocations on {task}",
        "*Layer*: the number of query heads of each key/value head in the last pass of the first network (for `kdgqa` the mean over a batch). *Unused*: the share of key/value heads without query heads, over all passes, layers and networks. "
        "*Changes*: the number of passes in which a layer's allocation differed from that of the previous pass, mean over layers and networks.",
        table(["variant", *names, "unused, %", "changes"], rows),
        "In the figures each band is a key/value head of the first network; its height is its share of the query heads. Variants without a change in that network have no figure.",
        *figures,
    ])  # fmt: skip


def alike(task: str) -> str:
    """Similarity of attention maps within groups and between groups."""
    rows = []
    for variant in variants_of(task):
        layers = of(task, variant, "similarity")
        cells = []
        for which in ("within", "between"):
            cosines = [[layer[which] for layer in network] for network in layers]
            cells.append("–" if cosines[0][0] is None else spread([statistics.mean(network) for network in cosines], 2))
        rows.append([variant, *cells])
    if not rows:
        return ""
    return "\n\n".join([
        f"## Similarity of heads on {task}",
        "Mean cosine similarity of the centred attention maps of two heads in the same group and in different groups; mean over layers, 64 test images, without noise. Groups here are those of plain `gqa`, H/G consecutive heads each, whatever the allocation. Perturbed groups are meant to lower the similarity within a group.",
        table(["variant", "within a group", "between groups"], rows),
    ])  # fmt: skip


def certificates(of: dict[str, float]) -> tuple[float, float]:
    """The largest relative error of a parameter, and separately that of key biases, which have no effect."""
    return worst_errors(of, ".attn.key.")


def recorded() -> str:
    """Certificates of recorded networks."""
    rows = []
    for variant in EXPERIMENTS["recorded"]:
        for training in ARCHIVE.values("recorded", variant, "training"):
            worst, noise = certificates(training["certificate"])
            rows.append([
                variant, f"{100 * training['accuracy']:.1f}", f"{worst:.1e}", f"{noise:.1e}", f"{training['residual']:.0e}", training["marks"],
                f"{training['memory_megabytes']:,}",
            ])  # fmt: skip
    if not rows:
        return ""
    start = EXPERIMENTS["recorded"]["mha"].start  # pyright: ignore
    return "\n\n".join([
        "## Recorded",
        f"One network with each attention (4 groups), trained on the 8 × 8 digits ({start.updates} updates, batches of {start.batch}, RAdam) and recorded in float32, including allocations and noise. *Certificate*: the largest relative error of a parameter rebuilt from "
        "the memory. *Key biases*: shifting all keys by the same vector does not change attention weights, so the gradient of these biases is only rounding error, which RAdam scales to the size of any other gradient. *Residual*: for the value projection of the last layer, its own part of the logit minus the sum of its parts by class, relative to its own part.",
        table(["attention", "accuracy, %", "certificate", "key biases", "residual", "marks", "memory, MB"], rows),
    ])  # fmt: skip


HEAD = f"""# Key-driven grouped-query attention

After Khan et al. (2024), *Beyond Uniform Query Distribution: Key-Driven Grouped Query Attention*, arXiv 2408.08454, and its baseline, Ainslie et al.
(2023), *GQA*, arXiv 2305.13245. This page is generated by `python -m experiments.key_driven_gqa.page` from the run folders of

    dualform reproduce key-driven-gqa

**Claim of the paper.** When query heads share keys and values, the groups should not have equal sizes: key heads with larger norms should serve more
query heads (KDGQA). The allocation can be kept fixed between updates (DGQA), and noise can keep the heads of a group different (PGQA). The paper reports
up to 8 % better accuracy than GQA, for DGQA on ViT-L. The method: convert a trained network by averaging keys and values, then train it further (uptraining).

## Where we differ

1. We did not have the paper's text and tables: the layers follow a specification written from its abstract and released code, and where these differ both
   are options. We did not have ImageNet weights, CIFAR-100, Food-101 and Tiny ImageNet either. Small networks are trained here, converted, and trained
   further on the same images. No accuracy of the paper is quoted except the claim above.
2. The final LayerNorm and the head are copied; the released code initialises new ones. There is no RandAugment and no fine-tuning on other images.
3. Dynamic groups are updated every {WINDOW} passes instead of every 300, since there are {Uptraining(Start("")).points[-1]} updates instead of thousands.
4. Accuracy is measured on all test images after the last update. The released code averages over batches and selects by test loss.
5. `kdgqa` and `dgqa` are clean variants: the output for an image never depends on the other images of a batch. `…-reference` are as released; their results
   depend on the batches in testing, which are the test images in their original order in batches of 250."""


def draw() -> None:
    """Draw test accuracy during uptraining, with one panel per number of groups."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    colours = plt.get_cmap("tab10").colors  # pyright: ignore
    for task in TASKS:
        variants = variants_of(task)
        numbers = sorted({name.rpartition("-")[2] for name in variants if kind_of(name) in GROUPED}, reverse=True)
        if not numbers:
            continue
        figure, axes = plt.subplots(
            1, len(numbers), figsize=(5.2 * len(numbers), 3.6), layout="constrained", squeeze=False
        )
        for axis, number in zip(axes[0], numbers, strict=True):
            shown = [name for name in variants if name in ("mha", "mqa") or name.rpartition("-")[2] == number]
            for i, variant in enumerate(shown):
                points = of(task, variant, "points")
                places = sorted(map(int, points[0]))[
                    1:
                ]  # without the accuracy right after conversion, which is far lower
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
    """Collect the results and write the page, or restore run folders."""
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
