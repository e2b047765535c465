"""``dualform.record``: a ``with`` around the user's own training loop."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn, optim

from dualform.attend import View, certify
from dualform.errors import DualformError, DualformWarning, QueryError, RecordError
from dualform.memory import STORED, Manifest, Store, Writer, claim, load_manifest, part_of, refuse_foreign
from dualform.rules import Rule
from dualform.types import DType, Keep

from .around import around
from .begin import begin_at, states_of
from .book import Book, states_by_name
from .frozen import Frozen
from .gradients import Follower
from .joining import NOT_RECORDED, are_as_at_first, joining
from .marks import Marks
from .notes import Notes
from .options import Options
from .outside import Outside
from .passes import Passes
from .plan import Plan, make_plan
from .proof import Proof
from .ranks import find_ranks
from .rest import Rest
from .resume import resume_at
from .samples import Samples
from .shelf import Shelf
from .sizes import Sizes
from .stations import Stations
from .steps import Steps
from .unwrap import plain_optimizers

TAUGHT: Mapping[type, Rule] = {}
"""No rules but those of the library."""


def record(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    path: str | os.PathLike,
    *,
    layers: Iterable[str] | None = None,
    dtype: DType = "float16",
    keep: Keep | Mapping[str, Keep] = "slots",
    by: str | None = None,
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
    - ``keep``: "slots", "keys" (no errors: only weights α can be asked), "ledger", "keys+ledger" or "nothing", for all
      layers or by name. A ledger holds the weights once for each value of the noted column ``by``, and no slots: its
      size does not grow with training. It is written by ``tape.flush()`` and at the end.
    - ``batch_dim``: the axis of a layer's input that counts examples, for all layers or by name.
    - ``rules``: how further optimisers step, ``{MyOptimizer: Rule(...)}``; ``None`` records keys and errors only.
    - ``resume``: go on with the memory at ``path`` from this step; what came after it is dropped.
    - ``overwrite``: replace a memory that is there already.
    - ``snapshot_every``: how often the rest is kept; by default as often as costs about a megabyte a step.
    """
    optimizers = plain_optimizers(optimizer)
    if dtype not in STORED:
        raise QueryError(f"dtype={dtype!r} is not known; choose one of {list(STORED)}.")
    if snapshot_every is not None and snapshot_every < 1:
        raise QueryError(f"snapshot_every={snapshot_every} must be 1 or more: the steps from one look to the next.")
    at = None if resume is None else int(resume)  # a checkpoint may hold it as a tensor
    if by is None and any("ledger" in each for each in ([keep] if isinstance(keep, str) else keep.values())):
        raise QueryError("keep='ledger' needs to know the groups: name a column that you note, as in by='source'.")
    replan = partial(make_plan, model, optimizers, layers=layers, keep=keep, batch_dim=batch_dim, rules=rules)
    plan = replan()
    if by is not None and not plan.in_ledger:
        raise QueryError(
            f"by={by!r} is for ledgers, and none is kept: say keep='ledger', or for one layer by its name."
        )
    averaged = isinstance(model, nn.parallel.DistributedDataParallel)
    tape = Tape(plan, optimizers, averaged, Options(Path(path), dtype, at, overwrite, snapshot_every, by, progress))
    tape.replan = replan
    return tape


class Tape:
    """A recording under way. Made by :func:`record`; use it as a context manager."""

    def __init__(self, plan: Plan, optimizers: Sequence[optim.Optimizer], averaged: bool, options: Options) -> None:
        self.plan, self.optimizers, self.options, self._averaged = plan, optimizers, options, averaged
        self.path = options.path
        self._marks = Marks((), options.resume or 0)
        self._handles: list[Any] = []
        self._running = False
        self.steps_ahead: int | None = None
        """How many steps are to be recorded, where a trainer knows: then the size of the whole memory is told."""
        self.replan: Callable[[], Plan] | None = None
        """Looks at the model and its optimisers again."""

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return self._marks.step

    def note(self, **columns: Any) -> None:
        """Attach columns to the visits of the batch: numbers, strings, or tensors and lists with one value an example.

        Call it before the forward pass of each batch, with the same columns every time.
        """
        self._need_running()
        self._notes.note(columns)

    def flush(self) -> None:
        """Come back when all complete steps are on disk. Call it before you save a checkpoint; where several processes
        train, in all of them.
        """
        self._need_running()
        self._shelf.flush()

    def __enter__(self) -> "Tape":
        with ExitStack() as undo:
            self._ranks = ranks = find_ranks(self.path, averaged=self._averaged)
            undo.callback(ranks.leave)
            folder = part_of(self.path, ranks.rank)
            manifest = self._begin(folder, undo)
            plan, step = self.plan, self.options.resume or 0
            self._marks = Marks(manifest.marks, step)
            self._notes = Notes(manifest.columns if manifest.shards else None)
            followers = {name: Follower(name, plan.parameter(name), ranks.alone) for name in plan.followed}
            store = Store(self.path, manifest if ranks.alone else None, plan.known_rules)
            kept = store.ledger_state(step, ranks.rank) if step and plan.in_ledger else None
            book = Book(plan, self.options.by, states_by_name(plan, self.optimizers), kept, ranks)
            self._passes = Passes(plan, self.options.dtype, followers, self._notes, book, ranks)
            rest = Rest(plan.rest if ranks.first else {}, manifest.snapshot_every)
            samples = Samples({name: plan.tensors[name] for name in plan.explained if ranks.first})
            proof = Proof(plan, store, step, ranks)
            writer = Writer(folder, manifest)
            undo.callback(writer.stop)
            stations = Stations(plan, partial(states_of, plan, self.optimizers) if ranks.first else None)
            visits = store.manifest.visits
            outside = Outside(plan, self.optimizers, self._passes, self._marks)
            self._shelf = Shelf(
                plan,
                self._passes,
                self._notes,
                rest,
                stations,
                self._marks,
                proof,
                writer,
                visits,
                outside,
                Frozen(plan, store, step, self._marks),
            )
            self.sizes = Sizes(plan, self._shelf, self.steps_ahead, self._tell if self._speaks else None)
            steps = Steps(plan, self._passes, self._notes, samples, self._marks, self._shelf, self.sizes)
            undo.callback(self._unhook)
            self._handles += self._passes.hook()
            self._handles += steps.hook(self.optimizers)
            self._handles += outside.hook()
            for optimizer in self.optimizers:
                undo.enter_context(around(optimizer, "add_param_group", self._add_param_group))
            self._say()
            self._running = True
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with self._undo:
            self._unhook()
            if kind is None:
                self._close()
            else:
                self._save_what_is_complete()

    def _need_running(self) -> None:
        if not self._running:
            raise RecordError(
                "nothing is being recorded at this moment. Use the tape inside its with-block: "
                "with dualform.record(model, optimizer, path) as tape: …"
            )

    def _begin(self, folder: Path, undo: ExitStack) -> Manifest:
        """A new memory or an old one, with this process's part of it."""
        path, plan, about, ranks = self.path, self.plan, self.options, self._ranks
        with ranks.together():
            if about.resume is not None:
                load_manifest(path)  # before a folder is made
            elif ranks.first:
                refuse_foreign(path)
        for here in (ranks.first, not ranks.first):  # the folder of the others is in that of the first
            with ranks.together():
                if here:
                    undo.callback(claim(folder).release)
        begin = begin_at if about.resume is None else resume_at
        return begin(folder, plan, self.optimizers, about, ranks)

    def _say(self) -> None:
        if self._speaks:
            names, dtype = [layer.name for layer in self.plan.layers], self.options.dtype
            self._tell(
                f"recording {len(names)} layers ({', '.join(names[:4])}{', …' if len(names) > 4 else ''}) to "
                f"{self.path}; slots take {self.plan.bytes_a_row(dtype):,} bytes in {dtype} for each row (token) that "
                "goes once through all of them."
            )

    @property
    def _speaks(self) -> bool:
        return self.options.progress and self._ranks.first

    @staticmethod
    def _tell(text: str) -> None:
        Console(stderr=True, highlight=False).print(f"dualform: {text}", soft_wrap=True)

    def _add_param_group(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """An optimiser gets further parameters: record the layers that join with them."""
        method(*args, **kwargs)
        try:
            grown = self.plan if self.replan is None else self.replan()
        except DualformError:
            return
        if names := joining(self.plan, grown):
            shelf, alone = self._shelf, self._ranks.alone and not self.plan.in_ledger
            store = Store(self.path, shelf.writer.manifest, self.plan.known_rules) if alone else None
            whole = store is not None and are_as_at_first(store, names, self.plan.tensors)
            if whole and not self._passes.waiting and not shelf.outside.foreign():
                self._grow(grown, names)
            else:
                for name in names:
                    self._marks("joined", name, NOT_RECORDED, self.step + 1)

    def _grow(self, grown: Plan, names: Sequence[str]) -> None:
        """Go on with more layers, from what is on disk by now."""
        step, notes, marks = self.step, self._notes, self._marks
        for name in names:
            self._shelf.keep_first(self.plan.tensors[name])
        self._shelf.keep(step, {})
        self._shelf.flush()
        manifest = replace(self._shelf.writer.manifest, layers=grown.layers, parameters=grown.parameters)
        self._unhook()
        self._handles = []
        if step:
            manifest.save(part_of(self.path, self._ranks.rank))
        self._undo.close()
        self.plan = grown
        self.options = replace(self.options, resume=step or None, overwrite=not step)
        self.__enter__()
        self._notes.batch, self._marks = notes.batch, self._marks.take_over(marks)

    def _unhook(self) -> None:
        self._running = self._passes.open = False
        for handle in self._handles:
            handle.remove()

    def _close(self) -> None:
        explained = {name: self.plan.tensors[name] for name in (*self.plan.explained, *self.plan.in_ledger)}
        own = self._ranks.first and not self._shelf.outside.close()
        if self.step > (self.options.resume or 0):  # so that the network can be asked without its checkpoint
            self._shelf.keep(self.step, explained if own else {})
        self._shelf.flush()
        with self._ranks.together():
            if self._ranks.first:
                self._check_the_others()

    def _check_the_others(self) -> None:
        """Rules that need a whole matrix at a time could not be followed: their certificate is made now."""
        writer = self._shelf.writer
        late = [name for name in self.plan.explained if name not in self._shelf.proof.proofs]
        if late and self.step and not self._shelf.outside.foreign():
            store = Store(self.path, writer.manifest if self._ranks.alone else None, self.plan.known_rules)
            writer.certify(certify(store, View(self.step), self.plan.tensors, only=late))

    def _save_what_is_complete(self) -> None:
        if not self._ranks.all_here():
            first = self._shelf.pending.first
            message = f"the other processes did not come to an end, so steps {first} to {self.step} were not written."
            warnings.warn(message, DualformWarning, stacklevel=3)
            return
        try:
            self._shelf.flush()
        except DualformError as error:
            warnings.warn(f"some complete steps were not written: {error}", DualformWarning, stacklevel=3)
