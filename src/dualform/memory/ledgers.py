"""A ledger on disk: the parts of each parameter, one for each group, as they stood after a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import FileEntry
from .tensors import map_tensors, write_tensors


@dataclass(frozen=True)
class LedgerState:
    """Parts of parameters: (1 + groups, *shape) each, what is left of the beginning first."""

    column: str
    groups: tuple[Any, ...]
    visits: tuple[int, ...]
    moves: Mapping[str, int]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    first: Mapping[str, Tensor]


@dataclass(frozen=True)
class LedgerEntry:
    """A ledger as the manifest lists it: its step, column and groups, how many visits each had, and its file."""

    step: int
    column: str
    groups: tuple[Any, ...]
    visits: tuple[int, ...]
    moves: Mapping[str, int]
    name: str
    file: FileEntry


def write_ledger(folder: Path, step: int, state: LedgerState) -> LedgerEntry:
    """Write a ledger: ``<parameter>#parts`` and the optimiser's buffers of the same, ``<parameter>#buffers``."""
    name = f"ledger/{step:06d}.safetensors"
    tensors = {f"{key}#parts": [tensor] for key, tensor in state.weights.items()}
    tensors |= {f"{key}#buffers": [tensor] for key, tensor in state.buffers.items()}
    file = write_tensors(folder / name, tensors or {"#empty": [torch.empty(0)]})
    return LedgerEntry(step, state.column, state.groups, state.visits, state.moves, name, file)


def read_ledger(folder: Path, entry: LedgerEntry, first: Mapping[str, Tensor]) -> LedgerState:
    """Read a ledger."""
    tensors = map_tensors(folder / entry.name)
    return LedgerState(
        entry.column,
        entry.groups,
        entry.visits,
        entry.moves,
        {key.removesuffix("#parts"): t for key, t in tensors.items() if key.endswith("#parts")},
        {key.removesuffix("#buffers"): t for key, t in tensors.items() if key.endswith("#buffers")},
        first,
    )
