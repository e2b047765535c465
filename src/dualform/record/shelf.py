"""Where complete steps wait for the writer: they are collected into shards of some megabytes, or of a minute."""

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dualform.errors import NonFiniteGradient
from dualform.memory import Arena, CallRows, ParameterStep, Pending, Writer, all_finite
from dualform.types import Transition

from .gradients import Follower, Pass
from .marks import Marks
from .notes import Notes
from .passes import Passes
from .plan import Plan
from .proof import Proof
from .rest import Rest
from .stage import Slots

SHARD_BYTES = 32 << 20
SHARD_SECONDS = 60.0


@dataclass(slots=True)
class Moved:
    """One parameter in a step, as far as it is known while training runs."""

    follower: Follower
    passes: list[Pass]
    transition: Transition | None
    settings: Mapping[str, float]
    inner: float
    """What the optimiser itself multiplies the gradient with before it uses it (1 / loss scale)."""
    sample: bytes = b""
    buffer_sample: bytes = b""


class Shelf:
    """Takes complete steps and hands them to the writer, shard by shard."""

    def __init__(
        self, plan: Plan, passes: Passes, notes: Notes, rest: Rest, marks: Marks, proof: Proof, writer: Writer
    ) -> None:  # fmt: skip
        self.plan, self.passes, self.notes, self.rest = plan, passes, notes, rest
        self.marks, self.proof, self.writer = marks, proof, writer
        self.visit = writer.manifest.visits
        self._pool: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._number = max((shard.number for shard in writer.manifest.shards), default=-1)
        self._fresh()

    def add(self, step: int, moved: Sequence[Moved]) -> None:
        """Take a complete step."""
        used = list({id(s): (s, p) for each in reversed(moved) for p in each.passes for s in p.slots}.values())
        lines = []
        for slots, _ in used:
            if slots.batch.visit < 0:
                lines.append(self._number_visits(slots, step))
            slots.batch.done = True
        self._steps.append((step, moved, used))
        self.pending.add(step, lines, self.rest.changed(step) if self.rest.due(step) else {})
        if self.passes.full:
            self._digest()
        if self.pending.nbytes >= SHARD_BYTES or time.monotonic() - self._since > SHARD_SECONDS:
            self.hand_over()

    def keep(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors whole, as they stand after a step."""
        self.pending.keep({f"{name}@{step}": t.detach().to("cpu", copy=True) for name, t in tensors.items()})
        if not self.pending.last:
            self.pending.first = self.pending.last = step

    def hand_over(self) -> None:
        """Give the complete steps to the writer; waits while the disk is behind."""
        shard = self.pending
        if not shard.last:
            return
        self._digest()
        self._look_for_nan(shard)
        shard.keep(self.rest.changed(shard.last))
        shard.marks, shard.columns = self.marks.all(), self.notes.types or {}
        shard.certificate = self.proof.certificate(self.plan.tensors)
        if not self.passes.waiting:  # else slots of a step to come lie in the same buffers
            shard.arena = self.passes.arena
        self.writer.put(shard)
        self._fresh()

    def flush(self) -> None:
        """Come back when all complete steps are on disk."""
        self.hand_over()
        self.writer.wait()

    def _fresh(self) -> None:
        self._number += 1
        self._since = time.monotonic()
        self._steps: list[tuple[int, Sequence[Moved], Sequence[tuple[Slots, Pass]]]] = []
        self.passes.arena = Arena(self._pool)
        self.pending = Pending(number=self._number, first=self.marks.step + 1)

    def _number_visits(self, slots: Slots, step: int) -> Mapping[str, Any]:
        """Give the examples of a batch their visits, the first time a step uses them."""
        batch, axis = slots.batch, slots.layer.batch_dim
        if batch.size is None:
            batch.size = slots.leading[axis if axis < len(slots.leading) else 0]
        first, self.visit = self.visit, self.visit + batch.size
        return batch.number(first, step)

    def _digest(self) -> None:
        """Do what could wait: encode the slots, compare the gradients, find the scale of each step."""
        lines, rows = [], []
        for step, moved, used in self._steps:
            scales = self._scales(moved)
            lines += [(step, _line(each, scale)) for each, scale in zip(moved, scales, strict=True)]
            of_pass = {id(p): scale for each, scale in zip(moved, scales, strict=True) for p in each.passes}
            rows += [(step, slots, p.factor / of_pass[id(p)]) for slots, p in used if p.factor and of_pass[id(p)]]
        self._steps = []
        self.passes.digest()
        self._refuse_nan(rows)
        self.proof.take(lines, rows)
        for step, line in lines:
            self.pending.move(step, line)
        for step, slots, factor in rows:
            self.pending.place(step, self._placed(slots, factor))

    @staticmethod
    def _scales(moved: Sequence[Moved]) -> list[float]:
        """The gradient scale of each parameter; where all watched entries are zero, that of the others."""
        found = [each.follower.resolve(each.passes) if each.passes else 1.0 for each in moved]
        known = [scale for scale, each in zip(found, moved, strict=True) if scale is not None and each.passes]
        common = float(np.median(known)) if known else 1.0
        for each, scale in zip(moved, found, strict=True):
            if scale is None:
                each.follower.resolve(each.passes, common)
        return [common if scale is None else scale for scale in found]

    def _placed(self, slots: Slots, factor: float) -> CallRows:
        """The rows of a call with their visits, if its leading axes tell which."""
        leading, axis, batch = slots.leading, slots.layer.batch_dim, slots.batch
        visit, size, stride = -1, 1, 1
        if axis < len(leading) and leading[axis] == batch.size:
            visit, size = batch.visit, leading[axis]
            for extent in leading[axis + 1 :]:
                stride *= extent
        else:
            self.marks(
                "unknown-visits",
                slots.layer.name,
                f"its input has the leading axes {leading} where the batch has {batch.size} examples, so its slots "
                "cannot be told apart by visit; pass batch_dim= if another axis counts the examples",
            )
        return CallRows(
            slots.layer.name,
            slots.module,
            slots.number,
            visit,
            size,
            stride,
            factor,
            *slots.run.rows(slice(slots.begin, slots.end)),
        )

    def _refuse_nan(self, rows: Sequence[tuple[int, Slots, float]]) -> None:
        for step, slots, _ in rows:
            if not slots.run.is_finite(slice(slots.begin, slots.end)):
                first = self.pending.first
                self._fresh()
                raise NonFiniteGradient(
                    f"the errors or inputs of layer '{slots.layer.name}' held NaN or infinity at step {step}. The "
                    f"memory stands at step {first - 1}. Lower the learning rate, clip the gradient, or look at the "
                    "batch."
                )

    def _look_for_nan(self, shard: Pending) -> None:
        bad = [name for name in self.plan.explained if not all_finite(self.plan.tensors[name])]
        if bad:
            self._fresh()
            raise NonFiniteGradient(
                f"'{bad[0]}' holds NaN or infinity: a gradient between step {shard.first} and step {shard.last} did. "
                f"The memory stands at step {shard.first - 1}. Lower the learning rate, clip the gradient, or look at "
                "the batches."
            )


def _line(moved: Moved, scale: float) -> ParameterStep:
    return ParameterStep(
        moved.follower.name, moved.transition, scale * moved.inner, moved.settings, moved.sample, moved.buffer_sample
    )
