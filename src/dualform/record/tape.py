"""``dualform.record``: a ``with`` around the user's own training loop."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from torch import nn, optim

from dualform.errors import DualformError, DualformWarning, MemoryExists, MemoryLocked, QueryError
from dualform.memory import STORED, Manifest, Store, Writer, write_tensors
from dualform.rules import Rule
from dualform.types import DType, Keep

from .gradients import Follower
from .marks import Marks
from .notes import Notes
from .passes import Passes
from .plan import Plan, make_plan
from .proof import Proof
from .rest import Rest, auto_interval
from .resume import buffers, remove_memory, resume_at
from .samples import Samples
from .shelf import Shelf
from .steps import Steps

TAUGHT: Mapping[type, Rule] = {}
"""No rules but those of the library."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    path: Path
    dtype: DType
    resume: int | None
    overwrite: bool
    snapshot_every: int | None
    progress: bool


def record(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    path: str | os.PathLike,
    *,
    layers: Iterable[str] | None = None,
    dtype: DType = "float16",
    keep: Keep | Mapping[str, Keep] = "slots",
    batch_dim: int | Mapping[str, int] = 0,
    rules: Mapping[type, Rule] | None = TAUGHT,
    resume: int | None = None,
    overwrite: bool = False,
    snapshot_every: int | None = None,
    progress: bool = True,
) -> "Tape":
    """Record a training loop: ``with dualform.record(model, optimizer, "runs/mnist") as tape: …``.

    Every ``nn.Linear`` that the optimiser trains is recorded (or the named ``layers``); all else is kept as snapshots.
    Training is bit for bit what it is without recording, and nothing stays on the model or the optimiser afterwards.

    - ``dtype``: what slots are kept in: "float16" (with a power of two a row), "float32" or "float64".
    - ``keep``: "slots", "keys" (no errors: only weights α can be asked) or "nothing", for all layers or by name.
    - ``batch_dim``: the axis of a layer's input that counts examples, for all layers or by name.
    - ``rules``: how further optimisers step, ``{MyOptimizer: Rule(...)}``; ``None`` records keys and errors only.
    - ``resume``: go on with the memory at ``path`` from this step; what came after it is dropped.
    - ``overwrite``: replace a memory that is there already.
    - ``snapshot_every``: how often the rest is kept; by default as often as costs about a megabyte a step.
    """
    optimizers = [optimizer] if isinstance(optimizer, optim.Optimizer) else list(optimizer)
    if dtype not in STORED:
        raise QueryError(f"dtype={dtype!r} is not known; choose one of {list(STORED)}.")
    plan = make_plan(model, optimizers, layers=layers, keep=keep, batch_dim=batch_dim, rules=rules)
    return Tape(plan, optimizers, Options(Path(path), dtype, resume, overwrite, snapshot_every, progress))


class Tape:
    """A recording under way. Made by :func:`record`; use it as a context manager."""

    def __init__(self, plan: Plan, optimizers: Sequence[optim.Optimizer], options: Options) -> None:
        self.plan, self.optimizers, self.options = plan, optimizers, options
        self.path = options.path

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return self._marks.step

    def note(self, **columns: Any) -> None:
        """Attach columns to the visits of the batch: numbers, strings, or tensors and lists with one value an example.

        Call it before the forward pass of each batch, with the same columns every time.
        """
        self._notes.note(columns)

    def flush(self) -> None:
        """Come back when all complete steps are on disk. Call it before you save a checkpoint."""
        self._shelf.flush()

    def __enter__(self) -> "Tape":
        self._lock = self._acquire()
        try:
            manifest = self._begin()
            plan, step = self.plan, self.options.resume or 0
            self._marks = Marks(manifest.marks, step)
            self._notes = Notes(manifest.columns if manifest.shards else None)
            self._followers = {name: Follower(name, plan.parameter(name), self._marks) for name in plan.followed}
            self._passes = Passes(plan, self.options.dtype, self._followers, self._notes)
            rest = Rest(plan.rest, manifest.snapshot_every)
            samples = Samples({name: plan.tensors[name] for name in plan.explained})
            self._writer = Writer(self.path, manifest)
            proof = Proof(plan, Store(self.path), step)
            self._shelf = Shelf(plan, self._passes, self._notes, rest, self._marks, proof, self._writer)
            if step and manifest.snapshot_every > 1:
                self._shelf.keep(step, plan.rest)
            steps = Steps(plan, self._passes, self._notes, samples, self._marks, self._shelf)
            self._handles = self._passes.hook() + steps.hook(self.optimizers)
        except BaseException:
            self._lock.release()
            raise
        self._say()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._unhook()
        try:
            if kind is None:
                self._close()
            else:
                self._save_what_is_complete()
        finally:
            self._writer.stop()
            self._lock.release()

    def _acquire(self) -> FileLock:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(self.path / ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise MemoryLocked(
                f"another recording is writing to {self.path}. Wait for it to end, or choose another path."
            ) from None
        return lock

    def _begin(self) -> Manifest:
        options, plan = self.options, self.plan
        if options.resume is not None:
            return resume_at(self.path, options.resume, plan, self.optimizers, options.dtype)
        if (self.path / "manifest.json").exists() and not options.overwrite:
            steps = Store(self.path).steps
            raise MemoryExists(
                f"{self.path} already holds a memory of {steps} steps. Choose another path, go on with it "
                f"(resume={steps}) or replace it (overwrite=True)."
            )
        remove_memory(self.path)
        tensors = {name: [tensor.detach().cpu()] for name, tensor in plan.tensors.items()}
        kept = buffers(plan, self.optimizers)
        tensors |= {f"{name}#buffer": [kept[name].detach().cpu()] for name in plan.explained if name in kept}
        manifest = Manifest(
            options.dtype,
            plan.layers,
            plan.parameters,
            init=write_tensors(self.path / "init.safetensors", tensors),
            snapshot_every=options.snapshot_every or auto_interval(plan.rest),
            versions={"dualform": version("dualform"), "torch": torch.__version__},
        )
        manifest.save(self.path)
        return manifest

    def _say(self) -> None:
        if self.options.progress:
            names, dtype = [layer.name for layer in self.plan.layers], self.options.dtype
            Console(stderr=True, highlight=False).print(
                f"dualform: recording {len(names)} layers ({', '.join(names[:4])}{', …' if len(names) > 4 else ''}) to "
                f"{self.path}; a visit takes {self.plan.bytes_a_row(dtype):,} bytes in {dtype} for each row (token) "
                "that it sends through them.",
                soft_wrap=True,
            )

    def _unhook(self) -> None:
        self._passes.open = False
        for handle in self._handles:
            handle.remove()

    def _close(self) -> None:
        explained = {name: self.plan.tensors[name] for name in self.plan.explained}
        if self.step > (self.options.resume or 0):  # so that the network can be asked without its checkpoint
            self._shelf.keep(self.step, explained)
        self.flush()

    def _save_what_is_complete(self) -> None:
        try:
            self.flush()
        except DualformError as error:
            warnings.warn(f"some complete steps were not written: {error}", DualformWarning, stacklevel=3)
