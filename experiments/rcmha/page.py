"""docs/results/rcmha.md, made of what is kept of the runs: every number on it stands in one of their files.

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
"""What the paper calls them."""


def found(experiment: str, variant: str, part: str, key: str) -> list[float]:
    """A number of every network of a variant."""
    return values(experiment, variant, "training", part, key)


def called(variant: str) -> str:
    """With the paper's name for it."""
    return f"{variant} ({NAMES[variant]})" if variant in NAMES else variant


# ------------------------------------------------------------------------------------------- parts of the page


def learned() -> str:
    """What each attention learns."""
    parts = []
    for experiment, digits in (("characters", 3), ("words", 3)):
        names = [name for name in EXPERIMENTS[experiment] if found(experiment, name, "valid", "loss")]
        if not names:
            continue
        rows = []
        for name in names:
            many = len(found(experiment, name, "valid", "loss"))
            rows.append([
                called(name) + (f", {many} networks" if many < NETWORKS else ""), spread(found(experiment, name, "valid", "loss"), digits),
                spread(found(experiment, name, "valid", "bits"), digits), spread(found(experiment, name, "valid", "perplexity"), 2 if experiment == "characters" else 0),
                spread(found(experiment, name, "valid", "accuracy"), digits), spread(found(experiment, name, "train", "loss"), digits), spread(found(experiment, name, "train", "accuracy"), digits),
            ])  # fmt: skip
        head = ["attention", "validation loss", f"bits a {experiment[:-1]}", "perplexity", "validation accuracy", "training loss", "training accuracy"]  # fmt: skip
        parts.append("\n\n".join([f"### {experiment}", about(experiment), table(head, rows), by_counts(experiment), verdict(experiment, names)]))  # fmt: skip
    if not parts:
        return ""
    return "\n\n".join([
        "## What is learned",
        f"Mean ± sample deviation over {NETWORKS} networks, each after its last update; none is selected. Losses are in nats, means over "
        "tokens; accuracy is the share of next tokens that are guessed. Training figures are of the last 100 updates, each before its step. All variants have the same settings but for the learning rate, "
        "which was chosen for each attention by short trials on another stretch of the validation text (below). `…-alone`: nothing is remembered. `relative-conv-reference`: queries are convolved over the "
        "segment alone, as in the released code. `…-scaled`: embeddings begin smaller and are multiplied by √D, as those of MHA and MDHA are, so that with Adam they learn faster; without it the comparison of words is one of embeddings, too.",
        *parts,
    ])  # fmt: skip


def by_counts(experiment: str) -> str:
    """What tables of counts would get."""
    measured = values("counts", experiment, "counts")
    if not measured:
        return ""
    told = [f"{measured[0][each]['bits']:.3f} bits (perplexity {measured[0][each]['perplexity']:,.1f})" for each in ("frequencies", "pairs")]  # fmt: skip
    return f"For comparison, counts of the whole training text on the same {measured[0]['tokens']:,} {experiment}: {told[0]} by frequencies, {told[1]} by pairs of neighbours."


def about(experiment: str) -> str:
    """What it is trained on, and how."""
    settings = EXPERIMENTS[experiment]["softmax"]
    assert isinstance(settings, Settings)
    from .texts import LEAST, read

    text = read(settings.text)
    symbols = (
        f"{len(text.symbols):,} words, all there are" if settings.text == "words"
        else f"{len(text.symbols)} characters, those that occur less than {LEAST} times as one of them"
    )  # fmt: skip
    read_ = settings.updates * settings.batch * settings.segment
    return (
        f"WikiText-2 by {settings.text} ({symbols}; {len(text.train):,} for training, of which {read_:,} are read, and the first "
        f"{settings.validated:,} for validation). {settings.layers} layers of width {settings.width} with {settings.heads} heads and a hidden layer "
        f"of {settings.hidden}; {settings.batch} streams, segments of {settings.segment}, as many remembered; "
        f"{settings.updates:,} updates of Adam with Noam's schedule, at update {settings.warmup:,} {rates(experiment)}; gradients clipped at {settings.clip:g}."
    )


def rates(experiment: str) -> str:
    """The learning rates at their peak."""
    variants: Any = EXPERIMENTS[experiment]
    each = {name: variants[name].peak for name in FOUR}
    if len(set(each.values())) == 1:
        return f"{each['softmax']:g}"
    return ", ".join(f"{peak:g} ({name})" for name, peak in each.items())


def peaks() -> str:
    """Learning rates that were tried."""
    rows = []
    for name in (f"{name}{ending}" for ending in ("", "-alone") for name in FOUR):
        tried = {peak: values("peaks", f"{name}-{peak:g}", "training", "valid", "bits") for peak in TRIED}
        if all(tried.values()):
            best = min(tried, key=lambda peak: tried[peak][0])
            cells = (f"**{each[0]:.3f}**" if peak == best else f"{each[0]:.3f}" for peak, each in tried.items())
            rows.append([called(name), *cells])
    if not rows:
        return ""
    return "\n\n".join([
        "## Learning rates that were tried",
        f"Characters as above, {TRIAL.updates} updates, one network each: bits a character on {TRIAL.validated:,} characters of the validation text that nothing else is judged on. The best of each line is used; for words {WORDS.peak / Settings.peak:g} of it, which was not tried.",
        table(["attention", *(f"{peak:g}" for peak in TRIED)], rows),
    ])  # fmt: skip


def verdict(experiment: str, names: Sequence[str]) -> str:
    """Differences of the validation loss that are more than chance."""
    rows = []
    for one, two in combinations(names, 2):
        gap = gain(*(found(experiment, name, "valid", "loss") for name in (one, two)))
        if gap is not None and differ_in_one_thing(one, two):
            lower = {"neither": "–", "above": one, "below": two}[side(gap)]
            rows.append([f"{one}, {two}", f"{abs(gap[0]):.3f} ± {gap[1]:.3f}", lower])
    if not rows:
        return ""
    return table(["validation losses of", "differ by, ± 95 %", "the lower, where that is more"], rows) + (
        "\n\nNetworks of one seed read the same stretches of text, so differences are taken seed by seed: their mean, and what holds it in 95 % of all "
        "cases by Student's t. With so few networks and so many comparisons some such differences are chance. They are of these settings, and "
        "of networks that have seen little text; no more is claimed."
    )


def differ_in_one_thing(one: str, two: str) -> bool:
    """Attentions under the same conditions, or one attention under two."""
    (a, first), (b, second) = map(parted, (one, two))
    return first == second or a == b or {first, second} == {"", "scaled"}


def parted(variant: str) -> tuple[str, str]:
    """The attention of a variant, and what else is done: nothing is remembered, embeddings are scaled, …"""
    name = max((each for each in FOUR if variant.startswith(each)), key=len)
    return name, variant.removeprefix(name).removeprefix("-")


CONDITIONS = {
    "characters, with a memory": ("characters", dict.fromkeys(FOUR, "")),
    "characters, without": ("characters", dict.fromkeys(FOUR, "-alone")),
    "words, embeddings as in the released code": ("words", dict.fromkeys(FOUR, "")),
    "words, all embeddings scaled": ("words", {name: "-scaled" if "relative" in name else "" for name in FOUR}),
}
"""Four attentions that can be compared: the experiment, and the endings of their names."""


def answer() -> str:
    """Is RCMHA better than the others? Counted."""
    lines = []
    for told, (experiment, endings) in CONDITIONS.items():
        losses = {name: found(experiment, f"{name}{ending}", "valid", "loss") for name, ending in endings.items()}
        if any(len(each) < NETWORKS for each in losses.values()):
            continue
        order = sorted(FOUR, key=lambda name: statistics.mean(losses[name]))
        gaps = {NAMES[name]: gain(losses[name], losses["relative-conv"]) for name in FOUR[:-1]}
        words = {"below": "below", "above": "above", "neither": "within chance of"}
        lie = sides(gaps)
        counted = "; ".join(f"{word} {', '.join(lie[key])}" for key, word in words.items() if lie[key])
        lines.append(f"- **{told}**: {' < '.join(f'{NAMES[name]} {statistics.mean(losses[name]):.3f}' for name in order)}. RCMHA is {counted}.")  # fmt: skip
    return helps(
        f"Mean validation losses of {NETWORKS} networks, the lowest first, and where RCMHA lies by more than chance (95 %, seed by seed):",
        lines,
        "Relative positions and convolutions both help against plain attention, and do much of the same: what one brings beside the other is little here.",
    )


def copied() -> str:
    """Random symbols, said again."""
    rows = []
    for name in FOUR:
        networks = values("copying", name, "training")
        if networks:
            settings = EXPERIMENTS["copying"][name]
            assert isinstance(settings, CopySettings)
            cells = []
            for back in map(str, settings.distances):
                after = [each[back]["learned"] for each in networks]
                cells += [
                    spread([100 * each[back]["accuracy"] for each in networks]),
                    ", ".join("–" if each is None else str(each) for each in after),
                ]
            rows.append([called(name), *cells])
    if not rows:
        return ""
    settings = EXPERIMENTS["copying"]["softmax"]
    assert isinstance(settings, CopySettings)
    head = ["attention"]
    for back in settings.distances:
        head += [f"{back} back, %", f"updates to {100 * ENOUGH:.0f} %"]
    return "\n\n".join([
        "## What came before, said again",
        f"Random symbols, {settings.symbols} of them, in sequences of {settings.segment}; the network is to say at each place what stood so many places before. {settings.layers} layers of "
        f"width {settings.width}, {settings.updates} updates of {settings.batch}, Adam with {settings.learning_rate:g}; accuracy on new symbols after the last, and the update by which each network had learned it.",
        table(head, rows),
    ])  # fmt: skip


def costs() -> str:
    """Time and memory of an update."""
    measured = values("costs", "all", "costs")
    if not measured:
        return ""
    parts = []
    for experiment in (name for name in measured[0] if isinstance(measured[0][name], dict)):
        rows = [
            [called(name), f"{c['parameters']:,}", f"{c['milliseconds']:.1f}", f"{c['kept_megabytes']:.1f}", f"{c['grown_megabytes']:.1f}"]
            for name, c in measured[0][experiment].items()
        ]  # fmt: skip
        head = ["attention", "parameters", "ms an update", "MB kept for the backward pass", "MB a process grows"]
        parts.append(f"### {experiment}\n\n{table(head, rows)}")
    return "\n\n".join([
        "## What an update costs",
        "Median over turns, one thread, all on the same segment with a full memory (`…-alone` on the first, without). *Kept* are the tensors that the forward pass "
        "saves, parameters aside; *grows* is the peak of the first update of a network, with gradients and the state of Adam, in a process of its own that has made such an update before, "
        "in float32. The paper's abstract gives 2.98 GB for the most frugal module against 3.5 GB for RMHA, and prints RMHA for both; "
        "the first must mean RCMHA. At equal shapes RCMHA has 3·d·(k + 1) parameters a layer and three tensors of activations more than "
        "RMHA, so the module cannot by itself take less; that gap must come from the setup or the measurement. Relative positions are looked up "
        "for each sequence of a batch, so that a recorder can tell who trained them; that costs memory, too, and softmax and MDHA run on torch's fused kernel, which keeps no weights.",
        *parts,
    ])  # fmt: skip


def recorded() -> str:
    """Certificates, and where a character comes from."""
    rows, shown = [], []
    for name in FOUR:
        for training, asked in zip(
            values("recorded", name, "training"), values("recorded", name, "asked"), strict=False
        ):
            worst, noise = certificates(name, training["certificate"])
            rows.append([
                called(name), f"{training['valid']['bits']:.2f}", f"{worst:.1e}", f"{noise:.1e}" if noise else "–", training["marks"],
                f"{training['memory_megabytes']:,}",
            ])  # fmt: skip
            shown.append(_asked(name, asked))
    if not rows:
        return ""
    settings = EXPERIMENTS["recorded"]["softmax"]
    assert isinstance(settings, Settings)
    return "\n\n".join([
        "## Recorded and asked",
        f"A small network of each (one layer of width {settings.width}, {settings.updates} updates, characters) trained while it is recorded in float32. *Certificate*: "
        "the worst relative error of a parameter rebuilt from the memory; tables of positions, u and convolutions are among them. *Of key "
        "biases*: under a softmax a shift of all keys changes nothing, so the gradient of the bias that keys get last (of their projection or, behind that, their convolution) is rounding alone, which Adam "
        "makes as large as any other. Then one place of the validation text is asked for, with a full memory before it: the training passages that add most to the logit of "
        "the character that the network says next, through the last layer and through the values of its attention, where the place may lie in what was remembered.",
        table(["attention", "bits a character", "certificate", "of key biases", "marks", "memory, MB"], rows),
        *shown,
    ])  # fmt: skip


def certificates(attention: str, of: dict[str, float]) -> tuple[float, float]:
    """The worst relative error of a parameter, and apart from it that of biases of keys that have no effect."""
    return worst_errors(of, ".attn.key." if attention == "softmax" else ".attn.key_conv.")


def _asked(name: str, asked: dict[str, Any]) -> str:
    rows = [
        [layer, f"… {_plain(hit['before'])}**{_plain(hit['symbol'])}**{_plain(hit['after'])} …", f"{hit['adds']:+.3g}, step {hit['step']:,}"]
        for layer, hits in asked["layers"].items()
        for hit in hits
    ]  # fmt: skip
    said = f"After “… {_plain(asked['prompt'])}” it says “{_plain(asked['said'])}”; “{_plain(asked['next'])}” is what comes."
    return f"### {called(name)}\n\n{said}\n\n{table(['layer', 'passage', 'adds'], rows)}"


def _plain(text: str) -> str:
    for mark, written in (("\\", "\\\\"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_"), ("<", "&lt;"), ("\n", "⏎")):
        text = text.replace(mark, written)
    return "␣" if text == " " else text


HEAD = """# Relative positions and convolutions in attention

After Sugiharto, Aradea, Mubarok (2023), *RCMHA: Relative Convolutional Multi-Head Attention for Natural Language Modelling*, arXiv 2308.03429. This page
is made by `python -m experiments.rcmha.page` from the run folders of

    dualform reproduce rcmha

**Claim of the paper.** Attention with relative positions in its scores and depth-wise convolutions of queries, keys and values (RCMHA) predicts the next
token better than attention with one of these (RMHA, MDHA) or neither (MHA), with an accuracy of 0.572, and takes less memory than RMHA: 2.98 GB against 3.5 GB.

## Where we differ

1. Of the paper only the abstract was at hand: its corpus, its settings and all other figures are not known here, so no number below can be set beside its own.
   The text, sizes and schedule are ours; the modules follow the released code and, where that leaves it open, the papers they come from.
2. The entry script of the released code builds plain relative attention, without a convolution. Here RCMHA is what its class says.
3. The released code counts accuracy over all training and validation batches since the start, so a figure taken from it is a running mean.
   Here training and validation are apart, and each is a mean over tokens.
4. The released code convolves queries over the segment alone. Here they see what is remembered, so that two segments are one; `mode="reference"` is the other way.
5. The abstract speaks of convolving the input embedding; the code, and so this, convolves queries, keys and values.
6. Layers begin with weights of their own; in the released code all are copies of the first. Tables of positions have as many rows as there are offsets, not 8,192.
7. MHA and MDHA have sinusoids of the place, counted from the oldest token remembered, and embeddings that begin with a deviation of D^-1/2, which √D makes as large as these. With a
   memory older tokens have had the same places, so that softmax attention can tell little more than which tokens there were: it learns hardly more than pairs of
   neighbours tell. The `…-alone` networks remember nothing, and can be compared with each other."""


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
