"""The run: certificate, sizes, layers and steps of the recording."""

from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from .explorer import Explorer


@dataclass(frozen=True)
class LayerLine:
    """A recorded layer."""

    name: str
    inputs: int
    outputs: int
    slots: int
    kept: str
    rule: str


@dataclass(frozen=True)
class ParameterLine:
    """How exactly a parameter is rebuilt; the numbers are None for parameters that no rule explains."""

    name: str
    error: float | None
    floor: float | None


@dataclass(frozen=True)
class RunView:
    """Everything the page shows."""

    path: str
    steps: int
    visits: int
    dtype: str
    worst: float | None
    parameters: list[ParameterLine]
    layers: list[LayerLine]
    sizes: dict[str, int]
    columns: dict[str, str]
    versions: dict[str, str]
    marks: list[str]
    rates: list[tuple[int, float]]
    """The steps at which the learning rate changes, with the new rate."""


def run(explorer: Explorer) -> RunView:
    """The facts about a recording."""
    memory, manifest = explorer.memory, explorer.memory.store.manifest
    certificate = memory.certificate
    sizes: dict[str, int] = {}
    for name, count in memory.store.file_sizes.items():
        kind = name.split("/")[0]
        sizes[kind] = sizes.get(kind, 0) + count
    visits = memory.store.visits
    return RunView(
        path=str(memory.path),
        steps=memory.step,
        visits=manifest.visits,
        dtype=manifest.dtype,
        worst=certificate.worst if len(certificate) else None,
        parameters=[ParameterLine(name, error, certificate.floor[name]) for name, error in certificate.items()]
        + [ParameterLine(name, None, None) for name in certificate.rest],
        layers=[
            LayerLine(
                ", ".join(module.name for module in layer.modules), layer.d_in, layer.d_out,
                memory.store.slots(layer.name), layer.keep, memory.store.parameters[layer.weights[0]].rule or "none",
            )
            for layer in manifest.layers
        ],
        sizes=sizes,
        columns={name: _sample_values(visits[name]) for name in visits.column_names if name not in ("visit", "row")},
        versions=dict(manifest.versions),
        marks=[f"'{mark.name}' from step {mark.first_step}, {mark.times}×: {mark.message}." for mark in manifest.marks],
        rates=_rates(explorer),
    )  # fmt: skip


def _sample_values(column: Any) -> str:
    values = column.unique()
    sample = ", ".join(str(value.as_py()) for value in values[:6])
    return sample + (f", … ({len(values):,} different)" if len(values) > 6 else "")


def _rates(explorer: Explorer) -> list[tuple[int, float]]:
    """The steps at which the learning rate of the first parameter changes, with the new rate."""
    table = explorer.memory.store.step_table
    if "opt_lr" not in table.column_names or not len(table):
        return []
    lines = table.filter(pc.field("parameter") == table["parameter"][0].as_py())
    rates: list[tuple[int, float]] = []
    for step, rate in zip(lines["step"].to_pylist(), lines["opt_lr"].to_pylist(), strict=True):
        if rate is not None and (not rates or rates[-1][1] != rate):
            rates.append((step, rate))
    return rates
