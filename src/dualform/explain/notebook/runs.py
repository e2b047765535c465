"""Answers of replayed runs and surveys as people see them: influence, three answers side by side, exactness."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .hits import PLACES, QUERIES, example_table, example_tiles
from .illustrations import illustrations_of
from .markup import bars, card, table, tag, text
from .text import same_digits, seen, visible_text

if TYPE_CHECKING:
    from ..runs import Comparison, Influence, Metasmoothness, ReplayedRun, RunCheck

SHOWN = 6
"""Examples from each end."""

OF_A_RUN = ("through training", "direct")
"""Kinds of influence that are about a recorded run, with its steps."""

KINDS = {
    "through training": "Influence through training",
    "direct": "Direct contributions",
    "gradient": "Gradient similarity",
    "ekfac": "Influence by EK-FAC",
}


def influence_html(influence: "Influence", notes: Sequence[str]) -> str:
    """The examples that speak most for the target of each query, and those that speak most against it."""
    looks = illustrations_of(influence.folder)
    parts: list[Any] = []
    for query in range(min(QUERIES, len(influence))):
        if len(influence) > 1:
            parts.append(tag("div", f"query {query}", style="font-weight:600;margin-top:.5em"))
        for words, largest in (("speak for it", True), ("speak against it", False)):
            examples = list(_strongest(influence, query, largest))
            if not examples:
                continue
            parts.append(tag("div", words, style="opacity:.7;margin-top:.3em"))
            if looks is not None and looks.kind == "pictures":
                numbers = same_digits(value for _, value, _, _ in examples)
                with_numbers = [
                    (index, number, noted, more)
                    for (index, _, noted, more), number in zip(examples, numbers, strict=True)
                ]
                parts.append(example_tiles(looks, with_numbers))
            else:
                parts.append(example_table(examples, looks, "influence"))
    more = f"{len(influence) - QUERIES} more queries: see .to_pandas()." if len(influence) > QUERIES else ""
    sign = "Leaving an example out of this run changes the target by about minus its number."
    meaning = sign if influence.kind in OF_A_RUN else ""
    return card(f"{KINDS[influence.kind]} on {influence.target}", *parts, notes=(more, meaning, *notes))


def comparison_html(comparison: "Comparison") -> str:
    """Direct, predicted and retrained changes of each query, with bars."""
    columns = ("direct", "predicted", "retrained")
    tensors = [getattr(comparison, name) for name in columns]
    by_choice = [tensor if tensor.ndim > 1 else tensor[None] for tensor in tensors]
    parts: list[Any] = []
    for choice in range(len(by_choice[0])):
        if comparison.subsets and tensors[0].ndim > 1:
            parts.append(tag("div", text(comparison.subsets[choice], 200), style="font-weight:600;margin-top:.5em"))
        changes = [tensor[choice].tolist() for tensor in by_choice]
        numbers = same_digits(value for column in changes for value in column)
        pictures = bars([value for column in changes for value in column])
        queries = len(comparison.before)
        lines = []
        for query in range(queries):
            line: list[Any] = [query, f"{float(comparison.before[query]):.3f}"]
            for place in range(len(columns)):
                line += [pictures[place * queries + query], numbers[place * queries + query]]
            lines.append(line)
        heads = ["query", "before", "", "direct", "", "predicted", "", "retrained"]
        parts.append(table(heads, lines))
    changed = visible_text(" ".join(comparison.subsets), 200) if tensors[0].ndim == 1 else ""
    predicted = f"Predicted: {comparison.note}" if comparison.note else ""
    heading = " ".join(["Change of", comparison.target, *([changed] if changed else []), "(trust the last column)"])
    return card(text(heading, 400), *parts, notes=(predicted,))


def check_html(check: "RunCheck") -> str:
    """A sentence, with a mark that says it at a glance."""
    return card(f"{'✓ exact' if check.exact else '✗ differs'}: steps {check.first:,} to {check.last:,}", str(check))


def run_html(run: "ReplayedRun") -> str:
    """What can be run again; nothing is run for it."""
    manifest, rules = run.store.manifest, [rule.name for rule in run.rules]
    lines = [
        ["steps", f"{manifest.steps:,}"],
        ["visits", f"{len(run.visits):,} of {len(run.examples):,} examples"],
        ["optimisers", ", ".join(rules)],
        ["kept", "what a replay needs" if manifest.run_log else "slots; no states of the random generator"],
    ]
    ask = "run.check() says whether it comes out as recorded; run.influence(inputs), run.retrain(without=…) ask it."
    return card(f"Replayed run of {run.store.path.name}", table(["", ""], lines, left=(0, 1)), notes=(ask,))


def metasmoothness_html(smoothness: "Metasmoothness") -> str:
    """The value for each random subset as a bar, and what it means."""
    values = smoothness.per_direction.tolist()
    lines = [
        [place + 1, picture, f"{value:.2f}"]
        for place, (value, picture) in enumerate(zip(values, bars(values), strict=True))
    ]
    return card(
        f"Metasmoothness {smoothness.value:.2f}", table(["random subset", "", "value"], lines),
        notes=(str(smoothness),),
    )  # fmt: skip


def _strongest(influence: "Influence", query: int, largest: bool) -> Iterator[tuple[Any, float, dict[str, Any], str]]:
    """The examples at one end: their index, value, what was noted of them, and when they were seen."""
    values = influence.values[query]
    places = values.topk(min(SHOWN, len(values)), largest=largest).indices.tolist()
    visits = influence.visits
    indices, steps = visits[influence.index_column].to_numpy(), visits["step"].to_numpy()
    for place in places:
        value = float(values[place])
        if (value > 0) != largest:
            continue
        index = influence.index[place].item()
        rows = (indices == index).nonzero()[0]
        noted = {name: visits[name][int(rows[0])].as_py() for name in visits.column_names if name not in PLACES}
        noted = {influence.index_column: index, **noted}
        first, last = int(steps[rows].min()), int(steps[rows].max())
        yield index, value, noted, seen(len(rows), first, last) if influence.kind in OF_A_RUN else ""
