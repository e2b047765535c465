"""A new memory: the state that training begins from, and a manifest without steps."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from dualform.errors import MemoryExists, WriteError
from dualform.rules import Rule
from dualform.store import INIT, SIGN, FileEntry, Manifest, load_manifest, remove_memory, write_tensors

from ..distributed import Ranks
from ..plan import RecordingPlan, RecordOptions
from .command import recording_command
from .frozen_weights import fingerprints_of_frozen
from .rest_snapshots import auto_interval
from .run_log_entry import run_log_of


def create_memory(
    folder: Path, plan: RecordingPlan, optimizers: Sequence[optim.Optimizer], options: RecordOptions, ranks: Ranks
) -> Manifest:  # fmt: skip
    """Write the first files of a memory, in place of one that may be overwritten. ``folder`` is where this process
    writes.
    """
    manifest = Manifest(
        options.dtype,
        plan.layers,
        plan.parameters,
        snapshot_every=options.snapshot_every or auto_interval(plan.snapshotted),
        by=options.by,
        frozen=fingerprints_of_frozen(plan),
        rank=ranks.rank,
        ranks=ranks.world,
        run_log=run_log_of(plan, optimizers, options),
        recipe=options.recipe,
        command=recording_command(),
        versions={"dualform": version("dualform"), "torch": torch.__version__},
    )
    with ranks.together():
        if ranks.first:
            init = _first_file(folder, plan, optimizers, options.overwrite, manifest.frozen)
            manifest = replace(manifest, init=init)
            manifest.save(folder)
    with ranks.together():
        if not ranks.first:
            if not (options.path / "manifest.json").exists():
                raise WriteError(
                    f"process {ranks.rank} does not see the memory that the first process began at {options.path}. "
                    "Choose a path on a disk that all processes share."
                )
            manifest.save(folder)
    return manifest


def _first_file(
    path: Path, plan: RecordingPlan, optimizers: Sequence[optim.Optimizer], overwrite: bool, frozen: Container[str]
) -> FileEntry:  # fmt: skip
    if (path / "manifest.json").exists() and not overwrite:
        steps = load_manifest(path).steps
        raise MemoryExists(
            f"{path} already holds a memory of {steps} steps. Choose another path, go on with it (resume={steps}) or "
            "replace it (overwrite=True)."
        )
    remove_memory(path)
    tensors = {SIGN: [torch.empty(0)]}
    tensors |= {name: [written_from(tensor)] for name, tensor in plan.tensors.items() if name not in frozen}
    for name, states in states_of(plan, optimizers).items():
        tensors |= {f"{name}#{key}": [tensor.detach().cpu()] for key, tensor in states.items()}
    return write_tensors(path / INIT, tensors)


def written_from(tensor: Tensor) -> Tensor:
    """The tensor that is passed to numpy for writing: of a buffer a copy, since numpy would prevent its owner for ever
    from resizing it (observers of quantisation do).
    """
    return tensor.detach().cpu() if isinstance(tensor, nn.Parameter) else tensor.detach().to("cpu", copy=True)


def states_of(plan: RecordingPlan, optimizers: Sequence[optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """The optimisers' state of the explained parameters, by name: the buffer, and what all examples share."""
    names = {id(plan.tensors[name]): name for name in plan.explained}
    states: dict[str, dict[str, Tensor]] = {}
    for optimizer, rule in zip(optimizers, plan.rules, strict=True):
        for parameter, state in optimizer.state.items():
            if rule and id(parameter) in names:
                states[names[id(parameter)]] = state_tensors(rule, state)
    return {name: states.get(name, {}) for name in plan.explained}


def state_tensors(rule: Rule | None, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that an optimiser keeps of a parameter, as far as its rule reads them."""
    if rule is None:
        return {}
    return {
        "buffer" if key == rule.buffer else key: tensor for key in rule.state if (tensor := state.get(key)) is not None
    }
