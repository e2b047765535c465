"""Going on with a memory after a crash: from the step of the user's checkpoint, and only if that is what it is."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn, optim

from dualform.errors import HorizonError, ResumeError
from dualform.store import (
    Manifest,
    Shard,
    Store,
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
    """A memory cut back to a step, after seeing that model and optimiser stand there too: the part of it that this
    process writes to, in ``folder``.

    Nothing is changed before all is known to be well; and then the manifest goes first, so that a kill leaves the old
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
        shorter = manifest.upto(step, [*shards, *rest])
        shorter.save(folder)
        remove_unlisted(folder, shorter)
    return shorter


def demote_again(plan: RecordingPlan, manifest: Manifest) -> RecordingPlan:
    """The plan of a model with those parameters in the rest that the memory had to leave there."""
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
    """The memory, if all is well with it up to the step, and with model and optimisers at it."""
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
    for what, mine, theirs in (
        ("other layers", plan.layers, manifest.layers),
        ("other parameters", plan.parameters, manifest.parameters),
        ("another dtype", options.dtype, manifest.dtype),
        ("a ledger by another column", options.by, manifest.by),
        ("another snapshot_every", options.snapshot_every or manifest.snapshot_every, manifest.snapshot_every),
        ("another number of processes", ranks.world, manifest.ranks),
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
    ended = store.manifest.ended
    broken_off = ended is not None and ended.how == "interrupted" and step == ended.step
    for name, tensor in plan.rest.items():
        if broken_off and not isinstance(tensor, nn.Parameter):
            continue  # running statistics may have seen a part of the step that was interrupted
        try:
            same = is_kept(store, name, step, tensor)
        except HorizonError:
            continue
        if not same:
            raise ResumeError(f"the model is not the memory's own at step {step}: '{name}' differs. {hint}")


def is_kept(store: Store, name: str, step: int, tensor: Tensor) -> bool:
    """Whether a tensor of the rest is what the memory knows of it: the tensor, or its fingerprint."""
    if name in store.not_kept(step):
        return hexadecimal(tensor) == store.manifest.frozen[name]
    return same_bits(tensor, store.snapshot(name, step))


def _rest_at(store: Store, step: int, plan: RecordingPlan, number: int) -> list[Shard]:
    """A shard that keeps the rest as it stands now, where it changed since anybody looked at it."""
    changed = {
        f"{name}@{step}": [written_from(tensor)]
        for name, tensor in plan.rest.items()
        if name not in store.not_kept(step) and not same_bits(tensor, store.last_kept(name, step))
    }
    if not changed:
        return []
    file = f"snapshots/{number:06d}.safetensors"
    return [Shard(number, step, step, visits=0, slots={}, files={file: write_tensors(store.path / file, changed)})]
