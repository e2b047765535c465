"""Resumes a memory after a crash, from the step of the user's checkpoint, if model and optimiser are at that step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn, optim

from dualform.errors import HorizonError, ResumeError
from dualform.store import (
    Manifest,
    Shard,
    Store,
    WeightsChecksum,
    entry_sample,
    entry_samples_at,
    load_manifest,
    rank_folder,
    read_manifest,
    remove_unlisted,
    truncate_shard,
    verify,
    write_tensors,
)

from ..distributed import Ranks
from ..plan import RecordingPlan, RecordOptions
from .create import states_of, written_from
from .frozen_weights import hexadecimal
from .rest_snapshots import same_bits


def resume_memory(
    folder: Path, plan: RecordingPlan, optimizers: Sequence[optim.Optimizer], options: RecordOptions, ranks: Ranks
) -> Manifest:  # fmt: skip
    """Cut a memory back to a step, after a check that model and optimiser are at that step, too. Returns the manifest
    of the part in ``folder``, where this process writes.

    Nothing is changed before all checks have passed; then the manifest is written first, so that a kill leaves the old
    memory or the new one.
    """
    path, step = options.path, options.resume
    assert step is not None
    with ranks.together():
        store = _checked(path, step, plan, optimizers, options, ranks)
    with ranks.together():
        manifest = read_manifest(folder)
        shards = [truncate_shard(folder, s, step) if s.last > step else s for s in manifest.shards if s.first <= step]
        number = 1 + max((shard.number for shard in manifest.shards), default=-1)
        rest = _rest_at(store, step, plan, number) if ranks.first else []
        cut = manifest.upto(step, [*shards, *rest])
        cut = replace(cut, recipe=options.recipe or cut.recipe)
        cut.save(folder)
        remove_unlisted(folder, cut)
    return cut


def demote_again(plan: RecordingPlan, manifest: Manifest) -> RecordingPlan:
    """The plan with those parameters in the rest that were demoted when the memory was recorded."""
    reasons = {p.name: p.reason for p in manifest.parameters if p.name in manifest.demoted}
    return plan.demote(reasons) if reasons else plan


def _checked(
    path: Path,
    step: int,
    plan: RecordingPlan,
    optimizers: Sequence[optim.Optimizer],
    options: RecordOptions,
    ranks: Ranks,
) -> Store:
    """The memory, if it is intact up to the step and model and optimisers are at that step."""
    manifest = load_manifest(path)
    _check_options(path, step, manifest, plan, options, ranks)
    store = Store(path, replace(manifest, shards=_upto(manifest, step)), plan.known_rules)
    for name, entry in store.manifest.files.items():
        if ranks.alone or (path / name).is_relative_to(rank_folder(path, ranks.rank)):
            verify(path / name, entry, content=True)
    if plan.in_ledger and step and step not in (kept := [entry.step for entry in manifest.ledgers]):
        raise ResumeError(
            f"cannot resume at step {step}: the ledger at {path} was kept at {kept}. Start from a checkpoint of one of "
            "these steps; a ledger is kept when you call tape.flush()."
        )
    _check_state(store, step, plan, optimizers)
    return store


def _check_options(
    path: Path, step: int, manifest: Manifest, plan: RecordingPlan, options: RecordOptions, ranks: Ranks
) -> None:
    if not 0 <= step <= manifest.steps:
        raise ResumeError(
            f"cannot resume at step {step}: the memory at {path} holds complete steps up to {manifest.steps}. Start "
            f"from a checkpoint of step {manifest.steps} or before; call tape.flush() before you save one."
        )
    for difference, now, recorded in (
        ("other layers", plan.layers, manifest.layers),
        ("other parameters", plan.parameters, manifest.parameters),
        ("another dtype", options.dtype, manifest.dtype),
        ("a ledger by another column", options.by, manifest.by),
        ("another snapshot_every", options.snapshot_every or manifest.snapshot_every, manifest.snapshot_every),
        ("another number of processes", ranks.world, manifest.ranks),
        ("another replay=", options.replay is not None, manifest.run_log is not None),
    ):
        if now != recorded:
            raise ResumeError(
                f"cannot resume: the memory at {path} was recorded with {difference} ({_difference(now, recorded)})."
            )


def _upto(manifest: Manifest, step: int) -> tuple[Shard, ...]:
    """The shards up to the one that contains a step: later ones may be missing or damaged."""
    end = max((shard.last for shard in manifest.shards if shard.first <= step), default=0)
    return tuple(shard for shard in manifest.shards if shard.first <= end)


def _difference(now: object, recorded: object) -> str:
    if isinstance(now, tuple) and isinstance(recorded, tuple):
        names = [getattr(v, "name", v) for v in now], [getattr(v, "name", v) for v in recorded]
        if names[0] != names[1]:
            return f"now {names[0]}, recorded {names[1]}"
        changed = [(a, b) for a, b in zip(now, recorded, strict=True) if a != b]
        return f"now {changed[0][0]}, recorded {changed[0][1]}"
    return f"now {now}, recorded {recorded}"


def _check_state(store: Store, step: int, plan: RecordingPlan, optimizers: Sequence[optim.Optimizer]) -> None:
    hint = f"Load the checkpoint of step {step} into model and optimiser first, or pass the step it was saved at."
    own = states_of(plan, optimizers)
    for name in plan.explained:
        kept, kept_state = entry_samples_at(store, name, step)
        if entry_sample([plan.tensors[name]]) != kept:
            raise ResumeError(f"the model is not the memory's own at step {step}: '{name}' differs. {hint}")
        if entry_sample(own[name].values()) != kept_state:
            raise ResumeError(
                f"the optimiser is not the memory's own at step {step}: its state of '{name}' differs. {hint}"
            )
    _check_logged_weights(store, step, plan, hint)
    ended = store.manifest.ended
    broken_off = ended is not None and ended.how == "interrupted" and step == ended.step
    for name, tensor in plan.snapshotted.items():
        if broken_off and not isinstance(tensor, nn.Parameter):
            continue  # running statistics may have seen a part of the step that was interrupted
        try:
            same = is_kept(store, name, step, tensor)
        except HorizonError:
            continue
        if not same:
            raise ResumeError(f"the model is not the memory's own at step {step}: '{name}' differs. {hint}")


def _check_logged_weights(store: Store, step: int, plan: RecordingPlan, hint: str) -> None:
    """Raise an error unless the weights have the checksum that the log of the run holds of a step."""
    if store.manifest.run_log is None or not step:
        return
    places = np.flatnonzero(store.run_log["step"].to_numpy() == step)
    now = WeightsChecksum(plan.trained).after(step)
    if len(places) and store.run_log["weights_checksum"][int(places[-1])].as_py() != now:
        raise ResumeError(f"the model is not the memory's own at step {step}: its trained weights differ. {hint}")


def is_kept(store: Store, name: str, step: int, tensor: Tensor) -> bool:
    """Whether a tensor of the rest equals what the memory keeps of it: the tensor itself, or its fingerprint."""
    if name in store.not_kept(step):
        return hexadecimal(tensor) == store.manifest.frozen[name]
    return same_bits(tensor, store.snapshot(name, step))


def _rest_at(store: Store, step: int, plan: RecordingPlan, number: int) -> list[Shard]:
    """A shard with the tensors of the rest that have changed since their last snapshot."""
    changed = {
        f"{name}@{step}": [written_from(tensor)]
        for name, tensor in plan.snapshotted.items()
        if name not in store.not_kept(step) and not same_bits(tensor, store.last_kept(name, step))
    }
    if not changed:
        return []
    file = f"snapshots/{number:06d}.safetensors"
    return [Shard(number, step, step, visits=0, slots={}, files={file: write_tensors(store.path / file, changed)})]
