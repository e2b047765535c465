"""Write docs/results/rcmha.md from the stored results of the runs. Every number on the page comes from one of their files.

python -m experiments.rcmha.page [--runs runs/rcmha] [--restore]
"""

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from experiments.page import Page, gain, helps, missing_of, side, sides, times_of, worst_errors
from experiments.results import DOCS, spread, table

from .copying import ENOUGH
from .results import ARCHIVE
from .settings import EXPERIMENTS, FOUR, NETWORKS, ONCE, TRIAL, TRIED, WORDS, CopySettings, Settings

values = ARCHIVE.values
PAGE = Page(DOCS / "results" / "rcmha.md", "rcmha", ARCHIVE)
NAMES = {"softmax": "MHA", "mdha": "MDHA", "relative": "RMHA", "relative-conv": "RCMHA"}
"""The paper's names of the attentions."""


def per_network(experiment: str, variant: str, part: str, key: str) -> list[float]:
    """One value from each network of a variant."""
    return values(experiment, variant, "training", part, key)


def display_name(variant: str) -> str:
    """The variant, followed by the paper's name for it if there is one."""
    return f"{variant} ({NAMES[variant]})" if variant in NAMES else variant


# ------------------------------------------------------------------------------------------- parts of the page


def learned() -> str:
    """Losses and accuracies of each attention."""
    parts = []
    for experiment, digits in (("characters", 3), ("words", 3)):
        names = [name for name in EXPERIMENTS[experiment] if per_network(experiment, name, "valid", "loss")]
        if not names:
            continue
        rows = []
        for name in names:
            many = len(per_network(experiment, name, "valid", "loss"))
            rows.append([
                display_name(name) + (f", {many} networks" if many < NETWORKS else ""), spread(per_network(experiment, name, "valid", "loss"), digits),
                spread(per_network(experiment, name, "valid", "bits"), digits), spread(per_network(experiment, name, "valid", "perplexity"), 2 if experiment == "characters" else 0),
                spread(per_network(experiment, name, "valid", "accuracy"), digits), spread(per_network(experiment, name, "train", "loss"), digits), spread(per_network(experiment, name, "train", "accuracy"), digits),
            ])  # fmt: skip
        head = ["attention", "validation loss", f"bits per {experiment[:-1]}", "perplexity", "validation accuracy", "training loss", "training accuracy"]  # fmt: skip
        parts.append("\n\n".join([f"### {experiment}", training_setup(experiment), table(head, rows), ngram_baseline(experiment), verdict(experiment, names)]))  # fmt: skip
    if not parts:
        return ""
    return "\n\n".join([
        "## What is learned",
        f"Mean ± sample standard deviation over {NETWORKS} networks, each evaluated after its last update; none is selected. Losses are in nats and averaged over "
        "tokens; accuracy is the share of next tokens predicted correctly. Training figures cover the last 100 updates, each measured before its step. All variants share the same settings except the learning rate, "
        "which was chosen for each attention in short trials on another stretch of the validation text (below). `…-alone`: no memory of earlier segments. `relative-conv-reference`: queries are convolved over the "
        "current segment only, as in the released code. `…-scaled`: embeddings are initialised smaller and multiplied by √D, as in MHA and MDHA, so that they learn faster with Adam; without this, the comparison on words also compares embeddings.",
        *parts,
    ])  # fmt: skip


def ngram_baseline(experiment: str) -> str:
    """Bits and perplexity of unigram and bigram counts."""
    measured = values("counts", experiment, "counts")
    if not measured:
        return ""
    scores = [f"{measured[0][kind]['bits']:.3f} bits (perplexity {measured[0][kind]['perplexity']:,.1f})" for kind in ("frequencies", "pairs")]  # fmt: skip
    return f"For comparison, counts over the whole training text, evaluated on the same {measured[0]['tokens']:,} {experiment}, give {scores[0]} with unigrams and {scores[1]} with bigrams."


def training_setup(experiment: str) -> str:
    """The text, the network and the training schedule of an experiment."""
    settings = EXPERIMENTS[experiment]["softmax"]
    assert isinstance(settings, Settings)
    from .texts import LEAST, read

    text = read(settings.text)
    symbols = (
        f"{len(text.symbols):,} words, the full vocabulary" if settings.text == "words"
        else f"{len(text.symbols)} characters, with all those that occur fewer than {LEAST} times merged into one"
    )  # fmt: skip
    tokens_read = settings.updates * settings.batch * settings.segment
    return (
        f"WikiText-2, split into {settings.text} ({symbols}; {len(text.train):,} for training, of which {tokens_read:,} are read, and the first "
        f"{settings.validated:,} for validation). {settings.layers} layers of width {settings.width} with {settings.heads} heads and a hidden layer "
        f"of {settings.hidden}; {settings.batch} streams, read in segments of {settings.segment} tokens, with a memory of the same length; "
        f"{settings.updates:,} updates of Adam with the Noam schedule, which peaks at update {settings.warmup:,} with a learning rate of {rates(experiment)}; gradient norm clipped at {settings.clip:g}."
    )


def rates(experiment: str) -> str:
    """The peak learning rates of the four attentions."""
    variants: Any = EXPERIMENTS[experiment]
    peak_rates = {name: variants[name].peak for name in FOUR}
    if len(set(peak_rates.values())) == 1:
        return f"{peak_rates['softmax']:g}"
    return ", ".join(f"{peak:g} ({name})" for name, peak in peak_rates.items())


def peaks() -> str:
    """The search over learning rates."""
    rows = []
    for name in (f"{name}{ending}" for ending in ("", "-alone") for name in FOUR):
        tried = {peak: values("peaks", f"{name}-{peak:g}", "training", "valid", "bits") for peak in TRIED}
        if all(tried.values()):
            best = min(tried, key=lambda peak: tried[peak][0])
            cells = (f"**{bits[0]:.3f}**" if peak == best else f"{bits[0]:.3f}" for peak, bits in tried.items())
            rows.append([display_name(name), *cells])
    if not rows:
        return ""
    return "\n\n".join([
        "## Learning rate search",
        f"The characters setup above with {TRIAL.updates} updates and one network per cell: bits per character on {TRIAL.validated:,} characters of the validation text that are used for no other evaluation. Each attention is trained with the best rate of its row; on words with {WORDS.peak / Settings.peak:g} times that rate, which was not tuned.",
        table(["attention", *(f"{peak:g}" for peak in TRIED)], rows),
    ])  # fmt: skip


def verdict(experiment: str, names: Sequence[str]) -> str:
    """Pairwise differences of the validation loss, with the lower one where the difference exceeds its interval."""
    rows = []
    for one, two in combinations(names, 2):
        gap = gain(*(per_network(experiment, name, "valid", "loss") for name in (one, two)))
        if gap is not None and differ_in_one_thing(one, two):
            lower = {"neither": "–", "above": one, "below": two}[side(gap)]
            rows.append([f"{one}, {two}", f"{abs(gap[0]):.3f} ± {gap[1]:.3f}", lower])
    if not rows:
        return ""
    return table(
        [
            "variants compared",
            "difference in validation loss, ± 95 %",
            "lower loss, if the difference exceeds its interval",
        ],
        rows,
    ) + (
        "\n\nNetworks with the same seed read the same stretches of text, so differences are taken per seed; the table shows their mean and its 95 % "
        "confidence interval (Student's t). With so few networks and so many comparisons, some of the differences that exceed their interval can be expected to be due to chance. "
        "The results hold for these settings and for networks that have seen little text; nothing more is claimed."
    )


def differ_in_one_thing(one: str, two: str) -> bool:
    """Whether two variants differ only in the attention or only in the condition."""
    (attention, first), (other, second) = map(parted, (one, two))
    return first == second or attention == other or {first, second} == {"", "scaled"}


def parted(variant: str) -> tuple[str, str]:
    """The attention of a variant and its condition: no memory, scaled embeddings, …"""
    name = max((attention for attention in FOUR if variant.startswith(attention)), key=len)
    return name, variant.removeprefix(name).removeprefix("-")


CONDITIONS = {
    "characters, with a memory": ("characters", dict.fromkeys(FOUR, "")),
    "characters, without a memory": ("characters", dict.fromkeys(FOUR, "-alone")),
    "words, embeddings as in the released code": ("words", dict.fromkeys(FOUR, "")),
    "words, all embeddings scaled": ("words", {name: "-scaled" if "relative" in name else "" for name in FOUR}),
}
"""Conditions under which the four attentions are compared: the experiment, and the suffix of each variant's name."""


SIDES = {"below": "below", "above": "above", "neither": "within chance of"}


def answer() -> str:
    """Whether RCMHA has a lower loss than the others, in each condition."""
    lines = []
    beside_plain: dict[str, dict[str, tuple[float, float] | None]] = {"relative": {}, "mdha": {}}
    for condition, (experiment, endings) in CONDITIONS.items():
        losses = {name: per_network(experiment, f"{name}{ending}", "valid", "loss") for name, ending in endings.items()}
        if any(len(network_losses) < NETWORKS for network_losses in losses.values()):
            continue
        order = sorted(FOUR, key=lambda name: statistics.mean(losses[name]))
        gaps = {NAMES[name]: gain(losses[name], losses["relative-conv"]) for name in FOUR[:-1]}
        for name, gains in beside_plain.items():
            gains[condition] = gain(losses[FOUR[0]], losses[name])
        lie = sides(gaps)
        counted = "; ".join(f"{word} {', '.join(lie[key])}" for key, word in SIDES.items() if lie[key])
        lines.append(f"- **{condition}**: {' < '.join(f'{NAMES[name]} {statistics.mean(losses[name]):.3f}' for name in order)}. RCMHA is {counted}.")  # fmt: skip
    return helps(
        f"Mean validation losses of {NETWORKS} networks, lowest first. RCMHA counts as below or above another attention if their difference, taken per seed, exceeds its 95 % confidence interval:",
        lines,
        " ".join(
            f"{NAMES[name]} is " + "; ".join(
                f"{word} {NAMES[FOUR[0]]} in {' and in '.join(conditions)}"
                for key, word in SIDES.items() if (conditions := sides(gains)[key])
            ) + "."
            for name, gains in beside_plain.items()
        ),
    )  # fmt: skip


def copied() -> str:
    """The copying task."""
    rows = []
    for name in FOUR:
        networks = values("copying", name, "training")
        if networks:
            settings = EXPERIMENTS["copying"][name]
            assert isinstance(settings, CopySettings)
            cells = []
            for back in map(str, settings.distances):
                first_learned = [network[back]["learned"] for network in networks]
                cells += [
                    spread([100 * network[back]["accuracy"] for network in networks]),
                    ", ".join("–" if update is None else str(update) for update in first_learned),
                ]
            rows.append([display_name(name), *cells])
    if not rows:
        return ""
    settings = EXPERIMENTS["copying"]["softmax"]
    assert isinstance(settings, CopySettings)
    head = ["attention"]
    for back in settings.distances:
        head += [f"accuracy, {back} back, %", f"updates to {100 * ENOUGH:.0f} %"]
    return "\n\n".join([
        "## Copying earlier symbols",
        f"Random symbols from an alphabet of {settings.symbols}, in sequences of {settings.segment}; at each position the network has to output the symbol that stood a fixed number of positions earlier. {settings.layers} layers of "
        f"width {settings.width}, {settings.updates} updates with batches of {settings.batch}, Adam with learning rate {settings.learning_rate:g}. The table shows the accuracy on new symbols after the last update, and the update by which each network had learned the task.",
        table(head, rows),
    ])  # fmt: skip


def costs() -> str:
    """Time and memory of one update."""
    measured = values("costs", "all", "costs")
    if not measured:
        return ""
    parts = []
    for experiment in (name for name in measured[0] if isinstance(measured[0][name], dict)):
        rows = [
            [display_name(name), f"{c['parameters']:,}", f"{c['milliseconds']:.1f}", f"{c['kept_megabytes']:.1f}", f"{c['grown_megabytes']:.1f}"]
            for name, c in measured[0][experiment].items()
        ]  # fmt: skip
        head = ["attention", "parameters", "ms per update", "MB kept for the backward pass", "MB the process grows by"]
        parts.append(f"### {experiment}\n\n{table(head, rows)}")
    return "\n\n".join([
        "## What an update costs",
        "Median over repetitions, on one thread; all variants process the same segment with a full memory (`…-alone`: the first segment, without a memory). *Kept* counts the tensors that the forward pass "
        "saves, excluding parameters. *Grows* is the peak growth of a process during the first update of a network, including gradients and Adam's state; the process is used for nothing else and has made such an update before. All of it is "
        "in float32. The paper's abstract gives 2.98 GB for the most frugal module against 3.5 GB for RMHA, and prints RMHA for both; "
        "the first must mean RCMHA. At equal shapes RCMHA has 3·d·(k + 1) more parameters per layer than RMHA and keeps three more activation tensors, "
        "so the module itself cannot use less memory; the gap must come from the setup or the measurement. Here relative positions are looked up separately "
        "for each sequence of a batch, so that a recorder can tell which sequence trained them. This costs memory too. Softmax and MDHA run on PyTorch's fused kernel, which stores no attention weights.",
        *parts,
    ])  # fmt: skip


def recorded() -> str:
    """Certificates of recorded networks, and the training passages behind one prediction each."""
    rows, shown = [], []
    for name in FOUR:
        for training, asked in zip(
            values("recorded", name, "training"), values("recorded", name, "asked"), strict=False
        ):
            worst, noise = certificates(name, training["certificate"])
            rows.append([
                display_name(name), f"{training['valid']['bits']:.2f}", f"{worst:.1e}", f"{noise:.1e}" if noise else "–", training["marks"],
                f"{training['memory_megabytes']:,}",
            ])  # fmt: skip
            shown.append(_asked(name, asked))
    if not rows:
        return ""
    settings = EXPERIMENTS["recorded"]["softmax"]
    assert isinstance(settings, Settings)
    return "\n\n".join([
        "## Recorded and queried",
        f"One small network per attention (one layer of width {settings.width}, {settings.updates} updates, characters), recorded in float32 during training. *Certificate* is "
        "the worst relative error of a parameter rebuilt from the memory, including the position tables, u and the convolutions. *Of key "
        "biases* is the same for biases that have no effect: adding one vector to all keys does not change a softmax, so the gradient of the last bias added to the keys (that of their projection or, after it, of their convolution) is rounding error only, which Adam "
        "scales up to the size of any other gradient. The tables below query one position of the validation text, with a full memory before it. They list the training passages that contribute most to the logit of "
        "the character that the network predicts next, through the last layer and through the value projection of its attention; for the latter, the bold character may lie in the memory of earlier tokens.",
        table(["attention", "bits per character", "certificate", "of key biases", "marks", "memory, MB"], rows),
        *shown,
    ])  # fmt: skip


def certificates(attention: str, certificate: dict[str, float]) -> tuple[float, float]:
    """The worst relative error of a parameter and, separately, that of key biases that have no effect."""
    return worst_errors(certificate, ".attn.key." if attention == "softmax" else ".attn.key_conv.")


def _asked(name: str, asked: dict[str, Any]) -> str:
    rows = [
        [layer, f"… {_plain(hit['before'])}**{_plain(hit['symbol'])}**{_plain(hit['after'])} …", f"{hit['adds']:+.3g}, step {hit['step']:,}"]
        for layer, hits in asked["layers"].items()
        for hit in hits
    ]  # fmt: skip
    sentence = f"After “… {_plain(asked['prompt'])}” the network predicts “{_plain(asked['said'])}”; the text continues with “{_plain(asked['next'])}”."
    return f"### {display_name(name)}\n\n{sentence}\n\n{table(['layer', 'passage', 'contribution'], rows)}"


def _plain(text: str) -> str:
    for mark, written in (("\\", "\\\\"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_"), ("<", "&lt;"), ("\n", "⏎")):
        text = text.replace(mark, written)
    return "␣" if text == " " else text


HEAD = """# Relative positions and convolutions in attention

A study of the paper by Sugiharto, Aradea, Mubarok (2023), *RCMHA: Relative Convolutional Multi-Head Attention for Natural Language Modelling*, arXiv 2308.03429.
`python -m experiments.rcmha.page` writes this page from the run folders of

    dualform reproduce rcmha

**Claim of the paper.** Attention with relative positions in its scores and depth-wise convolutions of queries, keys and values (RCMHA) predicts the next
token better than attention with only one of these (RMHA, MDHA) or neither (MHA), with an accuracy of 0.572, and uses less memory than RMHA: 2.98 GB against 3.5 GB.

## Where we differ

1. Only the paper's abstract was available to us. We do not know its corpus, its settings or its other figures, so no number below can be compared with the paper's.
   The text, sizes and schedule are ours; the modules follow the released code and, where the code leaves a choice open, the papers it builds on.
2. The entry script of the released code builds plain relative attention without a convolution. Here RCMHA is what the class of that name computes.
3. The released code accumulates accuracy over all training and validation batches since the start, so any figure taken from it is a running mean.
   Here training and validation are separate, and each is a mean over tokens.
4. The released code convolves queries over the current segment only. Here the convolution also covers the remembered tokens, so that two segments read in turn give the same result as
   one long segment; `mode="reference"` restores the released behaviour.
5. The abstract speaks of convolving the input embedding; the released code, and therefore ours, convolves queries, keys and values.
6. Each layer has its own initial weights; in the released code all layers start as copies of the first. Position tables have one row per offset, not 8,192.
7. MHA and MDHA use sinusoidal positions, counted from the oldest remembered token, and embeddings initialised with standard deviation D^-1/2, which the factor √D brings to the scale of the sinusoids. With a
   memory, older tokens were given the same positions, so softmax attention can tell little more than which tokens occurred: it learns hardly more than bigrams
   provide. The `…-alone` networks have no memory and can be compared with each other."""


def main() -> None:
    """Collect results and write the page, or restore run folders."""
    PAGE.main(
        HEAD,
        [
            lambda: missing_of(ARCHIVE, EXPERIMENTS, lambda name: 1 if name in ONCE else NETWORKS),
            answer,
            learned,
            peaks,
            copied,
            costs,
            recorded,
            lambda: times_of(ARCHIVE, EXPERIMENTS, "rcmha"),
        ],
    )


if __name__ == "__main__":
    main()
