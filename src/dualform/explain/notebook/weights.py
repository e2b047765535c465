"""What weights are made of, as people see it: certificates, ledgers and memories."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .markup import VERMILION, bars, card, table, tag, text
from .text import plain, visible_text

if TYPE_CHECKING:
    from ..memory import Memory
    from ..weights import Certificate, Ledger

SHOWN = 40
"""The most parameters, groups or layers that are listed."""


def certificate_html(certificate: "Certificate") -> str:
    """The error of each parameter beside the rounding floor of training, then what is not explained, and marks."""
    lines = [
        [name, f"{error:.1e}", f"{certificate.floor[name]:.1e}", _against_floor(error, certificate.floor[name])]
        for name, error in list(certificate.errors.items())[:SHOWN]
    ]
    heads = ["parameter", "‖W − rebuilt‖ / ‖W − W₀‖", "rounding floor of training", ""]
    marks = [
        tag("div", f"! '{mark.name}' from step {mark.first_step:,}, {mark.times}×: ", text(mark.message, 500),
            style=f"border-left:3px solid {VERMILION};padding-left:.5em;margin:.3em 0;max-width:60em")
        for mark in certificate.marks
    ]  # fmt: skip
    rest = "" if not certificate.rest else f"Kept as snapshots, unattributed: {_listed(certificate.rest)}."
    return card(
        f"Certificate at step {certificate.step:,}", table(heads, lines, left=(0, 3)), *marks,
        notes=(_hidden(len(certificate.errors), "parameters"), rest, certificate.ending),
    )  # fmt: skip


def ledger_html(ledger: "Ledger") -> str:
    """How large the part of each group is, as a bar."""
    sizes = _sizes(ledger)[:SHOWN]
    lines = [
        [name, picture, plain(size)]
        for (name, size), picture in zip(sizes, bars([size for _, size in sizes]), strict=True)
    ]
    return card(
        _ledger_heading(ledger), table([ledger.column, "", "‖part‖"], lines, left=(0, 1)),
        notes=(_hidden(len(ledger) + 1, "parts"), NORMS),
    )  # fmt: skip


def ledger_lines(ledger: "Ledger") -> Iterator[str]:
    """The size of each group's part as lines of text."""
    yield f"{_ledger_heading(ledger)}:"
    yield from (f"  ‖{name}‖ = {plain(size)}" for name, size in _sizes(ledger)[:SHOWN])
    if hidden := _hidden(len(ledger) + 1, "parts"):
        yield hidden
    yield NORMS


NORMS = "The initial weights and all groups add up to the weights; their norms do not add up."


def memory_html(memory: "Memory") -> str:
    """What a memory holds: layers, columns and the certificate that was written."""
    store, visits = memory.store, memory.visits
    layers = [
        [", ".join(module.name for module in layer.modules), f"{layer.d_in:,} → {layer.d_out:,}",
         f"{store.slots(layer.name):,}", layer.keep, store.parameters[layer.weights[0]].rule or "none"]
        for layer in store.manifest.layers[:SHOWN]
    ]  # fmt: skip
    columns = []
    for name in visits.column_names:
        values = visits[name].unique()
        some = ", ".join(visible_text(value.as_py(), 24) for value in values[:6])
        columns.append([name, str(visits.schema.field(name).type), f"{len(values):,}", some])
    parts: list[Any] = []
    if layers:
        parts.append(table(["layer", "inputs → outputs", "slots", "kept", "rule"], layers, left=(0, 3, 4)))
    parts.append(table(["column", "kind", "different", "values"], columns, left=(0, 1, 3)))
    return card(
        f"Memory {memory.path.name}: {_read_at(memory)}", *parts,
        notes=(str(memory.path), _written_certificate(memory), _hidden(len(store.manifest.layers), "layers")),
    )  # fmt: skip


def _read_at(memory: "Memory") -> str:
    visible, passes = memory.view.visible, memory.store.manifest.survey
    if passes:
        at = "the trained weights" if len(passes) == 1 else f"{len(passes)} checkpoints"
        return f"a survey of {len(memory.visits):,} visits at {at}"
    masked = "" if visible is None else ", without those that are masked"
    return f"step {memory.step:,} of {memory.store.steps:,}, {len(memory.visits):,} visits{masked}"


def _written_certificate(memory: "Memory") -> str:
    """The certificate in a sentence, if it was written for this step; nothing is computed."""
    written = memory.store.manifest.certificate
    if written is None or written["step"] != memory.step or not written["parameters"]:
        return "" if memory.store.manifest.survey else "memory.certificate says how exact this is."
    worst = max(value["error"] for value in written["parameters"].values())
    marks = len(memory.store.manifest.marks)
    noticed = f" {marks} marks were noted while recording: see memory.certificate." if marks else ""
    return f"The weights are rebuilt to within {worst:.0e} of what training changed.{noticed}"


def _sizes(ledger: "Ledger") -> list[tuple[str, float]]:
    """The norm of each part over all parameters, the largest group first."""
    groups = [(f"{visible_text(ledger.column, 30)} {visible_text(name)}", _norm(part)) for name, part in ledger.items()]
    return [("initial weights", _norm(ledger.initial)), *sorted(groups, key=lambda group: -group[1])]


def _norm(part: Any) -> float:
    tensors: list[Tensor] = list(part.values())
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def _ledger_heading(ledger: "Ledger") -> str:
    return f"Ledger at step {ledger.step:,}: the weights as a sum over {visible_text(ledger.column)}"


def _against_floor(error: float, floor: float) -> str:
    return "" if not floor else "below the floor" if error <= floor else f"{error / floor:.1f} × the floor"


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _hidden(count: int, noun: str) -> str:
    return f"{count - SHOWN:,} more {noun} are not listed." if count > SHOWN else ""
