"""Write docs/results/truth.md from the stored results of the runs. Every number on the page comes from one of their files.

python -m experiments.truth.page [--runs runs/truth] [--restore]
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.page import Page, missing_of, times_of
from experiments.results import DOCS, spread, table

from .figures import draw
from .results import ARCHIVE
from .scores import OURS
from .settings import EXPERIMENTS, NETWORKS, RemovalSettings

values = ARCHIVE.values
PAGE = Page(DOCS / "results" / "truth.md", "truth", ARCHIVE)
JUDGED = {name: variants for name, variants in EXPERIMENTS.items() if name not in ("wrong-labels", "flips")}
"""The experiments whose scores are judged by trainings without subsets."""
THROUGH, DIRECT = OURS
MAGIC = "MAGIC"
BARS = {"sgd": 0.95, "momentum": 0.9, "adam-gelu": 0.9}
"""What was hoped for at 2 % and 10 % on the digits."""
AVERAGED_BAR = 0.95

DISTANCE = re.compile(r"\d\.\de[-+]\d+")
"""How far the weights of another package's training are from ours, in what its script says."""

HEAD = """# What would change without it: predictions beside the truth

An example is left out, and training really done again: same first weights, same order, same random numbers. Which scores say beforehand
what comes out? Influence through training and direct contributions beside other packages and trivial scores, each judged by the same
trainings. The guide [what would have changed](../guides/what-would-have-changed.md) explains the answers; `experiments/truth` holds the code.

**LDS**: random subsets are left out (2, 10 or 50 % of the examples), and the network trained again each time. For each query the score of a
subset is the sum over what is left of it; the LDS is the rank correlation of these sums with what came out, mean over the queries.
**One run** judges scores of a network by trainings with its own first weights and order, mean ± deviation over the networks.
**Averaged** judges scores and outcomes that are averaged over all networks first; **others** judges the scores of one network by the
trainings of another one, with other first weights and another order (mean over all pairs). **Alone**: each method's 20
strongest examples of a few queries are left out one at a time; rank correlation, and how often the sign is right.
CPU seconds are of one thread and all queries, without the training itself."""


def main() -> None:
    """Collect results, draw the figures and write the page."""
    parts = [overview, *(lambda name=name: experiment(name) for name in JUDGED), wrong_labels, flips, notes,
             lambda: missing_of(ARCHIVE, EXPERIMENTS, lambda _: NETWORKS),
             lambda: times_of(ARCHIVE, EXPERIMENTS, "truth")]  # fmt: skip
    PAGE.main(HEAD, parts, draw)


# ------------------------------------------------------------------------------------------- the numbers


def methods_of(name: str, variant: str) -> list[str]:
    """All methods that have scores in the first network, ours first."""
    judged = values(name, variant, "judged", "lds")
    return list(next(iter(judged[0].values()))) if judged else []


def lds_of(name: str, variant: str, drop: str, method: str) -> list[float]:
    """The LDS of a method in each network."""
    return [part[drop][method]["mean"] for part in values(name, variant, "judged", "lds") if method in part[drop]]


def averaged(name: str, variant: str, kind: str = "lds") -> Mapping[str, Mapping[str, Any]]:
    """The LDS of averaged scores (or that for "others", networks with another seed), by drop and method."""
    kept = [part for part in values(name, variant, "averaged", kind) if part]
    return kept[-1] if kept else {}


def about_methods(name: str, variant: str) -> dict[str, list[Mapping[str, Any]]]:
    """What is known of each method: seconds, notes, versions; one entry a network."""
    about: dict[str, list[Mapping[str, Any]]] = {}
    for stage in ("ours", "trivial", "peers"):
        for methods in values(name, variant, stage, "methods"):
            for method, entry in methods.items():
                about.setdefault(method, []).append(entry)
    return about


def drops_of(name: str, variant: str) -> list[str]:
    settings = EXPERIMENTS[name][variant]
    assert isinstance(settings, RemovalSettings)
    return [f"{drop:g}" for drop in settings.drops]


def percent(drop: str) -> str:
    return f"{float(drop):.0%}".replace("%", " %")


def best_of_others(name: str, variant: str, drop: str) -> tuple[str, float]:
    """The method with the highest LDS that is neither ours nor the same quantity."""
    means = {
        method: statistics.mean(lds)
        for method in methods_of(name, variant)
        if method not in (THROUGH, MAGIC) and (lds := lds_of(name, variant, drop, method))
    }
    best = max(means, key=lambda method: means[method])
    return best, means[best]


# ------------------------------------------------------------------------------------------- parts of the page


def overview() -> str:
    """What the tables below come to."""
    rows = []
    for name, variants in JUDGED.items():
        for variant in variants:
            if not methods_of(name, variant):
                continue
            for drop in drops_of(name, variant):
                own = lds_of(name, variant, drop, THROUGH)
                best, value = best_of_others(name, variant, drop)
                magic = lds_of(name, variant, drop, MAGIC)
                gap = [abs(a - b) for a, b in zip(own, magic, strict=False)]
                rows.append([
                    f"{name}, {variant}", percent(drop), f"**{spread(own, 3)}**",
                    spread(lds_of(name, variant, drop, DIRECT), 3), f"{max(gap):.3f}" if gap else "–", f"{best} {value:.3f}",
                ])  # fmt: skip
    if not rows:
        return ""
    head = ["network", "left out", THROUGH, DIRECT, "largest difference to MAGIC", "best of all others"]
    return "\n\n".join(["## At a glance", table(head, rows), figure("lds"), verdicts()])


def verdicts() -> str:
    """Sentences that follow from the numbers."""
    sentences, ahead, behind, equal, unequal = [], [], [], [], []
    for name, variants in JUDGED.items():
        for variant in (variant for variant in variants if methods_of(name, variant)):
            for drop in drops_of(name, variant):
                place = f"{name}, {variant}, {percent(drop)}"
                own = statistics.mean(lds_of(name, variant, drop, THROUGH))
                best, value = best_of_others(name, variant, drop)
                (ahead if own > value else behind).append(place if own > value else f"{place} ({best})")
                pairs = zip(lds_of(name, variant, drop, THROUGH), lds_of(name, variant, drop, MAGIC), strict=False)
                gaps = [abs(a - b) for a, b in pairs]
                if gaps:
                    (equal if max(gaps) <= 0.01 else unequal).append(place)
    sentences.append(
        f"Influence through training is ahead of every other method but MAGIC, which is the same quantity, in {len(ahead)} "
        f"of {len(ahead) + len(behind)} rows{'; not in: ' + '; '.join(behind) if behind else ''}."
    )
    if equal or unequal:
        sentences.append(
            f"It equals MAGIC within 0.01 in every network in {len(equal)} of {len(equal) + len(unequal)} rows"
            f"{'; not in: ' + '; '.join(unequal) if unequal else ''}."
        )
    for variant, bar in BARS.items():
        if methods_of("digits", variant):
            means = {drop: statistics.mean(lds_of("digits", variant, drop, THROUGH)) for drop in ("0.02", "0.1")}
            told = ", ".join(f"{mean:.3f} at {percent(drop)}" for drop, mean in means.items())
            reached = "reached" if all(mean >= bar for mean in means.values()) else "missed"
            sentences.append(f"Digits, {variant}: {told}; a mean of {bar} at both was hoped for and is {reached}.")
    if "0.1" in averaged("digits", "sgd"):
        mean = averaged("digits", "sgd")["0.1"][THROUGH]["mean"]
        reached = "reached" if mean >= AVERAGED_BAR else "missed"
        sentences.append(
            f"Digits, sgd, averaged over {NETWORKS} networks at 10 %: {mean:.3f}; {AVERAGED_BAR} is {reached}."
        )
    return " ".join(sentences)


def experiment(name: str) -> str:
    """The tables of all variants of an experiment."""
    parts = [variant_table(name, variant) for variant in JUDGED[name]]
    return "\n\n".join([f"## {name}", *parts]) if any(parts) else ""


def variant_table(name: str, variant: str) -> str:
    """All methods of one variant."""
    methods = methods_of(name, variant)
    if not methods:
        return ""
    drops, means, about = drops_of(name, variant), averaged(name, variant), about_methods(name, variant)
    others = averaged(name, variant, "others")
    alone = values(name, variant, "alone", "methods")
    rows = []
    for method in sorted(methods, key=lambda method: -statistics.mean(lds_of(name, variant, "0.1", method))):
        seconds = [entry["cpu_seconds"] for entry in about.get(method, []) if "cpu_seconds" in entry]
        single = alone[0].get(method) if alone else None
        rows.append([
            f"**{method}**" if method == THROUGH else method,
            *(spread(lds_of(name, variant, drop, method), 3) for drop in drops),
            *(f"{means[drop][method]['mean']:.3f}" if method in means.get(drop, {}) else "–" for drop in drops),
            *(f"{others[drop][method]:.3f}" if method in others.get(drop, {}) else "–" for drop in drops),
            f"{single['correlation']:.2f}, {single['right_sign']:.0%}" if single else "–",
            f"{statistics.mean(seconds):.2f}" if seconds else "–",
        ])  # fmt: skip
    head = ["method", *(f"{percent(drop)}, one run" for drop in drops),
            *(f"{percent(drop)}, averaged" for drop in drops),
            *(f"{percent(drop)}, others" for drop in drops), "alone", "CPU s"]  # fmt: skip
    return "\n\n".join([f"### {name}, {variant}", training_setup(name, variant), table(head, rows)])


def training_setup(name: str, variant: str) -> str:
    """The training in words, and how smooth it is."""
    settings = EXPERIMENTS[name][variant]
    assert isinstance(settings, RemovalSettings)
    options = dict(settings.optimizer)
    kind = options.pop("kind")
    words = ", ".join(f"{key} {value:g}" for key, value in options.items())
    smooth = [value for part in values(name, variant, "ours", "metasmoothness") for value in part]
    plain, check = (values(name, variant, *path) for path in (("training", "plain_seconds"), ("ours", "check_seconds")))
    scale = "accuracy" if settings.data != "wikitext-2" else "accuracy of the next word"
    exact = values(name, variant, "ours", "exact")
    return (
        f"`{settings.network}` on {settings.examples:,} examples of {settings.data}, {values(name, variant, 'training', 'steps')[0]} steps "
        f"of {settings.batch}, {kind} ({words}), {scale} {spread(values(name, variant, 'training', 'accuracy'), 3)}; {settings.queries} queries, "
        f"{settings.subsets} subsets of each size, {len(exact)} networks. Plain training took {statistics.mean(plain):.2f} CPU seconds, running it again "
        f"{statistics.mean(check):.2f}; it came out bit for bit in {sum(exact)} of {len(exact)} networks. Metasmoothness {statistics.mean(smooth):.2f} "
        f"({min(smooth):.2f} to {max(smooth):.2f})."
    )


def wrong_labels() -> str:
    """The area under the ROC curve of each method."""
    rows = []
    for variant in EXPERIMENTS["wrong-labels"]:
        for method in dict.fromkeys(
            key for part in values("wrong-labels", variant, "found", "methods") for key in part
        ):
            areas = [part[method]["auc"] for part in values("wrong-labels", variant, "found", "methods")]
            rows.append((variant, method, areas))
    if not rows:
        return ""
    rows.sort(key=lambda row: (row[0], -statistics.mean(row[2])))
    text = (
        "One tenth of the training labels of the digits is another one. An example is suspicious if its scores speak against the right answers to the "
        "queries (mean over all queries); *on itself*: if the margin of its own given label would fall most without it; for the loss and the norm of "
        "the gradient, if they are large. The area under the ROC curve is the chance that a wrong label is more suspicious than a right one."
    )
    return "\n\n".join(["## Wrong labels", text, table(["network", "method", "AUC"], [[a, b, spread(c, 3)] for a, b, c in rows])])  # fmt: skip


def flips() -> str:
    """How many examples must go until a prediction is another class."""
    rows = []
    for variant in EXPERIMENTS["flips"]:
        kept = values("flips", variant, "flips", "methods")
        for method in kept[0] if kept else ():
            shares = [100 * part[method]["share"] for part in kept]
            medians = [half_of(part[method]["removed"]) for part in kept]
            rows.append(
                [method, spread(shares, 0) + " %", ", ".join(medians), sum(part[method]["trainings"] for part in kept)]
            )
    if not rows:
        return ""
    (settings,) = EXPERIMENTS["flips"].values()
    text = (
        f"The smallest number of a method's top examples without which the network (`{settings.network}`, {settings.examples:,} images of MNIST) gives "
        f"{settings.queries} test images another class, found by doubling and halving, at most {getattr(settings, 'most')}; every step of the search is a training. "  # noqa: B009
        "Median: the number that flips half of the predictions, for each network."
    )
    head = ["examples chosen by", "predictions that flip", "median", "trainings"]
    return "\n\n".join(["## How many examples flip a prediction?", text, table(head, rows), figure("flips")])


def half_of(removed: Sequence[int | None]) -> str:
    """The number that flips half of the answers."""
    counts = sorted(number for number in removed if number is not None)
    half = (len(removed) - 1) // 2
    return str(counts[half]) if len(counts) > half else "more"


def notes() -> str:
    """What the scripts of other packages said of their settings, and of what they cannot do."""
    places: dict[str, list[str]] = {}
    distances: dict[str, list[float]] = {}
    for name, variants in EXPERIMENTS.items():
        for variant in variants:
            for methods in values(name, variant, "peers", "methods"):
                for method, entry in methods.items():
                    version = f" ({entry['version']})" if "version" in entry else ""
                    line = f"**{method}**{version}: {DISTANCE.sub('…', entry.get('note', ''))}"
                    places.setdefault(line, []).append(f"{name}, {variant}")
                    distances.setdefault(line, []).extend(map(float, DISTANCE.findall(entry.get("note", ""))))
    lines = []
    for line, where in places.items():
        measured = distances[line]
        text = line.replace("…", f"at most {max(measured):.1e}") if measured else line
        lines.append(f"- {text} *In: {'; '.join(dict.fromkeys(where))}.*")
    return "\n\n".join(["## What the other packages ran with", "\n".join(lines)]) if lines else ""


def figure(name: str) -> str:
    """A figure of the page, if it was drawn."""
    captions = {"lds": "LDS of all methods at 10 %", "flips": "Share of predictions that flip"}
    return f"![{captions[name]}](../images/truth/{name}.png)" if (ARCHIVE.images / f"{name}.png").exists() else ""


if __name__ == "__main__":
    main()
