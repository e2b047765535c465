"""Collects complete steps into shards of some megabytes, or of a minute, and hands them to the writer.

Slots lie in one of two arenas: one is filled while the other is written to disk.

A digest or a hand-over that raises an error can be called again: it first computes all that it needs, and changes the
state last. If an error comes in the middle of that change, the builder accepts no further steps and says why.
"""

import queue
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dualform.engine import Agreement
from dualform.errors import NonFiniteGradient, RecordError
from dualform.store import CallRow, PendingShard, ShardWriter, SlotArena, all_finite, slot_file_bytes

from ..plan import RecordingPlan
from ..run_log import RunKeeper
from ..slots import SHARD_BYTES, CallSlots, RowRun
from ..state import StateKeeper
from ..training import (
    BackwardHooks,
    Clock,
    NewBatch,
    OutsideChanges,
    ParameterUpdate,
    factors_of,
    line_of,
    new_batches,
    scales_of,
)
from ..verify import (
    NO_PRODUCT,
    GradientFactors,
    GradientFollower,
    LiveCertificate,
    Marks,
    ProbedSlots,
    StepLine,
    UsedSlots,
    audit,
    not_products,
    probed,
)
from .exchange import Exchange, RankReport, summarize_pass

SHARD_SECONDS = 60.0
"""The longest time that a shard takes to fill."""

DIGEST_STEPS = 128
"""Waiting steps are digested after so many, if their shard is not full before."""

WITHOUT_SLOTS = (
    "it has a gradient, but no recorded call of its layer made it (functional use of the weight, or a gradient left "
    "over from before?): the memory misses this part"
)

CHOICE_LASTS = 8
"""Digests after which other entries of the gradients are watched."""


@dataclass(frozen=True)
class ShardLimits:
    """When shards end, for a recording whose slots are removed again."""

    size: int = sys.maxsize
    """Shards end after so many bytes, if not before."""
    ends: Collection[int] | None = None
    """The steps after which shards end, where they are prescribed: neither size nor time counts then."""
    before_writing: Callable[[int], None] | None = None
    """Is called with the bytes of the slots of a shard when no shard is being written, before this one is."""


class DigestedSteps(NamedTuple):
    """Some steps as rows of the memory's tables, and what the certificate needs of them: the slots that they used up,
    and the probes of what these slots put into the gradients.
    """

    lines: list[StepLine]
    used: list[UsedSlots]
    sums: Mapping[tuple[int, str], Tensor]
    calls: list[CallRow]
    visits: list[Mapping[str, Any]]


class ShardBuilder:
    """Takes complete steps and hands them to the writer, shard by shard."""

    def __init__(
        self,
        plan: RecordingPlan,
        clock: Clock,
        marks: Marks,
        backward_hooks: BackwardHooks,
        state: StateKeeper,
        outside: OutsideChanges,
        certificate: LiveCertificate,
        writer: ShardWriter,
        visits: int,
        run_keeper: RunKeeper | None = None,
    ) -> None:
        self.run_keeper = run_keeper
        self.plan, self.clock, self.marks, self.backward_hooks, self.writer = plan, clock, marks, backward_hooks, writer
        self.state, self.outside, self.certificate = state, outside, certificate
        self.notes, self.ranks, self.interrupts = backward_hooks.notes, backward_hooks.ranks, backward_hooks.interrupts
        self.visit = visits
        self._next_exchange, self._full = clock.next_step, False
        self._arenas: queue.SimpleQueue[SlotArena] = queue.SimpleQueue()
        self._arenas.put(SlotArena())
        self._number = max((shard.number for shard in writer.manifest.shards), default=-1)
        self._digests = 0
        self._failure: RecordError | None = None
        self.limits = ShardLimits()
        self._begin_shard(SlotArena())

    def holds(self, step: int) -> bool:
        """Whether a step waits here, so that another optimiser can still take its part in it."""
        return bool(self._steps) and self._steps[-1][0] == step

    def enter(self, step: int, updates: Sequence[ParameterUpdate]) -> None:
        """Accept a step, or another optimiser's part of the last one."""
        if self.holds(step):
            self._steps[-1] = step, [*self._steps[-1][1], *updates]
        else:
            self._steps.append((step, updates))
        self.pending.last = step

    @contextmanager
    def refused_after_errors(self, name: str) -> Iterator[None]:
        """After an error inside the ``with`` nothing more is written: the state may be half changed."""
        try:
            yield
        except BaseException as error:
            self._failure = RecordError(
                f"{name} could not be brought up to step {self.clock.step} ({type(error).__name__}: {error}). The "
                f"memory stands at step {self.pending.first - 1}. Resume from a checkpoint of that step or before."
            )
            raise

    def add(self, step: int, updates: Sequence[ParameterUpdate], all_joined: bool = True) -> None:
        """Process a step that was entered, and hand over a full shard. While gradients wait for further optimisers
        (not ``all_joined``), there is no hurry.
        """
        for update in updates:
            for gradient_pass in update.passes:
                for slots in gradient_pass.slots:
                    if slots.layer.in_ledger and not slots.batch.done:
                        size = self.backward_hooks.credit.size_of(slots)
                        self.backward_hooks.ledger.count(slots.batch.columns, size)
                    slots.batch.done = True
        self.state.rest.stand()
        if self.state.rest.due(step) and not self.plan.ledger_only:
            self.pending.keep(self.state.changed(step))
        if not self.ranks.alone:
            self._exchange_if_due(step if all_joined else step - DIGEST_STEPS)
            return
        patience = 1 if all_joined else 2
        if len(self._steps) >= patience * DIGEST_STEPS:
            self._digest()
        if self._ends_shard(step, patience) and not self.plan.ledger_only:
            self.hand_over()

    def _ends_shard(self, step: int, patience: int) -> bool:
        if self.limits.ends is not None:
            return step in self.limits.ends and patience == 1
        size, seconds = self.backward_hooks.bytes + self.pending.kept, time.monotonic() - self._since
        return size >= patience * min(SHARD_BYTES, self.limits.size) or seconds > patience * SHARD_SECONDS

    def _exchange_if_due(self, step: int) -> None:
        """Exchange reports with the other processes before a shard is full in any of them."""
        if step >= self._next_exchange:
            self._digest()
            if self._full and not self.plan.ledger_only:
                self.hand_over()

    def stands_at(self) -> int:
        """The last step of the memory if recording ended now: that before the shard, if weights are not finite."""
        return self.pending.first - 1 if self._not_finite() else self.clock.step

    def keep(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies of whole tensors, as they are after a step."""
        self.pending.keep({f"{name}@{step}": t.detach().to("cpu", copy=True) for name, t in tensors.items()})
        if not self.pending.last:
            self.pending.first = self.pending.last = step

    def keep_first(self, parameter: Tensor) -> None:
        """Keep the first value of a parameter without slots, if it is not kept yet, before an optimiser changes it."""
        if first := self.state.frozen.first_value(parameter, self.clock.next_step):
            self.pending.keep(first)

    def hand_over(self) -> None:
        """Give the complete steps to the writer; waits while the disk is behind."""
        shard = self._complete_shard()
        if shard is not None:
            self._send(shard)

    def _complete_shard(self, ledger: bool = False, live: bool = True) -> PendingShard | None:
        """The shard with everything that belongs to it; None if there are no steps. It contains the ``ledger`` where
        the user wants to be able to resume from here. If a step was broken off, tensors are not ``live``: they are kept
        as they were before that step.
        """
        shard = self.pending
        if self._failure:
            raise self._failure
        if not shard.last:
            return None
        self.outside.unfinished_step.mark(self.marks, self.clock.next_step)
        unfinished = self.outside.unfinished_step.changed()
        self._require_finite(shard)
        self._digest()
        shard.slots = {
            layer: [run.rows(begin, end) for run, begin, end in stretches]
            for layer, stretches in self._stretches.items()
        }
        if ledger and self.plan.in_ledger:
            shard.ledger = self.backward_hooks.ledger.state()
        # these parameters are not those of the last step
        foreign = self.outside.foreign().union(unfinished)
        if self.plan.ledger_only:
            shard.replaces = True
            shard.keep(self.state.rest.all(shard.last, live))
        elif not (foreign and self.state.rest.due(shard.last)):  # else the rest was read before that step
            shard.keep(self.state.changed(shard.last, live))
        if not foreign:
            shard.keep(self.state.checkpoints.due(shard.last, self.backward_hooks.bytes))
        if not unfinished:
            certified = self._certified() | self.backward_hooks.ledger.certificate()
            shard.certificate = self.outside.certificate(certified, foreign)
        shard.marks, shard.columns = self.marks.all(), self.notes.types or {}
        return shard

    def _certified(self) -> dict[str, Agreement]:
        """The certificate, without marked parameters of which only a few entries are followed: what was marked may have
        changed the other entries.
        """
        marked = {mark.name for mark in self.marks.all()}
        certificate = self.certificate.agreements(self.plan.tensors)
        return {
            name: line for name, line in certificate.items() if name in self.certificate.by_probe or name not in marked
        }

    def _send(self, shard: PendingShard) -> None:
        with self._waiting():
            self.writer.wait_for_room()  # nothing has changed yet: after an interrupt the shard can be sent again
        if self.limits.before_writing is not None and shard.slots:
            self.limits.before_writing(slot_file_bytes(shard))
        try:
            arena = self._arenas.get(False)
        except queue.Empty:  # lost by an error
            arena = SlotArena()
        try:
            reused = (
                SlotArena() if self.backward_hooks.waiting else self._arena
            )  # slots that wait for a step are in the old one
            shard.at_end = partial(self._arenas.put, reused)
            self.writer.put(shard)
        except BaseException:
            if self.writer.has(shard):
                self.writer.put(shard)  # it may be in the queue already, and is written once
                self._begin_shard(arena)
            else:
                self._arenas.put(arena)
            raise
        self._begin_shard(arena)

    def flush(self, live: bool = True) -> None:
        """Return when all complete steps are on disk, in all processes."""
        shard = self._complete_shard(True, live)
        with self.ranks.others_first():  # so that a ledger of the first is never newer than those of the others
            if shard is not None:
                self._send(shard)
            with self._waiting():
                self.writer.wait()

    def _waiting(self) -> Any:
        return self.interrupts.waiting(f"writing the steps up to {self.clock.step} to {self.writer.folder}")

    def _begin_shard(self, arena: SlotArena) -> None:
        self._number += 1
        self._since = time.monotonic()
        self._steps: list[tuple[int, Sequence[ParameterUpdate]]] = []
        self._stretches: dict[str, list[tuple[RowRun, int, int]]] = {}
        self._arena = arena
        arena.clear()
        self.backward_hooks.renew(arena)
        self.pending = PendingShard(number=self._number, first=self.clock.next_step)

    # ------------------------------------------------------------------------------------------------- digest

    def _digest(self) -> None:
        """Digest the waiting steps: find the scale of each gradient, check it, number the visits, update the
        certificate.
        """
        steps, marks, visit = self._steps, self.marks.all(), self.visit
        if self.run_keeper is not None and self.run_keeper.only:
            new = self.run_keeper.new_batches(step for step, _ in steps)
        else:
            new = new_batches(steps, self.backward_hooks.credit.size_of)
        try:
            digested = self._digested(steps, new)
        except BaseException:
            self.marks.go_back(marks)
            self.visit = visit
            for batch in new:
                batch.batch.visit = -1
            raise
        with self.refused_after_errors("the steps that wait"):
            if self.ranks.first:
                self.pending.steps += digested.lines
            self.pending.visits += digested.visits
            self.pending.calls += digested.calls
            for batch in new:
                if batch.batch.generator is not None:
                    self.pending.log.generators[batch.batch.visit] = batch.batch.generator
            if self.run_keeper is not None:
                self.run_keeper.forget(step for step, _ in steps)
            for used in digested.used:
                self._place(used.slots)
            self._steps = []
        self._update_certificate(digested)
        self._digests += 1
        if self._digests % CHOICE_LASTS == 0:
            for follower in self.backward_hooks.followers.values():
                follower.watch_elsewhere()

    def _update_certificate(self, digested: DigestedSteps) -> None:
        """Update the live certificate. If that fails, the certificate is computed from the disk when recording ends."""
        try:
            self.certificate.take(digested.lines, digested.used, digested.sums)
        except BaseException:
            self.certificate.give_up()
            raise

    def _digested(
        self, steps: Sequence[tuple[int, Sequence[ParameterUpdate]]], new: Sequence[NewBatch]
    ) -> DigestedSteps:  # fmt: skip
        """The rows of the tables for some steps, and what the certificate needs of them; changes nothing for good."""
        exchange = None if self.ranks.alone else self._exchange(steps, new)
        factors = self._audit(steps, exchange)
        sums = self._probe(steps, factors, exchange)
        visits = self._number_visits(new, exchange)
        lines: list[StepLine] = []
        used: list[UsedSlots] = []
        for step, updates in steps:
            step_factors = [factors[step, update.follower] for update in updates]
            lines += [
                (step, line_of(update, scale))
                for update, scale in zip(updates, scales_of(step_factors), strict=True)
                if update.follower.name not in self.backward_hooks.ledger.accounts
            ]
            used += [
                UsedSlots(step, slots, factor, bias_factor)
                for slots, factor, bias_factor in factors_of(updates, step_factors)
                if slots.layer.keep != "ledger"
            ]
        numbers = {(step, follower.name): probed_slots.numbers for (step, follower), probed_slots in sums.items()}
        return DigestedSteps(lines, used, numbers, [self._call(slots) for slots in used], visits)

    def _exchange(self, steps: Sequence[tuple[int, Sequence[ParameterUpdate]]], new: Sequence[NewBatch]) -> Exchange:
        """Exchange reports with the other processes, and find out when to do so again."""
        since = self.clock.step - self.pending.first + 1
        report = RankReport(
            self.clock.step,
            self.notes.types,
            {
                (step, update.follower.name): [summarize_pass(gradient_pass) for gradient_pass in update.passes]
                for step, updates in steps
                for update in updates
            },
            [(batch.step, batch.number, batch.size) for batch in new],
            self.backward_hooks.bytes + self.pending.kept,
            time.monotonic() - self._since,
        )
        try:
            exchange = Exchange(self.ranks, report)
        except RecordError as error:
            self._failure = error
            raise
        bytes_a_step = max(report.bytes for report in exchange.reports) / max(since, 1)
        seconds = max(report.seconds for report in exchange.reports) / max(since, 1)
        shard = min(SHARD_BYTES / max(bytes_a_step, 1.0), SHARD_SECONDS / max(seconds, 1e-6))
        self._full = since + 1 > shard
        left = shard if self._full else shard - since
        self._next_exchange = self.clock.step + max(1, min(DIGEST_STEPS, int(left)))
        return exchange

    def _audit(
        self, steps: Iterable[tuple[int, Sequence[ParameterUpdate]]], exchange: Exchange | None
    ) -> dict[tuple[int, GradientFollower], GradientFactors]:
        """By what the gradient of each parameter was multiplied in each step; mark gradients that no slots made."""
        by_follower: dict[GradientFollower, list[tuple[int, ParameterUpdate]]] = {}
        for step, updates in steps:
            for update in updates:
                by_follower.setdefault(update.follower, []).append((step, update))
        factors = {}
        for follower, moves in by_follower.items():
            numbers, passes = [step for step, _ in moves], [update.passes for _, update in moves]
            results = (audit if exchange is None else exchange.audit)(follower, numbers, passes, self.marks)
            factors |= {(step, follower): result for step, result in zip(numbers, results, strict=True)}
            for step, update in moves:
                if update.bare and (exchange is None or exchange.without_slots(step, follower.name)):
                    self.marks("without-slots", follower.name, WITHOUT_SLOTS, step)
            if exchange is not None:
                follower.watch_at(exchange.watched_places(follower.name))
        return factors

    def _probe(
        self,
        steps: Iterable[tuple[int, Sequence[ParameterUpdate]]],
        factors: Mapping[tuple[int, GradientFollower], GradientFactors],
        exchange: Exchange | None,
    ) -> dict[tuple[int, GradientFollower], ProbedSlots]:
        """What slots put into the gradients, as their probes show it; mark a gradient that is something else."""
        sums: dict[tuple[int, GradientFollower], ProbedSlots] = {}
        gradients: dict[GradientFollower, list[tuple[int, float, Tensor]]] = {}
        for step, updates in steps:
            step_factors = [factors[step, update.follower] for update in updates]
            for update, audited, scale in zip(updates, step_factors, scales_of(step_factors), strict=True):
                passes = update.passes
                pass_factors = audited.factors if len(audited.factors) == len(passes) else [1.0] * len(passes)
                sums[step, update.follower] = probed(update.follower, passes, pass_factors)
                if not (audited.marked or update.bare):
                    gradients.setdefault(update.follower, []).append((step, scale, update.probe))
        if exchange is not None:
            exchange.add_up(sums, self.backward_hooks.followers)
        for follower, probes_by_step in gradients.items():
            numbers, scales, probes = zip(*probes_by_step, strict=True)
            wrong = not_products([sums[step, follower] for step in numbers], scales, probes)
            for i in np.flatnonzero(wrong):
                self.marks("not-a-product", follower.name, NO_PRODUCT, numbers[i])
        return sums

    def _call(self, used: UsedSlots) -> CallRow:
        """The row of a call in the table, with the visits of its slots where these are known."""
        slots = used.slots
        owners = self.backward_hooks.credit.owners_or_mark(slots, used.step)
        visit, size, stride = (-1, 1, 1) if owners is None else (slots.batch.visit, *owners)
        rows = slots.end - slots.begin
        return CallRow(
            slots.layer.name, slots.module, used.step, slots.number, rows, visit, size, stride, used.factor,
            used.bias_factor,
        )  # fmt: skip

    def _place(self, slots: CallSlots) -> None:
        """Add the rows of a call to the shard; rows that are neighbours in memory stay one stretch."""
        slots.run.kept = True
        stretches = self._stretches.setdefault(slots.layer.name, [])
        if stretches and stretches[-1][0] is slots.run and stretches[-1][2] == slots.begin:
            stretches[-1] = slots.run, stretches[-1][1], slots.end
        else:
            stretches.append((slots.run, slots.begin, slots.end))

    def _number_visits(self, new: Iterable[NewBatch], exchange: Exchange | None) -> list[Mapping[str, Any]]:
        """Give the examples of new batches their visits: step by step, and in each those of the first process first."""
        before, lines = self.visit, []
        for batch in new:
            visits, row = (self.visit - before, 0) if exchange is None else exchange.place(batch.step, batch.number)
            batch.batch.size = batch.size
            lines.append(batch.batch.number(before + visits, batch.step, row, self.notes.copies))
            self.visit += batch.size
        if exchange is not None:
            self.visit = before + exchange.visits
        return lines

    def _not_finite(self) -> list[str]:
        names = (*self.plan.explained, *self.plan.in_ledger)
        return [name for name in names if not all_finite(self.plan.tensors[name])]

    def _require_finite(self, shard: PendingShard) -> None:
        if bad := self._not_finite():
            self._failure = NonFiniteGradient(
                f"'{bad[0]}' holds NaN or infinity: a gradient between step {shard.first} and step {shard.last} did. "
                f"The memory stands at step {shard.first - 1}. Lower the learning rate, clip the gradient, or look at "
                "the batches."
            )
            raise self._failure
