"""A new memory: the state that training begins from, and a manifest without steps."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

from dualform.errors import MemoryExists
from dualform.memory import INIT, SIGN, Manifest, load_manifest, remove_memory, write_tensors
from dualform.rules import Rule
from dualform.types import DType

from .plan import Plan
from .rest import auto_interval


def begin_at(
    path: Path, plan: Plan, optimizers: Sequence[optim.Optimizer], dtype: DType, snapshot_every: int | None,
    by: str | None, overwrite: bool,
) -> Manifest:  # fmt: skip
    """Write the first files of a memory, in place of one that may be overwritten."""
    if (path / "manifest.json").exists() and not overwrite:
        steps = load_manifest(path).steps
        raise MemoryExists(
            f"{path} already holds a memory of {steps} steps. Choose another path, go on with it (resume={steps}) or "
            "replace it (overwrite=True)."
        )
    remove_memory(path)
    tensors = {SIGN: [torch.empty(0)]}
    tensors |= {name: [tensor.detach().cpu()] for name, tensor in plan.tensors.items()}
    for name, states in states_of(plan, optimizers).items():
        tensors |= {f"{name}#{key}": [tensor.detach().cpu()] for key, tensor in states.items()}
    manifest = Manifest(
        dtype,
        plan.layers,
        plan.parameters,
        init=write_tensors(path / INIT, tensors),
        snapshot_every=snapshot_every or auto_interval(plan.rest),
        by=by,
        versions={"dualform": version("dualform"), "torch": torch.__version__},
    )
    manifest.save(path)
    return manifest


def states_of(plan: Plan, optimizers: Sequence[optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """What the optimisers keep of the explained parameters, by name: the buffer, and what all examples share."""
    names = {id(plan.tensors[name]): name for name in plan.explained}
    out = {}
    for optimizer, rule in zip(optimizers, plan.rules, strict=True):
        for parameter, state in optimizer.state.items():
            if rule and id(parameter) in names:
                out[names[id(parameter)]] = state_tensors(rule, state)
    return {name: out.get(name, {}) for name in plan.explained}


def state_tensors(rule: Rule, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that an optimiser keeps of a parameter, as far as its rule reads them."""
    found = {"buffer" if key == rule.buffer else key: state.get(key) for key in rule.state}
    return {key: tensor for key, tensor in found.items() if tensor is not None}
