"""Section of the results page on two transformers that were trained and recorded."""

from typing import Any

from experiments.results import table

from .results import ARCHIVE, found
from .settings import EXPERIMENTS, TrainedSettings
from .words import figure, number, part, percent

TASKS = {
    "fables": "a character-level language model of Aesop's fables (TransformerLM, causal)",
    "vowels": "a speaker classifier for the JapaneseVowels data of the UEA archive (SeriesClassifier)",
}


def trained() -> str:
    """The whole section: question, setting, one part per transformer, reading."""
    results = {name: result for name in TASKS if (result := found("trained", name)) is not None}
    if not results:
        return ""
    return part(
        "## Trained transformers",
        "**Question.** Do the heads of a transformer separate tokens as the theory says if it is trained in the usual way, with AdamW, residual connections, normalisation and all layers at once? None of the theory's conditions hold for such heads.",
        "**Run.** Two layers of four heads, width 64, trained and recorded; the memory provides the weights at every step. At several steps, all heads are evaluated on the same test sequences and 256 of their queries (`svm.trajectory`): "
        "the separating matrix of the tokens that the head selects at that step, its margin efficiency and cosine, and the same for five random matrices of the same rank (*null*: mean efficiency, range of the cosines). *Best tokens*: the share of queries that select the token that lowers the loss most, by first-order scores.",
        *(trained_one(name, result) for name, result in results.items()),
        trained_reading(results),
    )


def trained_one(name: str, result: dict[str, Any]) -> str:
    """One transformer: its training, its heads at the end, their sharp queries, and the origin of their directions."""
    training = stage("trained", name, "training")
    first = [row for row in result["moments"] if row["step"] == 0]
    untrained = f"{min(row['cosine'] for row in first):.2f} to {max(row['cosine'] for row in first):.2f}"
    settings = EXPERIMENTS["trained"][name]
    assert isinstance(settings, TrainedSettings)
    rows, sharp, origins = [], [], []
    for row in result["last"]:
        end = next(r for r in reversed(result["moments"]) if (r["layer"], r["head"]) == (row["layer"], row["head"]))
        label = f"{row['layer'].split('.')[1]}.{row['head']}"
        rows.append([
            label, percent(row["above 0.9"]), percent(row["above 0.99"]), number(row["entropy"], 2), f"{row['smallest margin']:.1e}",
            f"{row['efficiency']:.1e}", f"{row['null efficiency']:.1e}", number(row["cosine"], 2), f"{row['range'][0]:.2f}–{row['range'][1]:.2f}",
            number(row["nuclear cosine"], 2), f"{row['rank']} / {row['separating rank']} / {row['nuclear rank']}", f"{row['gap']:.0e}", percent(end["at best"]),
        ])  # fmt: skip
        if (at_sharp := row["sharp"]) is not None:
            sharp.append([
                label, at_sharp["queries"], f"{at_sharp['efficiency']:.2f}", f"{at_sharp['null efficiency']:.3f}", number(at_sharp["cosine"], 2),
                f"{at_sharp['range'][0]:.2f}–{at_sharp['range'][1]:.2f}", number(at_sharp["median margin"], 1),
            ])  # fmt: skip
        origins.append([label, *origin_cells(row)])
    head = [
        "head",
        "above 0.9, %",
        "above 0.99, %",
        "entropy",
        "smallest margin",
        "efficiency",
        "null",
        "cosine",
        "null",
        "nuclear cosine",
        "ranks",
        "gap",
        "best tokens, %",
    ]
    return part(
        f"### {name.capitalize()}",
        f"This is {TASKS[name]}: {settings.steps:,} steps with batches of {settings.batch}, loss {training['first_loss']:.2f} → {training['loss']:.3f} (test {training['test_loss']:.3f}, accuracy {percent(training['test_accuracy'])} % on the {settings.asked} test sequences used here). "
        f"The certificates of the attention layers' weight matrices are at most {training['certificate_of_attention']:.0e} (float32); the memory takes {training['memory_megabytes']:,} MB.",
        figure(f"trained-{name}", f"All heads of the network on {name} through training"),
        "After training (ranks: of the head, and of the separating matrices of smallest Frobenius and nuclear norm):",
        table(head, rows),
        f"Before training, the cosines of the heads are {untrained}.",
        part(
            f"Only the queries where a head puts more than {settings.above} of its weight on one token (random matrices: the same number of queries, those where each matrix is sharpest):",
            table(["head", "queries", "efficiency", "null", "cosine", "null", "median margin"], sharp),
        ) if sharp else f"No head puts more than {settings.above} of its weight on one token for any query.",
        "Origin of each head: its component ⟨W, D⟩ along the separating direction D as a sum over training, exact up to the residual, and the training examples that contribute most.",
        table(["head", "⟨W, D⟩", "initial weights", "training", "examples with a positive contribution, %", "residual", *(["support tokens, by share of the multipliers"] if "items" in result["last"][0] else []), "largest contributions"], origins),
    )  # fmt: skip


def origin_cells(row: dict[str, Any]) -> list[str]:
    """Table cells on the origin of a head's direction."""
    built = row["origin"]
    items = (
        [" ".join(f"‘{visible(item)}’ {percent(share)} %" for item, share in row["items"])] if "items" in row else []
    )
    most = "; ".join(f"{index} ({mean:+.4f}): {passage(text)}" for index, mean, text in built["largest"][:2])
    return [
        number(built["total"], 3), number(built["initial"], 3), number(built["total"] - built["initial"], 3), percent(built["above_zero"]),
        f"{built['residual']:.0e}", *items, most,
    ]  # fmt: skip


def visible(text: str) -> str:
    """A character in a form that is visible in a table."""
    return {" ": "␣", "\n": "⏎", "|": "\\|"}.get(text, text)


def passage(text: str) -> str:
    """A training example as text for a table cell."""
    return "".join(map(visible, text)).replace("␣", " ") if len(text) > 12 else text


def trained_reading(results: dict[str, dict[str, Any]]) -> str:
    """Conclusions from both transformers."""
    above = {name: sum(row["cosine"] > row["range"][1] for row in result["last"]) for name, result in results.items()}
    count = {name: len(result["last"]) for name, result in results.items()}
    best = max(row["efficiency"] for result in results.values() for row in result["last"])
    sharp = [row["sharp"] for result in results.values() for row in result["last"] if row["sharp"] is not None]
    shares = " and ".join(f"{above[name]} of {count[name]} heads on {name}" for name in results)
    text = (
        f"**Reading.** Training moves the heads towards the separating matrices of the tokens they select, but not far: the cosine is above those of all random matrices for {shares}. "
        f"The margin behaves differently: over all queries, the efficiency is at most {best:.1e}, where the layer of the theory reaches 0.9 and more, and it hardly differs from that of random matrices. These heads are soft: some query is always undecided, and the smallest margin is that of the most undecided one. "
    )
    if sharp:
        better = sum(row["efficiency"] > row["null efficiency"] for row in sharp)
        text += f"Where a head is sharp, the theory fits better: there the efficiency is {min(row['efficiency'] for row in sharp):.2f} to {max(row['efficiency'] for row in sharp):.2f}, above the mean of random matrices at their own sharpest queries for {better} of {len(sharp)} heads. "
    first, last = (
        [
            row["effective rank"]
            for result in results.values()
            for row in result["moments"]
            if row["step"] == step(result)
        ]
        for step in (_first, _last)
    )
    return text + (
        "So the theory is a first approximation of what a head does at the queries where it decides, and does not describe the others. "
        f"There is little sign of a bias to low rank: the effective rank goes from {min(first):.1f}–{max(first):.1f} to {min(last):.1f}–{max(last):.1f} of 16, "
        "and the separating matrices of smallest nuclear norm have a lower rank than the heads. One network per task is too little to say more."
    )


def _first(result: dict[str, Any]) -> int:
    return min(row["step"] for row in result["moments"])


def _last(result: dict[str, Any]) -> int:
    return max(row["step"] for row in result["moments"])


def stage(experiment: str, variant: str, name: str) -> dict[str, Any]:
    """The result of another stage, for the first seed of a variant."""
    return next(result.files[name] for result in ARCHIVE.kept(experiment) if result.variant == variant)
