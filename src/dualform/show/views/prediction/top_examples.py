"""The training examples of an answer, in the form that pages show."""

from dataclasses import dataclass
from typing import Any

from dualform.explain import ExampleHits, Hit, Hits

from ...examples import ShownExample
from ..explorer import Explorer
from ..numbers import counted

OURS = ("visit", "row", "step")
"""Columns of the visits that are said in other words."""


@dataclass(frozen=True)
class TopExample:
    """One of the top training examples, or one visit or slot of it."""

    rank: int
    index: Any
    shown: ShownExample | None
    label: Any
    label_name: str | None
    adds: float
    """What it adds, or the score that was asked for."""
    weight: float | None
    """α, where it was asked for."""
    when: str
    """When training saw it, in words."""
    columns: dict[str, Any]
    """What else was noted."""
    speaks: tuple[float, ...] = ()
    """How much of what it adds goes through each token of the input, for a text."""


def top_example(
    explorer: Explorer, hits: Hits, hit: Hit, layer: str | None, place: int | None = None, taught: bool = False,
    speaks: tuple[float, ...] = (),
) -> TopExample:  # fmt: skip
    """A hit in the form that pages show; ``place`` is the token of it that counts, ``taught`` the next one."""
    index, label = hit.columns.get(explorer.index), hit.columns.get("label")
    shown_columns = {name: value for name, value in hit.columns.items() if name not in (*OURS, explorer.index, "label")}
    value = hit.weight if hits.score == "weight" else abs(hit.weight) if hits.score == "abs" else hit.contribution
    if place is not None and hits.per != "slot":
        shown = explorer.passage(index, place, taught)
    else:
        position = getattr(hit, "position", None) if layer is not None and explorer.positions(layer) > 1 else None
        shown = explorer.trained_on(index, layer, position)
    return TopExample(
        rank=hit.rank + 1,
        index=index,
        shown=shown,
        label=label,
        label_name=label_name(explorer, label),
        adds=float(value),
        weight=float(hit.weight) if hit.weight == hit.weight else None,
        when=_when(hits, hit),
        columns=shown_columns,
        speaks=speaks,
    )


def label_name(explorer: Explorer, label: Any) -> str | None:
    """The name of a noted label; None if there is none."""
    if label is None:
        return None
    name = explorer.class_name(label) if isinstance(label, int) and label >= 0 else str(label)
    return f"label {name}" if name.isdigit() else name


def _when(hits: Hits, hit: Any) -> str:
    if isinstance(hits, ExampleHits):
        return counted(hit.visits, "visit")
    return f"step {hit.step:,}" + (f", row {hit.position}" if getattr(hit, "position", 0) else "")
