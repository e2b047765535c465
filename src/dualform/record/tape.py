"""``dualform.record``: a ``with`` around the user's own training loop."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from torch import nn, optim

from dualform.data import Columns
from dualform.engine import StoreView, certify
from dualform.errors import DualformError, QueryError, RecordError, warn
from dualform.progress import is_quiet
from dualform.rules import Rule
from dualform.sizes import bytes_of
from dualform.store import (
    STORED,
    Manifest,
    Recipe,
    ShardWriter,
    Store,
    load_manifest,
    lock_folder,
    rank_folder,
    require_own_folder,
)
from dualform.types import DType, Ended, Keep

from .description import make_recipe, make_recipe_of, moved_recipe
from .distributed import find_ranks
from .hooks import Interrupts, wrapped_method
from .late_layers import NOT_RECORDED, late_layers, unchanged_since_start
from .plan import RecordingPlan, RecordOptions, ReplayOptions, make_plan, plain_optimizers
from .recipe_check import require_fitting
from .recorder import Recorder
from .refusal import require_permission
from .shards import ShardLimits
from .state import create_memory, demote_again, resume_memory
from .training import Clock

TAUGHT: Mapping[type, Rule] = {}
"""No rules but those of the library."""


GRACE = 5.0
"""Seconds that the recorder waits for the disk at the end, if the user has given up waiting before."""


def record(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    path: str | os.PathLike,
    *,
    layers: Iterable[str] | None = None,
    dtype: DType = "float16",
    keep: Keep | Literal["replay"] | Mapping[str, Keep] = "slots",
    by: str | None = None,
    batch_dim: int | Mapping[str, int] | None = None,
    copies: int = 1,
    rules: Mapping[type, Rule] | None = TAUGHT,
    resume: int | None = None,
    overwrite: bool = False,
    snapshot_every: int | None = None,
    replay: bool | int | str | None = None,
    describe: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> "Tape":
    """Record a training loop: ``with dualform.record(model, optimizer, "runs/mnist") as tape: …``.

    Every ``nn.Linear`` that the optimiser trains is recorded (or the named ``layers``); all else is kept as snapshots.
    Training is bit for bit what it is without recording, and nothing stays on the model or the optimiser afterwards.

    - ``dtype``: what slots are kept in: "float16" (with a power of two a row), "float32" or "float64".
    - ``keep``: "slots", "keys" (no errors: only weights α can be asked), "ledger", "keys+ledger" or "nothing", for all
      layers or by name. A ledger holds the weights once for each value of the noted column ``by``, and no slots: its
      size does not grow with training. It is written by ``tape.flush()`` and at the end. "replay" keeps no slots at
      all, but what training needs to run again: ``memory.replay(model, losses, data)`` answers from there.
    - ``batch_dim``: the axis of a layer's input that counts examples, for all layers or by name. Where it is not given
      the first batches show how the rows of each layer follow the examples.
    - ``copies``: how many blocks of rows each noted example sends, block after block: 2 for [chosen; rejected].
    - ``rules``: how further optimisers step, ``{MyOptimizer: Rule(...)}``; ``None`` records keys and errors only.
    - ``resume``: go on with the memory at ``path`` from this step; what came after it is dropped.
    - ``overwrite``: replace a memory that is there already.
    - ``snapshot_every``: how often the rest is kept; by default as often as costs about a megabyte a step.
    - ``replay``: keep what training needs to run again beside ``keep``: settings and random numbers of every step, and
      whole states, as many as fit into a size such as "2 GB" (``True``: ten). Note the ``index`` of every example.
    - ``describe``: how the model is made and where its examples are, as a dict of the options of :meth:`Tape.describe`.
    """
    optimizers = plain_optimizers(optimizer)
    if dtype not in STORED:
        raise QueryError(f"dtype={dtype!r} is not known; choose one of {list(STORED)}.")
    if snapshot_every is not None and snapshot_every < 1:
        raise QueryError(f"snapshot_every={snapshot_every} must be 1 or more: the steps from one look to the next.")
    if copies < 1:
        raise QueryError(f"copies={copies} must be 1 or more: the blocks of rows that a note stands for.")
    kept_for_replay = _replay_options(keep, replay)
    if kept_for_replay is not None and copies > 1:
        raise QueryError(f"a run with copies={copies} cannot be run again yet. Leave out copies= or replay.")
    at = None if resume is None else int(resume)  # a checkpoint may hold it as a tensor
    if by is None and any("ledger" in value for value in ([keep] if isinstance(keep, str) else keep.values())):
        raise QueryError("keep='ledger' needs to know the groups: name a column that you note, as in by='source'.")
    replan = partial(make_plan, model, optimizers, layers=layers, keep=keep, batch_dim=batch_dim, rules=rules)
    plan = replan()
    if by is not None and not plan.in_ledger:
        raise QueryError(
            f"by={by!r} is for ledgers, and none is kept: say keep='ledger', or for one layer by its name."
        )
    averaged = isinstance(model, nn.parallel.DistributedDataParallel)
    options = RecordOptions(Path(path), dtype, at, overwrite, snapshot_every, by, copies, progress, kept_for_replay)
    recipe = make_recipe_of(options.path, describe)
    if recipe is not None:
        require_fitting(recipe, options.path, plan)
    options = replace(options, recipe=recipe)
    tape = Tape(plan, optimizers, averaged, options)
    tape.replan = replan
    return tape


def _replay_options(keep: str | Mapping[str, Keep], replay: bool | int | str | None) -> ReplayOptions | None:
    """What is kept so that training can be run again; None if nothing is."""
    only = keep == "replay"
    if replay is None or isinstance(replay, bool):
        return ReplayOptions(only, None) if only or replay else None
    return ReplayOptions(only, bytes_of("replay", replay))


class Tape:
    """A recording under way. Made by :func:`record`; use it as a context manager."""

    def __init__(
        self, plan: RecordingPlan, optimizers: Sequence[optim.Optimizer], averaged: bool, options: RecordOptions
    ) -> None:
        self.plan, self.optimizers, self.options, self._averaged = plan, optimizers, options, averaged
        self.path = options.path
        self.interrupts = Interrupts()
        self._clock = Clock(options.resume or 0)
        self._recorder: Recorder
        self._running = False
        self.steps_ahead: int | None = None
        """The number of steps to come, if a trainer knows it: then the size of the whole memory is reported."""
        self.replan: Callable[[], RecordingPlan] | None = None
        """Makes a new plan of the model and its optimisers."""
        self.limits: ShardLimits | None = None
        """When shards end, where slots do not stay on disk: what is certified from the disk is left out then."""

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return self._clock.step

    def note(self, **columns: Any) -> None:
        """Attach columns to the visits of the batch: numbers, strings, or tensors and lists with one value an example.

        Call it before the forward pass of each batch or after it, before its backward pass, with the same columns
        every time.
        """
        self._need_running()
        self.interrupts.around(self._recorder.notes.note)(columns)

    def note_instead(self, columns: Mapping[str, Any]) -> None:
        """The same for trainers, which may skip a batch: replaces a note that no forward pass has followed."""
        self._need_running()
        self.interrupts.around(self._recorder.notes.note)(columns, True)

    def describe(
        self,
        *,
        model: str | None = None,
        train: Any = None,
        test: Any = None,
        classes: str | Sequence[str] | None = None,
        tokenizer: str | os.PathLike | None = None,
        columns: Columns | str | Sequence[str] | None = None,
        index: str | None = None,
        length: int | None = None,
    ) -> None:
        """Keep in the memory how its model is made and where its examples are, so that a path is enough later:
        ``tape.describe(model="train:make_model", train="train.npz", test="test.npz", classes=["cat", "dog"])``, then
        ``dualform serve runs/mine``. It is kept as text, and replaces what was described before.

        - ``model``: ``package.module:factory``, with literal arguments in parentheses if it takes any.
        - ``train``, ``test``: examples in index order: a file, the folder of a saved data set, a factory, or what
          ``dualform.data.read`` made of a file.
        - ``classes``: their names. ``tokenizer``: the vocabulary of token ids: ``"bytes"`` or a file. ``index``: the
          noted column that holds the index of an example (``"index"``). ``length``: tokens per example of a text.
        - ``columns``: the columns of a table in order, best as ``dualform.data.read(…).columns``, which also has the
          words of categories and the mean and deviation of scaled columns. From ``train=dualform.data.read(…)`` they
          are taken by themselves.
        """
        self._need_running()
        recipe = make_recipe(
            self.path, model=model, train=train, test=test, classes=classes, tokenizer=tokenizer, columns=columns,
            index=index, length=length,
        )  # fmt: skip
        require_fitting(recipe, self.path, self.plan, self._recorder.notes.types)
        self.options = replace(self.options, recipe=recipe)
        if self._ranks.first:
            self.interrupts.around(self._recorder.shard_builder.writer.revise)({"recipe": recipe})

    def describe_like(self, memory: Path, recipe: Recipe | None) -> None:
        """Keep the recipe of another memory of the same network, before recording begins."""
        moved = None if recipe is None else moved_recipe(recipe, memory, self.path)
        self.options = replace(self.options, recipe=moved)

    def flush(self) -> None:
        """Return when all complete steps are on disk. Call it before you save a checkpoint; where several processes
        train, in all of them.
        """
        self._need_running()
        self.interrupts.around(self._recorder.shard_builder.flush)()

    def __enter__(self) -> "Tape":
        require_permission()
        with ExitStack() as undo:
            self.interrupts = interrupts = Interrupts()
            interrupts.guard(self.__enter__)
            interrupts.guard(self.__exit__)
            undo.callback(interrupts.leave)
            interrupts.watch()
            self._ranks = ranks = find_ranks(self.path, averaged=self._averaged)
            undo.callback(ranks.leave)
            if self.options.replay is not None and not ranks.alone:
                raise RecordError("replay= records one process, and this training has several. Record without replay=.")
            folder = rank_folder(self.path, ranks.rank)
            manifest = self._open_memory(folder, undo)
            writer = ShardWriter(folder, manifest)
            undo.callback(lambda: writer.stop(wait=not interrupts.gave_up))
            say = self._tell if self._speaks else None
            self._recorder = Recorder(
                self.plan, self.optimizers, self.options, ranks, manifest, writer, interrupts, self.steps_ahead, say
            )
            self._clock = self._recorder.clock
            self._recorder.shard_builder.limits = self.limits or ShardLimits()
            undo.callback(self._unhook)
            self._recorder.hook()
            for optimizer in self.optimizers:
                undo.enter_context(wrapped_method(optimizer, "add_param_group", self._add_param_group))
            self._say()
            interrupts.deliver(sys._getframe(1))  # while all of this can still be undone
            self._running = True
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            with self._undo:
                self._unhook()
                if kind is None:
                    self._close()
                else:
                    self._save_what_is_complete(kind)
                if isinstance(error, KeyboardInterrupt):
                    self._say_what_is_kept(error)
        except BaseException as failure:
            self.interrupts.end(failure, sys._getframe(1))
            raise
        self.interrupts.end(error, sys._getframe(1))

    def _say_what_is_kept(self, error: KeyboardInterrupt) -> None:
        """Below the traceback of Ctrl-C: how many steps are on disk, and how to go on with them."""
        kept = self._recorder.shard_builder.writer.manifest.steps
        if self._speaks and kept:
            error.add_note(
                f"dualform: {self.path} keeps the {kept:,} steps that were complete. Read them with "
                f"dualform.open({str(self.path)!r}), or train on from a checkpoint of step {kept} with "
                f"dualform.record(…, resume={kept})."
            )

    def _need_running(self) -> None:
        if not self._running:
            raise RecordError(
                "nothing is being recorded at this moment. Use the tape inside its with-block: "
                "with dualform.record(model, optimizer, path) as tape: …"
            )

    def _open_memory(self, folder: Path, undo: ExitStack) -> Manifest:
        """Create or resume the memory; returns the manifest of this process's part."""
        path, plan, options, ranks = self.path, self.plan, self.options, self._ranks
        with ranks.together():
            if options.resume is not None:
                plan = self.plan = demote_again(plan, load_manifest(path))  # before a folder is made
            elif ranks.first:
                require_own_folder(path)
        for is_turn in (ranks.first, not ranks.first):  # the folder of the others is in that of the first
            with ranks.together():
                if is_turn:
                    undo.callback(lock_folder(folder).release)
        begin = create_memory if options.resume is None else resume_memory
        return begin(folder, plan, self.optimizers, options, ranks)

    def _say(self) -> None:
        if self._speaks and self.plan.only_replay:
            self._tell(f"recording to {self.path} what is needed to run this training again.")
        elif self._speaks:
            names, dtype = [layer.name for layer in self.plan.layers], self.options.dtype
            layers = "1 layer" if len(names) == 1 else f"{len(names)} layers"
            size = self.plan.bytes_a_row(dtype)
            slots = f"slots take {size:,} bytes in {dtype} for each row (token) that goes once through all of them"
            self._tell(
                f"recording {layers} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''}) to "
                f"{self.path}; {slots if size else 'no slots are kept'}."
            )

    @property
    def _speaks(self) -> bool:
        return self.options.progress and self._ranks.first and not is_quiet()

    @staticmethod
    def _tell(text: str) -> None:
        Console(stderr=True, highlight=False).print(f"dualform: {text}", soft_wrap=True)

    def _add_param_group(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """An optimiser gets further parameters: record their layers from now on."""
        method(*args, **kwargs)
        try:
            grown = self.plan if self.replan is None else self.replan()
        except DualformError:
            return
        if names := late_layers(self.plan, grown):
            shard_builder, alone = self._recorder.shard_builder, self._ranks.alone and not self.plan.in_ledger
            store = Store(self.path, shard_builder.writer.manifest, self.plan.known_rules) if alone else None
            unchanged = store is not None and unchanged_since_start(store, names, self.plan.tensors)
            if unchanged and not self._recorder.backward_hooks.waiting and not shard_builder.outside.foreign():
                self._grow(grown, names)
            else:
                for name in names:
                    self._recorder.marks("joined", name, NOT_RECORDED, self.step + 1)

    def _grow(self, grown: RecordingPlan, names: Sequence[str]) -> None:
        """Record further layers: write the memory to disk, and go on as after a resume."""
        step, before = self.step, self._recorder
        shard_builder = before.shard_builder
        for name in names:
            shard_builder.keep_first(self.plan.tensors[name])
        shard_builder.keep(step, {})
        shard_builder.flush()
        grown = demote_again(grown, shard_builder.writer.manifest)
        manifest = replace(shard_builder.writer.manifest, layers=grown.layers, parameters=grown.parameters)
        self._unhook()
        if step:
            manifest.save(rank_folder(self.path, self._ranks.rank))
        self._undo.close()
        self.plan = grown
        self.options = replace(self.options, resume=step or None, overwrite=not step)
        self.__enter__()
        self._recorder.notes.batch = before.notes.batch
        self._recorder.marks.take_over(before.marks)

    def _unhook(self) -> None:
        self._running = False
        self._recorder.unhook()

    def _close(self) -> None:
        self._keep_weights()
        self._recorder.shard_builder.flush()
        with self._ranks.together():
            if self._ranks.first:
                self._certify_from_disk()
        self._recorder.shard_builder.writer.end(Ended("closed", self.step))
        self._recorder.notes.close()

    def _keep_weights(self) -> None:
        """Keep the last weights, so that the network can be queried without its checkpoint. Weights of a step that was
        broken off, and weights that were loaded since, belong to no step.
        """
        shard_builder = self._recorder.shard_builder
        plan, unfinished = shard_builder.plan, shard_builder.outside.unfinished_step.changed()
        foreign = shard_builder.outside.close(unfinished)
        explained = {name: plan.tensors[name] for name in (*plan.explained, *plan.in_ledger)}
        if plan.only_replay:
            explained = {n: t for n, t in plan.rest.items() if t in plan.owners or not isinstance(t, nn.Parameter)}
        if self.step > (self.options.resume or 0) and not unfinished:
            shard_builder.keep(self.step, explained if self._ranks.first and not foreign else {})

    def _certify_from_disk(self) -> None:
        """Certify the parameters that the live certificate could not: those whose rule needs a whole matrix at a time,
        and marked ones of which only a few entries were followed.
        """
        shard_builder = self._recorder.shard_builder
        writer, plan, foreign = shard_builder.writer, shard_builder.plan, shard_builder.outside.foreign()
        certificate = writer.manifest.certificate
        if certificate is None or foreign or self.limits is not None:
            return
        late = [name for name in plan.explained if name not in certificate["parameters"]]
        if late and self.step:
            store = Store(self.path, writer.manifest if self._ranks.alone else None, plan.known_rules)
            writer.certify(certify(store, StoreView(self.step), plan.tensors, only=late))

    def _save_what_is_complete(self, kind: type[BaseException]) -> None:
        shard_builder = self._recorder.shard_builder
        if not self._ranks.all_here():
            first = shard_builder.pending.first
            message = f"the other processes did not come to an end, so steps {first} to {self.step} were not written."
            warn(message)
            return
        if self.interrupts.gave_up and not shard_builder.writer.has_room(within=GRACE):
            written = shard_builder.writer.manifest.steps
            message = f"the disk was not waited for: of steps {written + 1} to {self.step} none is known to be written."
            warn(message)
            return
        self.interrupts.gave_up = False
        try:
            self._keep_weights()
            shard_builder.flush(live=False)
            shard_builder.writer.end(Ended("interrupted", self.step, kind.__name__))
        except DualformError as error:
            warn(f"some complete steps were not written: {error}")
