"""A new memory: the state that training begins from, and a manifest without steps."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, optim

from dualform.errors import MemoryExists
from dualform.memory import INIT, SIGN, Manifest, load_manifest, remove_memory, write_tensors
from dualform.types import DType

from .plan import Plan
from .rest import auto_interval


def begin_at(
    path: Path, plan: Plan, optimizers: Sequence[optim.Optimizer], dtype: DType, snapshot_every: int | None,
    overwrite: bool,
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
    kept = buffers(plan, optimizers)
    tensors |= {f"{name}#buffer": [kept[name].detach().cpu()] for name in plan.explained if name in kept}
    manifest = Manifest(
        dtype,
        plan.layers,
        plan.parameters,
        init=write_tensors(path / INIT, tensors),
        snapshot_every=snapshot_every or auto_interval(plan.rest),
        versions={"dualform": version("dualform"), "torch": torch.__version__},
    )
    manifest.save(path)
    return manifest


def buffers(plan: Plan, optimizers: Sequence[optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' own buffers (momentum) of the model's parameters, by name."""
    names = {id(tensor): name for name, tensor in plan.tensors.items()}
    out = {}
    for optimizer, rule in zip(optimizers, plan.rules, strict=True):
        for parameter, state in optimizer.state.items():
            if rule and rule.buffer and state.get(rule.buffer) is not None and id(parameter) in names:
                out[names[id(parameter)]] = state[rule.buffer]
    return out
