"""Answers as tables for the terminal."""

import math
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from dualform.explain import Certificate, ExampleHits, Groups, Hits, Memory
from dualform.explain.notebook import ends, plain, same_digits, visible_text

from .terminal import bar
from .words import size, unit

OURS = ("visit", "row", "step")
"""Columns that dualform writes by itself. Of these, tables of hits only show the step."""


def hits_table(hits: Hits) -> Table:
    """The top examples, visits or slots of one query, one row each."""
    rows = hits.to_show()
    noted = [name for name in hits.columns.column_names if name not in OURS]
    places = _places(hits)
    table = _table("rank", *noted, *places, right=True)
    scores = {_adds(hits.target): [hit.contribution for hit in rows], "weight α": [hit.weight for hit in rows]}
    if hits.per != "slot":
        scores = {name: values for name, values in scores.items() if not all(map(math.isnan, values))}
    for name in scores:
        table.add_column(name, justify="right")
    numbers = [same_digits(values) for values in scores.values()]
    for place, hit in enumerate(rows):
        noted_values = ["?" if hit.columns[name] is None else hit.columns[name] for name in noted]
        own = [column[place] for column in places.values()]
        texts = [Text(visible_text(value)) for value in (hit.rank + 1, *noted_values, *own)]
        table.add_row(*texts, *(column[place] for column in numbers))
    return table


def _places(hits: Hits) -> dict[str, list[Any]]:
    """Where in training the hits of a query are, by the names of the columns."""
    rows = list(hits)
    if isinstance(hits, ExampleHits):
        return {
            "visits": [hit.visits for hit in rows],
            "steps": [f"{hit.first_step} – {hit.last_step}" for hit in rows],
        }
    places = {"step": [hit.step for hit in rows]}
    if hits.per == "slot" and any(hit.position for hit in rows):  # an example with one row has no other
        places["position"] = [hit.position for hit in rows]
    return places


def groups_table(groups: Groups, query: int = 0, shown: int = 10) -> Table:
    """The totals of the groups for one query, largest first; only both ends if there are many groups."""
    values = groups.values[query].tolist()
    heading = {"contribution": _adds(groups.target), "weight": "Σα", "abs": "Σ|α|"}[groups.score]
    table = _table(groups.column, heading, right=True)
    table.add_column("", justify="left", no_wrap=True)
    largest = max(map(abs, values), default=0.0)
    chosen, texts = ends(values, shown), list(map(plain, values)) if groups.score == "abs" else same_digits(values)
    for place, group in enumerate(chosen):
        if len(chosen) < len(values) and place == shown:
            between = sum(values) - sum(values[other_group] for other_group in chosen)
            text = plain(between) if groups.score == "abs" else same_digits([between, *values])[0]
            table.add_row(f"{len(values) - len(chosen):,} others", text, style="dim")
        name = visible_text(groups.classes.named(groups.column, groups.names[group]))
        table.add_row(Text(name), texts[group], bar(values[group], largest))
    return table


def certificate_table(certificate: Certificate) -> Table:
    """How exactly the memory rebuilds each parameter, beside the rounding error of training itself."""
    table = _table("parameter", right=False)
    table.add_column("‖W − rebuilt‖ / ‖W − W₀‖", justify="right")
    table.add_column("rounding floor of training", justify="right")
    for name, error in certificate.items():
        table.add_row(name, f"{error:.1e}", f"{certificate.floor[name]:.1e}")
    for name in certificate.rest:
        table.add_row(name, "kept as snapshots, not attributed", "", style="dim")
    return table


def layers_table(memory: Memory) -> Table:
    """The recorded layers and what is kept of each."""
    table = _table("layer", right=False)
    for name in ("inputs → outputs", "slots", "kept", "rule"):
        table.add_column(name, justify="right")
    for layer in memory.store.manifest.layers:
        rule = memory.store.parameters[layer.weights[0]].rule or "none"
        names = ", ".join(module.name for module in layer.modules)
        slots = f"{memory.store.slots(layer.name):,}"
        table.add_row(names, f"{layer.d_in} → {layer.d_out}", slots, layer.keep, rule)
    return table


def columns_table(memory: Memory) -> Table:
    """The columns of the visits with their types and a few values."""
    table = _table("column", "kind", "values", right=False)
    visits = memory.visits
    for name in visits.column_names:
        values = visits[name].unique()
        examples = ", ".join(str(value.as_py()) for value in values[:6])
        many = f", … ({len(values):,} different)" if len(values) > 6 else ""
        table.add_row(name, str(visits.schema.field(name).type), examples + many)
    return table


def disk_table(memory: Memory) -> Table:
    """The number and size of the files of each kind."""
    entries = memory.store.file_sizes
    kinds: dict[str, list[int]] = {}
    for name, count in entries.items():
        kinds.setdefault(name.split("/")[0], []).append(count)
    table = _table("on disk", right=False)
    table.add_column("files", justify="right")
    table.add_column("size", justify="right")
    for kind, counts in sorted(kinds.items(), key=lambda kind_and_sizes: -sum(kind_and_sizes[1])):
        table.add_row(kind, str(len(counts)), size(sum(counts)))
    table.add_section()
    table.add_row("total", str(len(entries)), size(sum(entries.values())))
    return table


def caption(hits: Hits) -> str:
    """How a table of hits is ordered, in words."""
    return f"ordered by {unit(hits.score, hits.target)}"


def _adds(target: str) -> str:
    return f"adds to {target}"


def _table(*columns: str, right: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if right else "left")
    return table
