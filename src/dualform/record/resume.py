"""Going on with a memory after a crash: from the step of the user's checkpoint, and only if that is what it is."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, optim

from dualform.errors import HorizonError, ResumeError
from dualform.memory import Manifest, Shard, Store, sampled_bytes, sampled_entries, samples_at
from dualform.types import DType

from .plan import Plan

PARTS = ("shards", "calls", "visits", "steps", "snapshots")


def resume_at(path: Path, step: int, plan: Plan, optimizers: Sequence[optim.Optimizer], dtype: DType) -> Manifest:
    """The memory at ``path`` cut back to ``step``, after seeing that model and optimiser stand there too."""
    store = Store(path)
    if step > store.steps or step < 0:
        raise ResumeError(
            f"cannot resume at step {step}: the memory at {path} holds complete steps up to {store.steps}. Start "
            f"from a checkpoint of step {store.steps} or before; call tape.flush() before you save one."
        )
    manifest = store.manifest
    for what, mine, theirs in (
        ("layers", plan.layers, manifest.layers),
        ("parameters", plan.parameters, manifest.parameters),
        ("dtype", dtype, manifest.dtype),
    ):
        if mine != theirs:
            raise ResumeError(
                f"cannot resume: the {what} are not those of the memory at {path} ({_difference(mine, theirs)})."
            )
    _check_state(store, step, plan, optimizers)
    cut = [_cut(store, shard, step) for shard in manifest.shards if shard.first <= step < shard.last]
    shorter = manifest.upto(step, *cut)
    shorter.save(path)
    _remove_unlisted(path, shorter)
    return shorter


def _difference(mine: object, theirs: object) -> str:
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        names = [getattr(v, "name", v) for v in mine], [getattr(v, "name", v) for v in theirs]
        if names[0] != names[1]:
            return f"now {names[0]}, recorded {names[1]}"
        changed = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
        return f"now {changed[0][0]}, recorded {changed[0][1]}"
    return f"now {mine}, recorded {theirs}"


def _check_state(store: Store, step: int, plan: Plan, optimizers: Sequence[optim.Optimizer]) -> None:
    hint = f"Load the checkpoint of step {step} into model and optimiser first, or pass the step it was saved at."
    own = buffers(plan, optimizers)
    for name in plan.explained:
        tensor = plan.tensors[name]
        entries = sampled_entries(tensor.numel())
        kept, kept_buffer = samples_at(store, name, step)
        buffer = own.get(name)
        if sampled_bytes(tensor.cpu(), entries) != kept:
            raise ResumeError(f"the model is not the memory's own at step {step}: '{name}' differs. {hint}")
        if (b"" if buffer is None else sampled_bytes(buffer.cpu(), entries)) != kept_buffer:
            raise ResumeError(
                f"the optimiser is not the memory's own at step {step}: its buffer of '{name}' differs. {hint}"
            )
    for name, tensor in plan.rest.items():
        try:
            kept_tensor = store.snapshot(name, step)
        except HorizonError:
            continue
        if not torch.equal(kept_tensor, tensor.detach().cpu()):
            raise ResumeError(f"the model is not the memory's own at step {step}: '{name}' differs. {hint}")


def buffers(plan: Plan, optimizers: Sequence[optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' own buffers (momentum) of the model's parameters, by name."""
    names = {id(tensor): name for name, tensor in plan.tensors.items()}
    out = {}
    for optimizer, rule in zip(optimizers, plan.rules, strict=True):
        for parameter, state in optimizer.state.items():
            if rule and rule.buffer and state.get(rule.buffer) is not None and id(parameter) in names:
                out[names[id(parameter)]] = state[rule.buffer]
    return out


def _cut(store: Store, shard: Shard, step: int) -> Shard:
    """The part of a shard up to a step; its files stay as they are, only the manifest counts less of them."""
    first = sum(s.visits for s in store.manifest.shards if s.number < shard.number)
    visits = store.visits.slice(first, shard.visits)
    slots = {}
    for layer in shard.slots:
        calls = store.calls(layer)
        inside = (calls.step >= shard.first) & (calls.step <= step)
        slots[layer] = int(np.sum(calls.rows[inside]))
    return replace(shard, last=step, visits=int(np.sum(visits["step"].to_numpy() <= step)), slots=slots, cut=True)


def remove_memory(path: Path) -> None:
    """Remove the files of a memory, and nothing else that lies in the folder."""
    (path / "manifest.json").unlink(missing_ok=True)
    (path / "init.safetensors").unlink(missing_ok=True)
    for part in PARTS:
        shutil.rmtree(path / part, ignore_errors=True)


def _remove_unlisted(path: Path, manifest: Manifest) -> None:
    listed = {name for shard in manifest.shards for name in shard.files}
    for part in PARTS:
        for file in (path / part).glob("*"):
            if f"{part}/{file.name}" not in listed:
                file.unlink()
