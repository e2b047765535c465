"""Going on with a memory after a crash: from the step of the user's checkpoint, and only if that is what it is."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import optim

from dualform.errors import HorizonError, ResumeError
from dualform.memory import (
    Manifest,
    Shard,
    Store,
    load_manifest,
    remove_unlisted,
    sample_of,
    samples_at,
    verify,
    write_tensors,
)
from dualform.types import DType

from .begin import states_of
from .plan import Plan
from .rest import same_bits


def resume_at(
    path: Path, step: int, plan: Plan, optimizers: Sequence[optim.Optimizer], dtype: DType, snapshot_every: int | None,
    by: str | None,
) -> Manifest:  # fmt: skip
    """The memory at ``path`` cut back to ``step``, after seeing that model and optimiser stand there too.

    Nothing is changed before all is known to be well; and then the manifest goes first, so that a kill leaves the old
    memory or the new one.
    """
    manifest = load_manifest(path)
    _check_options(path, step, manifest, plan, dtype, snapshot_every, by)
    store = Store(path, replace(manifest, shards=_upto(manifest, step)), plan.known_rules)
    for shard in store.manifest.shards:
        for name, entry in shard.files.items():
            verify(path / name, entry, content=True)
    _check_state(store, step, plan, optimizers)
    if plan.in_ledger and step and step not in (kept := [entry.step for entry in manifest.ledgers]):
        raise ResumeError(
            f"cannot resume at step {step}: the ledger at {path} was kept at {kept}. Start from a checkpoint of one of "
            "these steps; a ledger is kept when you call tape.flush()."
        )
    begun = [shard for shard in store.manifest.shards if shard.first <= step]
    shards = [_cut(store, shard, step) if shard.last > step else shard for shard in begun]
    number = 1 + max((shard.number for shard in manifest.shards), default=-1)
    shorter = manifest.upto(step, [*shards, *_rest_at(store, step, plan, number)])
    shorter.save(path)
    remove_unlisted(path, shorter)
    return shorter


def _check_options(
    path: Path, step: int, manifest: Manifest, plan: Plan, dtype: DType, snapshot_every: int | None, by: str | None
) -> None:  # fmt: skip
    if not 0 <= step <= manifest.steps:
        raise ResumeError(
            f"cannot resume at step {step}: the memory at {path} holds complete steps up to {manifest.steps}. Start "
            f"from a checkpoint of step {manifest.steps} or before; call tape.flush() before you save one."
        )
    for what, mine, theirs in (
        ("other layers", plan.layers, manifest.layers),
        ("other parameters", plan.parameters, manifest.parameters),
        ("another dtype", dtype, manifest.dtype),
        ("a ledger by another column", by, manifest.by),
        ("another snapshot_every", snapshot_every or manifest.snapshot_every, manifest.snapshot_every),
    ):
        if mine != theirs:
            raise ResumeError(
                f"cannot resume: the memory at {path} was recorded with {what} ({_difference(mine, theirs)})."
            )


def _upto(manifest: Manifest, step: int) -> tuple[Shard, ...]:
    """The shards up to the end of the one in which a step lies: what came later may be gone or broken."""
    end = max((shard.last for shard in manifest.shards if shard.first <= step), default=0)
    return tuple(shard for shard in manifest.shards if shard.first <= end)


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
    own = states_of(plan, optimizers)
    for name in plan.explained:
        kept, kept_state = samples_at(store, name, step)
        if sample_of([plan.tensors[name]]) != kept:
            raise ResumeError(f"the model is not the memory's own at step {step}: '{name}' differs. {hint}")
        if sample_of(own[name].values()) != kept_state:
            raise ResumeError(
                f"the optimiser is not the memory's own at step {step}: its state of '{name}' differs. {hint}"
            )
    for name, tensor in plan.rest.items():
        try:
            kept_tensor = store.snapshot(name, step)
        except HorizonError:
            continue
        if not same_bits(tensor, kept_tensor):
            raise ResumeError(f"the model is not the memory's own at step {step}: '{name}' differs. {hint}")


def _cut(store: Store, shard: Shard, step: int) -> Shard:
    """The part of a shard up to a step; its files stay as they are, only the manifest counts less of them."""
    calls, visits = store.lines(shard, "calls"), store.lines(shard, "visits")
    if calls is None:  # a ledger alone: what was kept whole with it belongs to a later step
        return replace(shard, last=step, files={})
    inside = calls["step"].to_numpy() <= step
    layers, rows = calls["layer"].to_numpy(zero_copy_only=False)[inside], calls["rows"].to_numpy()[inside]
    return replace(
        shard,
        last=step,
        visits=0 if visits is None else int(np.sum(visits["step"].to_numpy() <= step)),
        slots={layer: int(rows[layers == layer].sum()) for layer in shard.slots},
    )


def _rest_at(store: Store, step: int, plan: Plan, number: int) -> list[Shard]:
    """A shard that keeps the rest as it stands now, where it changed since anybody looked at it."""
    changed = {
        f"{name}@{step}": [tensor.detach().cpu()]
        for name, tensor in plan.rest.items()
        if not same_bits(tensor, store.last_kept(name, step))
    }
    if not changed:
        return []
    file = f"snapshots/{number:06d}.safetensors"
    return [Shard(number, step, step, visits=0, slots={}, files={file: write_tensors(store.path / file, changed)})]
