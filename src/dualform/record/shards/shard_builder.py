"""Where complete steps wait for the writer: they are collected into shards of some megabytes, or of a minute.

Their slots lie in one of two arenas: one is filled while the other goes to the disk.

What raises an error here can be called again: a digest and a hand-over first find out all that they need, and change
the state last. Where an error comes in the middle of that change, the shelf takes nothing more and says why.
"""

import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dualform.engine import Agreement
from dualform.errors import NonFiniteGradient, RecordError
from dualform.store import CallRow, PendingShard, ShardWriter, SlotArena, all_finite

from ..plan import RecordingPlan
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

DIGEST_STEPS = 128
"""After so many the waiting steps are looked through, if their shard is not full before."""

WITHOUT_SLOTS = (
    "it has a gradient, but no recorded call of its layer made it (functional use of the weight, or a gradient left "
    "over from before?): the memory misses this part"
)

CHOICE_LASTS = 8
"""Digests after which other entries of the gradients are watched."""


class DigestedSteps(NamedTuple):
    """What some steps are in the memory, and what the proof needs of them: the slots that they used up, and what those
    put into the gradients, seen through their probes.
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
    ) -> None:
        self.plan, self.clock, self.marks, self.backward_hooks, self.writer = plan, clock, marks, backward_hooks, writer
        self.state, self.outside, self.certificate = state, outside, certificate
        self.notes, self.ranks, self.interrupts = backward_hooks.notes, backward_hooks.ranks, backward_hooks.interrupts
        self.visit = visits
        self._meet_at, self._full = clock.next_step, False
        self._arenas: queue.SimpleQueue[SlotArena] = queue.SimpleQueue()
        self._arenas.put(SlotArena())
        self._number = max((shard.number for shard in writer.manifest.shards), default=-1)
        self._digests = 0
        self._broken: RecordError | None = None
        self._fresh(SlotArena())

    def holds(self, step: int) -> bool:
        """Whether a step waits here, so that another optimiser can still take its part in it."""
        return bool(self._steps) and self._steps[-1][0] == step

    def enter(self, step: int, moved: Sequence[ParameterUpdate]) -> None:
        """Take a step, or another optimiser's part of the last one."""
        if self.holds(step):
            self._steps[-1] = step, [*self._steps[-1][1], *moved]
        else:
            self._steps.append((step, moved))
        self.pending.last = step

    @contextmanager
    def refused_after_errors(self, what: str) -> Iterator[None]:
        """What an error leaves half changed is not written: from then on nothing is."""
        try:
            yield
        except BaseException as error:
            self._broken = RecordError(
                f"{what} could not be brought up to step {self.clock.step} ({type(error).__name__}: {error}). The "
                f"memory stands at step {self.pending.first - 1}. Resume from a checkpoint of that step or before."
            )
            raise

    def add(self, step: int, moved: Sequence[ParameterUpdate], whole: bool = True) -> None:
        """Look at a step that was entered, and hand over what is full. It is not ``whole`` while gradients wait for
        further optimisers; then there is no hurry.
        """
        for each in moved:
            for added in each.passes:
                for slots in added.slots:
                    if slots.layer.in_ledger and not slots.batch.done:
                        self.backward_hooks.ledger.count(slots.batch.columns, self.backward_hooks.credit.size_of(slots))
                    slots.batch.done = True
        self.state.rest.stand()
        if self.state.rest.due(step) and not self.plan.ledger_only:
            self.pending.keep(self.state.changed(step))
        if not self.ranks.alone:
            self._meet(step if whole else step - DIGEST_STEPS)
            return
        patience = 1 if whole else 2
        if len(self._steps) >= patience * DIGEST_STEPS:
            self._digest()
        waiting = self.backward_hooks.bytes + self.pending.kept, time.monotonic() - self._since
        full = waiting[0] >= patience * SHARD_BYTES or waiting[1] > patience * SHARD_SECONDS
        if full and not self.plan.ledger_only:
            self.hand_over()

    def _meet(self, step: int) -> None:
        """Meet the other processes if it is time to: before a shard is full in any of them."""
        if step >= self._meet_at:
            self._digest()
            if self._full and not self.plan.ledger_only:
                self.hand_over()

    def stands_at(self) -> int:
        """The step that the memory stands at if recording ends now: all steps, unless weights are not finite."""
        return self.pending.first - 1 if self._not_finite() else self.clock.step

    def keep(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors whole, as they stand after a step."""
        self.pending.keep({f"{name}@{step}": t.detach().to("cpu", copy=True) for name, t in tensors.items()})
        if not self.pending.last:
            self.pending.first = self.pending.last = step

    def keep_first(self, parameter: Tensor) -> None:
        """An optimiser is about to step on a parameter without slots: keep its first value, if nobody has it yet."""
        if first := self.state.frozen.first_value(parameter, self.clock.next_step):
            self.pending.keep(first)

    def hand_over(self) -> None:
        """Give the complete steps to the writer; waits while the disk is behind."""
        shard = self._closed()
        if shard is not None:
            self._send(shard)

    def _closed(self, ledger: bool = False, live: bool = True) -> PendingShard | None:
        """The shard with all that belongs to it; None where there are no steps. The ``ledger`` is part of it where the
        user wants to be able to come back. Where the tensors are not ``live``, a
        step has been broken off: they are kept as they stood before it.
        """
        shard = self.pending
        if self._broken:
            raise self._broken
        if not shard.last:
            return None
        self.outside.unfinished_step.mark(self.marks, self.clock.next_step)
        unfinished = self.outside.unfinished_step.changed()
        self._look_for_nan(shard)
        self._digest()
        shard.slots = {
            layer: [run.rows(begin, end) for run, begin, end in stretches]
            for layer, stretches in self._stretches.items()
        }
        if ledger and self.plan.in_ledger:
            shard.ledger = self.backward_hooks.ledger.state()
        # what the model holds then is not the network of the last step
        foreign = self.outside.foreign().union(unfinished)
        if self.plan.ledger_only:
            shard.replaces = True
            shard.keep(self.state.rest.all(shard.last, live))
        elif not (foreign and self.state.rest.due(shard.last)):  # then it was looked at before that step
            shard.keep(self.state.changed(shard.last, live))
        if not foreign:
            shard.keep(self.state.checkpoints.due(shard.last, self.backward_hooks.bytes))
        if not unfinished:
            certified = self._certified() | self.backward_hooks.ledger.certificate()
            shard.certificate = self.outside.certificate(certified, foreign)
        shard.marks, shard.columns = self.marks.all(), self.notes.types or {}
        return shard

    def _certified(self) -> dict[str, Agreement]:
        """The certificate, without what a few entries cannot tell: something is marked that may lie elsewhere."""
        marked = {mark.name for mark in self.marks.all()}
        certificate = self.certificate.agreements(self.plan.tensors)
        return {
            name: line for name, line in certificate.items() if name in self.certificate.wholes or name not in marked
        }

    def _send(self, shard: PendingShard) -> None:
        with self._waiting():
            self.writer.wait_for_room()  # nothing is taken while it waits: who interrupts it may hand over again
        try:
            arena = self._arenas.get(False)
        except queue.Empty:  # an error lost it
            arena = SlotArena()
        try:
            reused = (
                SlotArena() if self.backward_hooks.waiting else self._arena
            )  # slots of a step to come lie in the old one
            shard.at_end = partial(self._arenas.put, reused)
            self.writer.put(shard)
        except BaseException:
            if self.writer.has(shard):
                self.writer.put(shard)  # nobody knows how far the first try came; it is written once
                self._fresh(arena)
            else:
                self._arenas.put(arena)
            raise
        self._fresh(arena)

    def flush(self, live: bool = True) -> None:
        """Come back when all complete steps are on disk, in all processes."""
        shard = self._closed(True, live)
        with self.ranks.others_first():  # so that a ledger of the first is never newer than those of the others
            if shard is not None:
                self._send(shard)
            with self._waiting():
                self.writer.wait()

    def _waiting(self) -> Any:
        return self.interrupts.waiting(f"writing the steps up to {self.clock.step} to {self.writer.folder}")

    def _fresh(self, arena: SlotArena) -> None:
        self._number += 1
        self._since = time.monotonic()
        self._steps: list[tuple[int, Sequence[ParameterUpdate]]] = []
        self._stretches: dict[str, list[tuple[RowRun, int, int]]] = {}
        self._arena = arena
        arena.clear()
        self.backward_hooks.renew(arena)
        self.pending = PendingShard(number=self._number, first=self.clock.next_step)

    # ------------------------------------------------------------------------------------------------- what could wait

    def _digest(self) -> None:
        """Find the scale of each step, check the gradients, give the slots their visits, go on with the proof."""
        steps, marks, visit = self._steps, self.marks.all(), self.visit
        new = new_batches(steps, self.backward_hooks.credit.size_of)
        try:
            digested = self._looked_through(steps, new)
        except BaseException:
            self.marks.go_back(marks)
            self.visit = visit
            for each in new:
                each.batch.visit = -1
            raise
        with self.refused_after_errors("the steps that wait"):
            if self.ranks.first:
                self.pending.steps += digested.lines
            self.pending.visits += digested.visits
            self.pending.calls += digested.calls
            for each in digested.used:
                self._place(each.slots)
            self._steps = []
        self._prove(digested)
        self._digests += 1
        if self._digests % CHOICE_LASTS == 0:
            for follower in self.backward_hooks.followers.values():
                follower.look_elsewhere()

    def _prove(self, digested: "DigestedSteps") -> None:
        """Go on with the proof. If that cannot be, the certificate is made from the disk, when recording ends."""
        try:
            self.certificate.take(digested.lines, digested.used, digested.sums)
        except BaseException:
            self.certificate.give_up()
            raise

    def _looked_through(
        self, steps: Sequence[tuple[int, Sequence[ParameterUpdate]]], new: Sequence[NewBatch]
    ) -> "DigestedSteps":  # fmt: skip
        """What steps are in the memory."""
        meeting = None if self.ranks.alone else self._talk(steps, new)
        found = self._audit(steps, meeting)
        sums = self._probe(steps, found, meeting)
        visits = self._number_visits(new, meeting)
        lines: list[StepLine] = []
        used: list[UsedSlots] = []
        for step, moved in steps:
            here = [found[step, each.follower] for each in moved]
            lines += [
                (step, line_of(each, scale))
                for each, scale in zip(moved, scales_of(here), strict=True)
                if each.follower.name not in self.backward_hooks.ledger.accounts
            ]
            used += [UsedSlots(step, *each) for each in factors_of(moved, here) if each[0].layer.keep != "ledger"]
        seen = {(step, follower.name): each.numbers for (step, follower), each in sums.items()}
        return DigestedSteps(lines, used, seen, [self._call(each) for each in used], visits)

    def _talk(self, steps: Sequence[tuple[int, Sequence[ParameterUpdate]]], new: Sequence[NewBatch]) -> Exchange:
        """Meet the other processes, and find out when to meet again."""
        since = self.clock.step - self.pending.first + 1
        said = RankReport(
            self.clock.step,
            self.notes.types,
            {
                (step, each.follower.name): [summarize_pass(p) for p in each.passes]
                for step, moved in steps
                for each in moved
            },
            [(each.step, each.number, each.size) for each in new],
            self.backward_hooks.bytes + self.pending.kept,
            time.monotonic() - self._since,
        )
        try:
            meeting = Exchange(self.ranks, said)
        except RecordError as error:
            self._broken = error
            raise
        bytes_a_step, seconds = (
            max(each) / max(since, 1) for each in zip(*[s[-2:] for s in meeting.said], strict=True)
        )
        shard = min(SHARD_BYTES / max(bytes_a_step, 1.0), SHARD_SECONDS / max(seconds, 1e-6))
        self._full = since + 1 > shard
        left = shard if self._full else shard - since
        self._meet_at = self.clock.step + max(1, min(DIGEST_STEPS, int(left)))
        return meeting

    def _audit(
        self, steps: Iterable[tuple[int, Sequence[ParameterUpdate]]], meeting: Exchange | None
    ) -> dict[tuple[int, GradientFollower], GradientFactors]:
        by_follower: dict[GradientFollower, list[tuple[int, ParameterUpdate]]] = {}
        for step, moved in steps:
            for each in moved:
                by_follower.setdefault(each.follower, []).append((step, each))
        found = {}
        for follower, moves in by_follower.items():
            numbers, passes = [step for step, _ in moves], [each.passes for _, each in moves]
            results = (audit if meeting is None else meeting.audit)(follower, numbers, passes, self.marks)
            found |= {(step, follower): result for step, result in zip(numbers, results, strict=True)}
            for step, each in moves:
                if each.bare and (meeting is None or meeting.without_slots(step, follower.name)):
                    self.marks("without-slots", follower.name, WITHOUT_SLOTS, step)
            if meeting is not None:
                follower.look_at(meeting.looks(follower.name))
        return found

    def _probe(
        self,
        steps: Iterable[tuple[int, Sequence[ParameterUpdate]]],
        found: Mapping[tuple[int, GradientFollower], GradientFactors],
        meeting: Exchange | None,
    ) -> dict[tuple[int, GradientFollower], ProbedSlots]:
        """What slots put into the gradients, seen through their probes; mark a gradient that is something else."""
        sums: dict[tuple[int, GradientFollower], ProbedSlots] = {}
        looks: dict[GradientFollower, list[tuple[int, float, Tensor]]] = {}
        for step, moved in steps:
            here = [found[step, each.follower] for each in moved]
            for each, about, scale in zip(moved, here, scales_of(here), strict=True):
                own = about.factors if len(about.factors) == len(each.passes) else [1.0] * len(each.passes)
                sums[step, each.follower] = probed(each.follower, each.passes, own)
                if not (about.marked or each.bare):
                    looks.setdefault(each.follower, []).append((step, scale, each.probe))
        if meeting is not None:
            meeting.add_up(sums, self.backward_hooks.followers)
        for follower, looked in looks.items():
            numbers, scales, probes = zip(*looked, strict=True)
            wrong = not_products([sums[step, follower] for step in numbers], scales, probes)
            for i in np.flatnonzero(wrong):
                self.marks("not-a-product", follower.name, NO_PRODUCT, numbers[i])
        return sums

    def _call(self, used: UsedSlots) -> CallRow:
        """A call with the visits of its rows, if it is known which."""
        slots = used.slots
        owners = self.backward_hooks.credit.told(slots, used.step)
        visit, size, stride = (-1, 1, 1) if owners is None else (slots.batch.visit, *owners)
        rows = slots.end - slots.begin
        return CallRow(
            slots.layer.name, slots.module, used.step, slots.number, rows, visit, size, stride, used.factor,
            used.bias_factor,
        )  # fmt: skip

    def _place(self, slots: CallSlots) -> None:
        """Rows that lie one below the other stay together."""
        slots.run.kept = True
        stretches = self._stretches.setdefault(slots.layer.name, [])
        if stretches and stretches[-1][0] is slots.run and stretches[-1][2] == slots.begin:
            stretches[-1] = slots.run, stretches[-1][1], slots.end
        else:
            stretches.append((slots.run, slots.begin, slots.end))

    def _number_visits(self, new: Iterable[NewBatch], meeting: Exchange | None) -> list[Mapping[str, Any]]:
        """Give the examples of new batches their visits: step by step, and in each those of the first process first."""
        before, lines = self.visit, []
        for each in new:
            visits, row = (self.visit - before, 0) if meeting is None else meeting.place(each.step, each.number)
            each.batch.size = each.size
            lines.append(each.batch.number(before + visits, each.step, row, self.notes.copies))
            self.visit += each.size
        if meeting is not None:
            self.visit = before + meeting.visits
        return lines

    def _not_finite(self) -> list[str]:
        names = (*self.plan.explained, *self.plan.in_ledger)
        return [name for name in names if not all_finite(self.plan.tensors[name])]

    def _look_for_nan(self, shard: PendingShard) -> None:
        if bad := self._not_finite():
            self._broken = NonFiniteGradient(
                f"'{bad[0]}' holds NaN or infinity: a gradient between step {shard.first} and step {shard.last} did. "
                f"The memory stands at step {shard.first - 1}. Lower the learning rate, clip the gradient, or look at "
                "the batches."
            )
            raise self._broken
