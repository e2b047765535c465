"""The run: certificate, sizes, layers and steps of the recording."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualform.explain import Certificate
from dualform.types import DType

from .charts import Chart, Curve, line_chart
from .explorer import Explorer
from .numbers import number

EXACT, CLOSE = 10.0, 1e-2
"""Errors up to so many times the rounding of training count as rounding; and the largest error that slots of few bits
may cause."""

LOSS = "loss"
"""The column whose mean over each step is drawn, if it was noted."""


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
class Badge:
    """Whether the memory can be trusted, in a word and a sentence."""

    word: str
    meaning: str
    is_good: bool


@dataclass(frozen=True)
class RunView:
    """Everything the page shows."""

    path: str
    command: str
    steps: int
    visits: int
    dtype: str
    badge: Badge
    worst: float | None
    parameters: list[ParameterLine]
    layers: list[LayerLine]
    sizes: dict[str, int]
    columns: dict[str, str]
    versions: dict[str, str]
    marks: list[str]
    losses: Chart | None
    rates: Chart | None
    rate: float | None
    """The learning rate, if it is the same at every step."""
    growth: Chart | None


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
        command=manifest.command,
        steps=memory.step,
        visits=manifest.visits,
        dtype=manifest.dtype,
        badge=badge_of(certificate, manifest.dtype),
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
        losses=_losses(visits),
        rates=_rates(explorer),
        rate=_only_rate(explorer),
        growth=_growth(explorer),
    )  # fmt: skip


def badge_of(certificate: Certificate, dtype: DType) -> Badge:
    """The badge of a memory, from its certificate."""
    if not len(certificate):
        return Badge(
            "Not checked", "Nothing in this memory is rebuilt from slots, so there is nothing to check.", False
        )
    if certificate.marks:
        times = sum(mark.times for mark in certificate.marks)
        noticed = f"While recording, something was noticed {times:,} times that the memory cannot explain: see below."
        return Badge("Marked", noticed, False)
    rebuilt = (
        f"The weights are rebuilt from the recording alone to {number(certificate.worst, 2)} of what training changed"
    )
    beyond = max(error / (certificate.floor[name] or 1e-12) for name, error in certificate.items())
    if beyond <= EXACT:
        return Badge("Exact to rounding", f"{rebuilt}, which is what the rounding of training itself amounts to.", True)
    if certificate.worst <= CLOSE:
        return Badge(f"Exact to {dtype}", f"{rebuilt}; more digits than {dtype} has were not kept.", True)
    return Badge("Approximate", f"{rebuilt}: take small numbers with care.", False)


def _sample_values(column: Any) -> str:
    values = column.unique()
    sample = ", ".join(str(value.as_py()) for value in values[:6])
    return sample + (f", … ({len(values):,} different)" if len(values) > 6 else "")


def _losses(visits: pa.Table) -> Chart | None:
    """The mean of the noted losses of each step."""
    if LOSS not in visits.column_names or not pa.types.is_floating(visits.schema.field(LOSS).type):
        return None
    means = visits.group_by("step").aggregate([(LOSS, "mean")]).sort_by("step")
    curve = Curve(
        "", means["step"].to_pylist(), [np.nan if y is None else y for y in means[f"{LOSS}_mean"].to_pylist()]
    )
    return line_chart([curve], alt="The loss over training", x_name="step", y_name="loss", zero=True)


def _rates_of_steps(explorer: Explorer) -> tuple[list[int], list[float]]:
    """The learning rate of the first parameter at every step."""
    table = explorer.memory.store.step_table
    if "opt_lr" not in table.column_names or not len(table):
        return [], []
    lines = table.filter(pc.field("parameter") == table["parameter"][0].as_py())
    pairs = zip(lines["step"].to_pylist(), lines["opt_lr"].to_pylist(), strict=True)
    known = [(step, rate) for step, rate in pairs if rate is not None]
    return [step for step, _ in known], [rate for _, rate in known]


def _rates(explorer: Explorer) -> Chart | None:
    steps, rates = _rates_of_steps(explorer)
    if len(set(rates)) < 2:
        return None
    changes = [i for i in range(len(rates)) if i in (0, len(rates) - 1) or rates[i] != rates[i - 1]]
    curve = Curve("", [steps[i] for i in changes], [rates[i] for i in changes])
    return line_chart(
        [curve], alt="The learning rate over training", x_name="step", y_name="learning rate", stairs=True
    )


def _only_rate(explorer: Explorer) -> float | None:
    rates = set(_rates_of_steps(explorer)[1])
    return rates.pop() if len(rates) == 1 else None


def _growth(explorer: Explorer) -> Chart | None:
    """The megabytes on disk after each shard."""
    manifest = explorer.memory.store.manifest
    if len(manifest.shards) < 2:
        return None
    total, steps, sizes = manifest.init.bytes, [0], [manifest.init.bytes / 1e6]
    for shard in manifest.shards:
        total += sum(file.bytes for file in shard.files.values())
        steps.append(shard.last)
        sizes.append(total / 1e6)
    curve = Curve("", steps, sizes)
    return line_chart([curve], alt="The size of the memory over training", x_name="step", y_name="MB", zero=True)
