"""What runs while a loop is recorded, wired once: plan -> backward hooks -> shards -> step hooks, and the writer."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import optim

from dualform.store import Manifest, ShardWriter, Store

from .distributed import Ranks
from .hooks import Interrupts
from .optimizer_hooks import OptimizerHooks
from .plan import RecordingPlan, RecordOptions
from .rows import RowCredit
from .run_log import RunKeeper
from .run_step_hooks import RunStepHooks
from .shards import ShardBuilder, SizeReport
from .slots import BatchColumns
from .state import StateKeeper
from .step_hooks import StepHooks
from .training import BackwardHooks, Clock, LiveLedger, OutsideChanges
from .verify import LiveCertificate, Marks, follow_gradients


class Recorder:
    """The objects of one recording, from the batch to the disk. ``manifest`` is the memory as recording begins.

    - ``notes``: the batch that the loop is in, with its columns;
    - ``backward_hooks``: copy the slots of every backward pass;
    - ``step_hooks``: count steps on the ``clock`` and find out what each of them does to the parameters;
    - ``shard_builder``: collects complete steps, and hands them to the writer;
    - ``marks``: what was noticed and the memory will not explain.
    """

    def __init__(
        self,
        plan: RecordingPlan,
        optimizers: Sequence[optim.Optimizer],
        options: RecordOptions,
        ranks: Ranks,
        manifest: Manifest,
        writer: ShardWriter,
        interrupts: Interrupts,
        steps_ahead: int | None,
        say: Callable[[str], None] | None,
    ) -> None:
        step = options.resume or 0
        store = Store(options.path, manifest if ranks.alone else None, plan.known_rules)
        self.clock, self.marks = Clock(step), Marks(manifest.marks, interrupts.say)
        columns = manifest.columns if manifest.shards else None
        self.notes = BatchColumns(columns, options.copies, lambda: interrupts.interruptions)
        followers = follow_gradients(plan, ranks.alone, has_moved=step > 0)
        self.run_keeper = None
        if options.replay is not None:
            assert manifest.run_log is not None
            self.run_keeper = RunKeeper(
                plan, optimizers, self.notes, interrupts, manifest.run_log, options.replay.budget
            )
        credit = RowCredit(plan, self.marks, ranks.alone)
        kept_ledger = store.ledger_state(step, ranks.rank) if step and plan.in_ledger else None
        ledger = LiveLedger(plan, options.by, optimizers, kept_ledger, self.clock, credit, ranks)
        self.backward_hooks = BackwardHooks(
            plan, options.dtype, followers, self.notes, ledger, credit, ranks, interrupts, self.run_keeper
        )
        certificate = LiveCertificate(plan, store, step, ranks, followers)
        state = StateKeeper(
            plan, optimizers, options, store, self.marks, every=manifest.snapshot_every, first=ranks.first
        )
        outside = OutsideChanges(plan, optimizers, self.clock, self.backward_hooks, self.marks)
        self.shard_builder = ShardBuilder(
            plan,
            self.clock,
            self.marks,
            self.backward_hooks,
            state,
            outside,
            certificate,
            writer,
            store.manifest.visits,
            self.run_keeper,
        )
        sizes = SizeReport(plan, self.shard_builder, steps_ahead, say)
        self.step_hooks: OptimizerHooks
        if self.run_keeper is not None and self.run_keeper.only:
            self.step_hooks = RunStepHooks(plan, self.clock, self.marks, self.run_keeper, self.shard_builder, sizes)
        else:
            self.step_hooks = StepHooks(
                plan, self.clock, self.marks, self.backward_hooks, self.shard_builder, sizes, self.run_keeper
            )
        self._optimizers, self._outside = optimizers, outside
        self._handles: list[Any] = []

    def hook(self) -> None:
        """Put all hooks in place."""
        if self.run_keeper is None or not self.run_keeper.only:
            self._handles += self.backward_hooks.hook()
        else:
            self._handles += self.run_keeper.hook()
        if self.run_keeper is not None and not self.clock.step:
            self.run_keeper.keep_first_state(self.shard_builder.pending)
        self._handles += self.step_hooks.hook(self._optimizers)
        self._handles += self._outside.hook()

    def unhook(self) -> None:
        """Leave nothing on the model and its optimisers; may be called again."""
        self.backward_hooks.open = False
        for handle in self._handles:
            handle.remove()
