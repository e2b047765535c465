"""Hooks on the optimisers of a run of which no slots are kept: no more is read than what running it again needs."""

from collections.abc import Sequence

from torch import optim

from dualform.rules import Rule

from .optimizer_hooks import OptimizerHooks
from .plan import RecordingPlan
from .run_log import RunKeeper
from .shards import ShardBuilder, SizeReport
from .training import Clock
from .verify import Marks


class RunStepHooks(OptimizerHooks):
    """Logs the steps of a run. What else changes the network is compared when the run is run again."""

    def __init__(
        self,
        plan: RecordingPlan,
        clock: Clock,
        marks: Marks,
        run_keeper: RunKeeper,
        shard_builder: ShardBuilder,
        sizes: SizeReport,
    ) -> None:
        super().__init__(plan, clock, run_keeper.interrupts, shard_builder)
        self.marks, self.run_keeper, self.sizes, self.outside = marks, run_keeper, sizes, shard_builder.outside
        self._parameters: dict[int, Sequence[int]] = {}
        """The parameters that each optimiser has stepped on, all by their identities."""
        self._begun = False
        """Whether a step is under way."""

    def _stage(self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer) -> None:
        self._begun = False
        self.interrupts.watch()
        self.outside.unfinished_step.mark(self.marks, self.clock.next_step)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return  # the loss scaler tells a fused optimiser to skip this step
        self._check_parameters(rule, optimizer)
        self.run_keeper.before_step(self.clock.next_step, optimizer, ())
        self.outside.unfinished_step.begin(optimizer)
        self._begun, self.interrupts.stepping = True, optimizer

    def _check_parameters(self, rule: Rule | None, optimizer: optim.Optimizer) -> None:
        """Look at the parameters of an optimiser, if they are others than at its last step."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        identities = [id(parameter) for parameter in parameters]
        if identities == self._parameters.get(id(optimizer)):
            return
        self._parameters[id(optimizer)] = identities
        number = self.plan.rules.index(rule)
        for parameter in parameters:
            self.plan.owners.add(parameter, number)
            self.outside.check_parameter(parameter)
            self.shard_builder.keep_first(parameter)

    def _after(self, rule: Rule | None, optimizer: optim.Optimizer, args: tuple, kwargs: dict) -> None:
        begun, self._begun, self.interrupts.stepping = self._begun, False, None
        if not begun:
            return
        self.clock.stepped(optimizer, self.run_keeper.backwards, self.shard_builder.holds(self.clock.step))
        step = self.clock.step
        self.run_keeper.after_step(step, optimizer, (), self.shard_builder.pending)
        self.sizes.announce(step, self.run_keeper.announcement)
        self.shard_builder.enter(step, ())
        self.outside.unfinished_step.end()
        self.shard_builder.add(step, (), self._all_stepped or not self.run_keeper.waiting)
