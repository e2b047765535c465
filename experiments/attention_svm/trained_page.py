"""The part of the page on transformers that were trained and recorded."""

from typing import Any

from experiments.results import table

from .results import ARCHIVE, found
from .settings import EXPERIMENTS, TrainedSettings
from .words import figure, number, part, percent

TASKS = {
    "fables": "a language model of characters on Aesop's fables (TransformerLM, causal)",
    "vowels": "a classifier of who speaks, on the JapaneseVowels of the UEA archive (SeriesClassifier)",
}


def trained() -> str:
    """Two transformers of today, recorded."""
    given = {name: result for name in TASKS if (result := found("trained", name)) is not None}
    if not given:
        return ""
    return part(
        "## Trained transformers",
        "**Question.** Do the heads of a transformer that is trained as people do, with AdamW, residuals, normalisation and all its layers at once, separate tokens as the theory says? None of the theory's conditions hold for them.",
        "**Run.** Two layers of four heads, width 64, trained and recorded; the weights of every moment come from the memory. At each moment the heads are looked at with the same test sequences and 256 queries of them (`svm.trajectory`): "
        "the separating matrix of what they then select, their margin efficiency and cosine, and the same for five random matrices of the same rank (means; *null*). *Best tokens*: the share of queries that select the token that lowers the loss most, by first-order scores.",
        *(trained_one(name, result) for name, result in given.items()),
        trained_reading(given),
    )


def trained_one(name: str, given: dict[str, Any]) -> str:
    """One of them: how it was trained, its heads at the end, where they are sharp, and what built them."""
    training = stage("trained", name, "training")
    first = [row for row in given["moments"] if row["step"] == 0]
    untrained = f"{min(row['cosine'] for row in first):.2f} to {max(row['cosine'] for row in first):.2f}"
    settings = EXPERIMENTS["trained"][name]
    assert isinstance(settings, TrainedSettings)
    rows, sharp, origins = [], [], []
    for row in given["last"]:
        end = next(r for r in reversed(given["moments"]) if (r["layer"], r["head"]) == (row["layer"], row["head"]))
        label = f"{row['layer'].split('.')[1]}.{row['head']}"
        rows.append([
            label, percent(row["above 0.9"]), percent(row["above 0.99"]), number(row["entropy"], 2), f"{row['smallest margin']:.1e}",
            f"{row['efficiency']:.1e}", f"{row['null efficiency']:.1e}", number(row["cosine"], 2), f"{row['range'][0]:.2f}–{row['range'][1]:.2f}",
            number(row["nuclear cosine"], 2), f"{row['rank']} / {row['separating rank']} / {row['nuclear rank']}", f"{row['gap']:.0e}", percent(end["at best"]),
        ])  # fmt: skip
        if (here := row["sharp"]) is not None:
            sharp.append([
                label, here["queries"], f"{here['efficiency']:.2f}", f"{here['null efficiency']:.3f}", number(here["cosine"], 2),
                f"{here['range'][0]:.2f}–{here['range'][1]:.2f}", number(here["median margin"], 1),
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
        f"This is {TASKS[name]}: {settings.steps:,} steps of {settings.batch}, loss {training['first_loss']:.2f} → {training['loss']:.3f} (test {training['test_loss']:.3f}, {percent(training['test_accuracy'])} % right on the {settings.asked} test sequences looked at). "
        f"Certificates of the attention's weights: at most {training['certificate_of_attention']:.0e} (float32); the memory has {training['memory_megabytes']:,} MB.",
        figure(f"trained-{name}", f"All heads of the network on {name} through training"),
        "After training (ranks: of the head, of the separating matrix in the Frobenius and in the nuclear norm):",
        table(head, rows),
        f"Before training their cosines are {untrained}.",
        part(
            f"Where a head puts more than {settings.above} on one token (random matrices: at as many queries, those in which each is sharpest):",
            table(["head", "queries", "efficiency", "null", "cosine", "null", "median margin"], sharp),
        ) if sharp else f"No head puts more than {settings.above} of its weight on one token, for any query.",
        "What built it: ⟨W, D⟩ along the separating direction D as a sum over training, exact to the residual; the examples that put most into it.",
        table(["head", "⟨W, D⟩", "first weights", "training", "examples above zero, %", "residual", *(["tokens that hold the margin up"] if "items" in given["last"][0] else []), "most"], origins),
    )  # fmt: skip


def origin_cells(row: dict[str, Any]) -> list[str]:
    """Where the direction of a head comes from."""
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
    """What can be seen of a character in a table."""
    return {" ": "␣", "\n": "⏎", "|": "\\|"}.get(text, text)


def passage(text: str) -> str:
    """A training example in a table."""
    return "".join(map(visible, text)).replace("␣", " ") if len(text) > 12 else text


def trained_reading(given: dict[str, dict[str, Any]]) -> str:
    """What may be said of both."""
    above = {name: sum(row["cosine"] > row["range"][1] for row in each["last"]) for name, each in given.items()}
    count = {name: len(each["last"]) for name, each in given.items()}
    best = max(row["efficiency"] for each in given.values() for row in each["last"])
    sharp = [row["sharp"] for each in given.values() for row in each["last"] if row["sharp"] is not None]
    told = "; ".join(f"{above[name]} of {count[name]} heads on {name}" for name in given)
    text = (
        f"**Reading.** Training moves the heads towards the separating matrices of what they select, but not far: the cosine is above that of all random matrices for {told}. "
        f"The margin is another matter: over all queries the efficiency is {best:.1e} at best, where the theory's own layer comes to 0.9 and more, and hardly differs from that of random matrices. These heads are soft; some query is always undecided, and the smallest margin is that of the most undecided one. "
    )
    if sharp:
        better = sum(row["efficiency"] > row["null efficiency"] for row in sharp)
        text += f"Where a head is sharp the picture is closer: there the efficiency is {min(row['efficiency'] for row in sharp):.2f} to {max(row['efficiency'] for row in sharp):.2f}, above the mean of random matrices at their own sharpest queries for {better} of {len(sharp)} heads. "
    first, last = (
        [row["effective rank"] for each in given.values() for row in each["moments"] if row["step"] == step(each)]
        for step in (_first, _last)
    )
    return text + (
        "So the picture is a first approximation of what a head does where it decides, and no description of the rest. "
        f"Of a bias to low rank there is little: the effective rank goes from {min(first):.1f}–{max(first):.1f} to {min(last):.1f}–{max(last):.1f} of 16, "
        "and matrices that separate with the smallest nuclear norm have a lower rank than the heads. One network of each is too little to say more."
    )


def _first(given: dict[str, Any]) -> int:
    return min(row["step"] for row in given["moments"])


def _last(given: dict[str, Any]) -> int:
    return max(row["step"] for row in given["moments"])


def stage(experiment: str, variant: str, name: str) -> dict[str, Any]:
    """What another stage of the first seed of a variant found."""
    return next(result.files[name] for result in ARCHIVE.kept(experiment) if result.variant == variant)
