"""The log by which a training can be run again: the settings of every step, whole states, generator states."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..io import FileEntry
from .safetensors_file import write_tensors
from .tables import SETTING, columns_table, number_column, rows_of

GENERATOR = "#generator"
"""The name of the state of torch's generator in a kept state."""

NO_GRADIENT = -1.0
"""Stands for the norm of the gradients of a step in which no parameter had one."""


@dataclass(frozen=True)
class OptimizerInfo:
    """An optimiser of a recorded run: the path of its class, and the names of the parameters of each group."""

    kind: str
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Modes:
    """From ``step`` on, until the next entry: modules in evaluation mode, and parameters that take no gradient."""

    step: int
    evaluating: tuple[str, ...]
    without_gradient: tuple[str, ...]


@dataclass(frozen=True)
class StateEntry:
    """A whole state that was kept after a step, and its file."""

    step: int
    name: str
    file: FileEntry


@dataclass(frozen=True)
class RunLog:
    """What the manifest says of a run that can be run again."""

    only: bool
    """Whether nothing else was kept: no slots, no snapshots."""
    threads: int
    """The threads of torch in the recorded run."""
    optimizers: tuple[OptimizerInfo, ...]
    modes: tuple[Modes, ...] = ()
    broken: str = ""
    """Why the run cannot be run again to its end."""
    states: tuple[StateEntry, ...] = ()

    def __str__(self) -> str:
        if self.broken:
            return f"The run cannot be run again to its end: {self.broken}."
        steps = [f"{state.step:,}" for state in self.states]
        shown = ", ".join(steps if len(steps) < 7 else [*steps[:3], "…", steps[-1]])
        kept = f"whole states of {len(steps)} steps ({shown})" if steps else "no whole states on the way"
        return f"The run can be run again (memory.replay): {kept}, recorded with {self.threads} threads."

    def upto(self, step: int) -> "RunLog":
        """The log up to a step, from which recording goes on."""
        return replace(
            self,
            modes=tuple(modes for modes in self.modes if modes.step <= step),
            states=tuple(state for state in self.states if state.step <= step),
        )

    def with_states(self, added: Sequence[StateEntry], dropped: Collection[int]) -> "RunLog":
        """The log with some states more and others less."""
        return replace(self, states=tuple(state for state in (*self.states, *added) if state.step not in dropped))


@dataclass
class RunLogLines:
    """What a shard adds to the log."""

    steps: list["GroupStep"] = field(default_factory=list)
    generators: dict[int, Tensor] = field(default_factory=dict)
    """States of torch's generator before the pass whose first visit has this number."""
    states: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Whole states by step."""
    dropped: set[int] = field(default_factory=set)
    """The steps whose states are to be removed, since the budget is for others now."""
    revised: RunLog | None = None
    """The log in the manifest, if it has changed; its states are those of the manifest."""

    def bytes(self) -> int:
        """The bytes of its states."""
        return sum(t.numel() * t.element_size() for state in self.states.values() for t in state.values())


class GroupStep(NamedTuple):
    """A line of the log: one parameter group in one step."""

    step: int
    optimizer: int
    group: int
    settings: Mapping[str, float]
    gradient: float
    """The norm of a few entries of all gradients that the optimiser stepped with, or ``NO_GRADIENT``."""
    weights_checksum: int
    """Of the trained weights after the step, as :class:`WeightsChecksum` reads them."""


def run_log_table(lines: Sequence[GroupStep]) -> pa.Table:
    """The table of the log. A number that is the same in all lines takes no room to speak of."""
    names = sorted(set().union(*{id(line.settings): line.settings for line in lines}.values()))
    settings = rows_of([line.settings for line in lines], names, lambda numbers, name: numbers.get(name, np.nan))
    columns = {
        name: number_column(np.array([getattr(line, name) for line in lines], np.int64))
        for name in ("step", "optimizer", "group", "weights_checksum")
    }
    columns["gradient"] = number_column(np.array([line.gradient for line in lines], np.float64))
    return columns_table(columns | {f"{SETTING}{name}": number_column(settings[:, i]) for i, name in enumerate(names)})


def write_state(folder: Path, step: int, tensors: Mapping[str, Tensor]) -> StateEntry:
    """Write a whole state: the model's tensors by name, the optimiser's as ``<parameter>#<key>``."""
    name = f"states/{step:06d}.safetensors"
    return StateEntry(step, name, write_tensors(folder / name, {key: [tensor] for key, tensor in tensors.items()}))


def settings_of(group: Mapping[str, object]) -> dict[str, float]:
    """The settings of a parameter group that are numbers; those of a tuple are numbered from 1 (``betas1``)."""
    settings = {}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            settings[name] = float(value)
        elif isinstance(value, tuple | list):
            settings |= {f"{name}{place}": float(number) for place, number in enumerate(value, start=1)
                         if isinstance(number, int | float | Tensor)}  # fmt: skip
    return settings


def state_of(
    tensors: Mapping[str, Tensor], states: Mapping[str, Mapping[str, object]], generator: Tensor, *, copy: bool = True
) -> dict[str, Tensor]:
    """A whole state: the model's tensors, what the optimisers keep of each parameter, and the generator. Without
    ``copy`` it shows how large a state is, and changes with the next step.
    """
    state = {name: tensor.detach().to("cpu", copy=copy) for name, tensor in tensors.items()}
    for name, values in states.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                state[f"{name}#{key}"] = value.detach().to("cpu", copy=copy)
            elif isinstance(value, bool | int | float):
                state[f"{name}#{key}#number"] = torch.tensor(float(value), dtype=torch.float64)
    return state | {GENERATOR: generator.clone()}
