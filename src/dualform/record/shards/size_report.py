"""How large a memory becomes: estimated from its first step and reported, and once more after some growth."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dualform.sizes import in_bytes
from dualform.store import PAGE

from ..plan import RecordingPlan
from ..slots import CallSlots, slot_buffers
from ..state import state_checkpoints
from ..training import ParameterUpdate, new_batches
from .shard_builder import ShardBuilder

GROWN = 100
"""The size is reported again after so many steps, if the length of the training is not known."""

CALL_BYTES, VISIT_BYTES, LINE_BYTES, HEADER_BYTES = 6, 12, 16, 180
"""Bytes of a call, of a visit without columns and of a step of a parameter in their tables; of a tensor in a header."""


@dataclass(frozen=True)
class SizeEstimate:
    """What the steps of a recording take on disk, if all are like the first one."""

    visits: int
    """The visits of a step."""
    slots: int
    """Keys, errors and their powers of two that a step adds."""
    lines: float
    """The rows that a step adds to the tables."""
    rest: float
    """The snapshots of the rest that a step adds."""
    steps_a_shard: int
    shard: int
    """Bytes of a shard beside its slots: padding and headers."""
    checkpoint: int
    """Bytes of weights and optimiser state that are kept whole now and then …"""
    shards_a_checkpoint: int
    """… with every so many shards."""
    fixed: int
    """What does not depend on the length of training: the first and the last weights, the manifest."""

    @property
    def a_step(self) -> float:
        """The bytes of a step in a long recording."""
        a_shard = self.shard + (self.checkpoint / self.shards_a_checkpoint if self.checkpoint else 0.0)
        return self.slots + self.lines + self.rest + a_shard / self.steps_a_shard

    def total(self, steps: int) -> float:
        """The bytes of so many steps."""
        shards = math.ceil(steps / self.steps_a_shard)
        checkpoints = shards // self.shards_a_checkpoint if self.checkpoint else 0
        return (
            self.fixed
            + steps * (self.slots + self.lines + self.rest)
            + shards * self.shard
            + checkpoints * self.checkpoint
        )


class SizeReport:
    """Reports the size of a memory through ``say``. ``steps`` is the length of the training, where it is known."""

    def __init__(
        self, plan: RecordingPlan, shard_builder: ShardBuilder, steps: int | None, say: Callable[[str], None] | None
    ) -> None:
        self.plan, self.shard_builder, self.steps, self.say = plan, shard_builder, steps, say
        self.estimate: SizeEstimate | None = None
        self._first, self._announced = shard_builder.clock.next_step, False

    def take(self, step: int, updates: Sequence[ParameterUpdate]) -> None:
        """A step is complete, and not yet part of a finished shard."""
        if step == self._first and self.estimate is None and self.say is not None and not self.plan.ledger_only:
            self.estimate = self._estimate(step, updates)
            self.say(self._after_first(self.estimate))
        elif step == self._first + GROWN and self.estimate is not None and self.steps is None and self.say is not None:
            self.say(self._grown(step - 1))

    def announce(self, step: int, sentence: Callable[[], str]) -> None:
        """Report what else is kept, after the first step."""
        if step == self._first and self.say is not None and not self._announced:
            self._announced = True
            self.say(sentence())

    def _after_first(self, size: SizeEstimate) -> str:
        visit, slots = in_bytes(size.a_step / size.visits), in_bytes(size.slots / size.visits)
        sentence = f"a visit takes about {visit}, {slots} of it for its slots"
        if self.steps is None:
            return f"{sentence}."
        return f"{sentence}; the {self.steps:,} steps of this training take about {in_bytes(size.total(self.steps))}."

    def _grown(self, step: int) -> str:
        assert self.estimate is not None
        size, shards = self.estimate, self.shard_builder.writer.manifest.shards
        files = [entry for shard in shards for name, entry in shard.files.items() if name.startswith("shards/")]
        slots = sum(entry.bytes for entry in files) + self.shard_builder.backward_hooks.bytes
        ratio = slots / (size.slots * (step - self._first + 2))  # of the mean step to the first one
        now = size.fixed + ratio * (size.total(step - self._first + 1) - size.fixed)
        more = in_bytes(1000 * ratio * size.a_step)
        return f"the memory takes about {in_bytes(now)} after {step:,} steps, and {more} for every 1,000 steps."

    def _estimate(self, step: int, updates: Sequence[ParameterUpdate]) -> SizeEstimate:
        used = {
            id(slots): slots for update in updates for gradient_pass in update.passes for slots in gradient_pass.slots
        }
        calls = [slots for slots in used.values() if slots.layer.keep != "ledger"]
        batches = new_batches([(step, updates)], self.shard_builder.backward_hooks.credit.size_of)
        visits = max(1, sum(batch.size for batch in batches))
        columns = sum(len(batch.batch.columns) for batch in batches[:1])
        samples = sum(len(update.sample) + len(update.state_sample) for update in updates)
        tensors, waiting = _stored(calls)
        rest = self._rest()
        steps_a_shard = max(1, math.ceil(slot_buffers.SHARD_BYTES / max(1.0, waiting + rest)))
        checkpoint = self.shard_builder.state.checkpoints.size()
        return SizeEstimate(
            visits,
            slots=sum(tensors.values()),
            lines=CALL_BYTES * len(calls)
            + (VISIT_BYTES + 8 * columns) * visits
            + LINE_BYTES * len(updates)
            + samples / 2,
            rest=rest,
            steps_a_shard=steps_a_shard,
            shard=_padding(tensors, steps_a_shard),
            checkpoint=checkpoint,
            shards_a_checkpoint=max(
                1, math.ceil(state_checkpoints.SHARE * checkpoint / max(1, waiting * steps_a_shard))
            ),
            fixed=self._last_weights() + self.shard_builder.writer.manifest.init.bytes,
        )

    def _rest(self) -> float:
        """The bytes of the rest in a step: its trained parameters, as often as snapshots are taken."""
        trained = [tensor for tensor in self.shard_builder.state.rest.tensors.values() if tensor in self.plan.owners]
        return (_bytes_of(trained) + HEADER_BYTES * len(trained)) / self.shard_builder.state.rest.every

    def _last_weights(self) -> int:
        return _bytes_of([self.plan.tensors[name] for name in (*self.plan.explained, *self.plan.in_ledger)])


def _stored(calls: Sequence[CallSlots]) -> tuple[dict[str, int], int]:
    """The bytes that calls add to each tensor of a shard, and how many bytes wait in memory until then."""
    tensors: Counter[str] = Counter()
    waiting = 0
    for slots in calls:
        for name, rows in zip(("keys", "errors"), slots.run.rows(slots.begin, slots.end), strict=True):
            if rows is not None:
                tensors[f"{slots.layer.name}.{name}"] += _bytes_of([rows.values])
                waiting += _bytes_of([rows.values])
                if rows.exponents is not None:
                    tensors[f"{slots.layer.name}.{name} exponents"] += _bytes_of([rows.exponents])
    return dict(tensors), waiting


def _padding(tensors: Mapping[str, int], steps: int) -> int:
    """The bytes of a shard of so many steps beside its slots: tensors begin on pages, and there is a header."""
    header = -(-HEADER_BYTES * len(tensors) // PAGE) * PAGE
    return header + sum(-size * steps % PAGE for size in tensors.values())


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
