"""Answers as tables for the terminal."""

from rich import box
from rich.table import Table

from dualform.explain import Certificate, Groups, Hits, Memory

from .terminal import bar
from .words import disk_files, ends, plain, same_digits, size, unit

OURS = ("visit", "row", "step")
"""Columns that dualform writes by itself. Of these, tables of hits only show the step."""


def hits_table(hits: Hits) -> Table:
    """The top slots of one query, one row each."""
    rows = list(hits)
    noted = [name for name in hits.columns.column_names if name not in OURS]
    position = ["position"] if any(hit.position for hit in rows) else []  # an example with one row has no other
    table = _table("rank", *noted, "step", *position, right=True)
    table.add_column(_adds(hits.target), justify="right")
    table.add_column("weight α", justify="right")
    adds, alphas = same_digits(hit.contribution for hit in rows), same_digits(hit.weight for hit in rows)
    for hit, add, alpha in zip(rows, adds, alphas, strict=True):
        noted_values = ["?" if hit.columns[name] is None else hit.columns[name] for name in noted]
        place = [hit.position] if position else []
        table.add_row(*map(str, [hit.rank + 1, *noted_values, hit.step, *place]), add, alpha)
    return table


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
        name = "unknown" if groups.names[group] is None else str(groups.names[group])
        table.add_row(name, texts[group], bar(values[group], largest))
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
    entries = disk_files(memory)
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
