"""A ledger on disk: each parameter as a sum of parts, one for each group, after a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..io import FileEntry
from .safetensors_file import write_tensors


@dataclass(frozen=True)
class LedgerState:
    """Parameters as sums of parts, each (1 + groups, *shape): first what is left of the initial weights."""

    column: str
    groups: tuple[Any, ...]
    visits: tuple[int, ...]
    moves: Mapping[str, int]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    gradient_eps: Mapping[str, float] = field(default_factory=dict)
    """The machine precision of the gradients."""


@dataclass(frozen=True)
class LedgerEntry:
    """A ledger in the manifest: its step, column and groups, the number of visits of each group, and its file."""

    step: int
    column: str
    groups: tuple[Any, ...]
    visits: tuple[int, ...]
    moves: Mapping[str, int]
    name: str
    file: FileEntry
    gradient_eps: Mapping[str, float] = field(default_factory=dict)


def write_ledger(folder: Path, step: int, state: LedgerState) -> LedgerEntry:
    """Write a ledger: ``<parameter>#parts``, and the same sums for the optimiser's buffers, ``<parameter>#buffers``."""
    name = f"ledger/{step:06d}.safetensors"
    tensors = {f"{key}#parts": [tensor] for key, tensor in state.weights.items()}
    tensors |= {f"{key}#buffers": [tensor] for key, tensor in state.buffers.items()}
    file = write_tensors(folder / name, tensors or {"#empty": [torch.empty(0)]})
    return LedgerEntry(step, state.column, state.groups, state.visits, state.moves, name, file, state.gradient_eps)


def read_ledger(tensors: Mapping[str, Tensor], entry: LedgerEntry, first: Mapping[str, Tensor]) -> LedgerState:
    """A ledger from the tensors in its file; ``first`` are the initial parameters."""
    return LedgerState(
        entry.column,
        entry.groups,
        entry.visits,
        entry.moves,
        {key.removesuffix("#parts"): t for key, t in tensors.items() if key.endswith("#parts")},
        {key.removesuffix("#buffers"): t for key, t in tensors.items() if key.endswith("#buffers")},
        first,
        entry.gradient_eps,
    )


def add_parts(states: Sequence[LedgerState]) -> LedgerState:
    """The sum of the ledgers that several processes recorded in one training."""
    if len(states) == 1:
        return states[0]
    groups = tuple(dict.fromkeys(name for state in states for name in state.groups))
    place = {name: i for i, name in enumerate(groups)}
    visits = [0] * len(groups)
    for state in states:
        for name, count in zip(state.groups, state.visits, strict=True):
            visits[place[name]] += count

    def total(tensors_of: Callable[[LedgerState], Mapping[str, Tensor]], name: str) -> Tensor:
        first = tensors_of(states[0])[name]
        out = first.new_zeros(1 + len(groups), *first.shape[1:])
        for state in states:
            out[[0, *(1 + place[group] for group in state.groups)]] += tensors_of(state)[name]
        return out

    names = tuple(states[0].weights)
    return LedgerState(
        states[0].column,
        groups,
        tuple(visits),
        states[0].moves,
        {name: total(lambda state: state.weights, name) for name in names},
        {name: total(lambda state: state.buffers, name) for name in names},
        states[0].first,
        states[0].gradient_eps,
    )
