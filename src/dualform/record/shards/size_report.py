"""How large a memory becomes: told after its first step, from what that step takes, and once more when it has grown."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dualform.store import PAGE

from ..plan import RecordingPlan
from ..slots import CallSlots, slot_buffers
from ..state import state_checkpoints
from ..training import ParameterUpdate, new_batches
from .shard_builder import ShardBuilder

GROWN = 100
"""After so many steps the size is told again, where nobody knows how many are to come."""

CALL_BYTES, VISIT_BYTES, LINE_BYTES, HEADER_BYTES = 6, 12, 16, 180
"""What a call, a visit without columns and a step of a parameter take in their tables, and a tensor in a header."""


@dataclass(frozen=True)
class SizeEstimate:
    """What the steps of a recording take on disk, if all are like the first one."""

    visits: int
    """The visits of a step."""
    slots: int
    """Keys, errors and their powers of two that a step adds."""
    lines: float
    """The tables' lines of a step."""
    rest: float
    """The snapshots of the rest that a step adds."""
    steps_a_shard: int
    shard: int
    """What a shard takes beside its slots: padding and headers."""
    station: int
    """Weights and optimiser state that are kept whole now and then …"""
    shards_a_station: int
    """… with every so many shards."""
    fixed: int
    """What is there whatever the length: the first and the last weights, the manifest."""

    @property
    def a_step(self) -> float:
        """What a step takes in a long recording."""
        each_shard = self.shard + (self.station / self.shards_a_station if self.station else 0.0)
        return self.slots + self.lines + self.rest + each_shard / self.steps_a_shard

    def total(self, steps: int) -> float:
        """What so many steps take."""
        shards = math.ceil(steps / self.steps_a_shard)
        kept = shards // self.shards_a_station if self.station else 0
        return self.fixed + steps * (self.slots + self.lines + self.rest) + shards * self.shard + kept * self.station


class SizeReport:
    """Tells the size of a memory through ``say``. ``steps`` is how many are to be taken, where that is known."""

    def __init__(
        self, plan: RecordingPlan, shard_builder: ShardBuilder, steps: int | None, say: Callable[[str], None] | None
    ) -> None:
        self.plan, self.shard_builder, self.steps, self.say = plan, shard_builder, steps, say
        self.estimate: SizeEstimate | None = None
        self._first = shard_builder.clock.next_step

    def take(self, step: int, moved: Sequence[ParameterUpdate]) -> None:
        """A step is complete, and not yet on the shelf."""
        if step == self._first and self.estimate is None and self.say is not None and not self.plan.ledger_only:
            self.estimate = self._estimate(step, moved)
            self.say(self._after_first(self.estimate))
        elif step == self._first + GROWN and self.estimate is not None and self.steps is None and self.say is not None:
            self.say(self._grown(step - 1))

    def _after_first(self, size: SizeEstimate) -> str:
        whole, slots = in_bytes(size.a_step / size.visits), in_bytes(size.slots / size.visits)
        each = f"a visit takes about {whole}, {slots} of it for its slots"
        if self.steps is None:
            return f"{each}."
        return f"{each}; the {self.steps:,} steps of this training take about {in_bytes(size.total(self.steps))}."

    def _grown(self, step: int) -> str:
        assert self.estimate is not None
        size, shards = self.estimate, self.shard_builder.writer.manifest.shards
        files = [entry for shard in shards for name, entry in shard.files.items() if name.startswith("shards/")]
        slots = sum(entry.bytes for entry in files) + self.shard_builder.backward_hooks.bytes
        longer = slots / (size.slots * (step - self._first + 2))  # than the first step was, in the mean
        now = size.fixed + longer * (size.total(step - self._first + 1) - size.fixed)
        more = in_bytes(1000 * longer * size.a_step)
        return f"the memory takes about {in_bytes(now)} after {step:,} steps, and {more} for every 1,000 steps."

    def _estimate(self, step: int, moved: Sequence[ParameterUpdate]) -> SizeEstimate:
        used = {id(slots): slots for each in moved for added in each.passes for slots in added.slots}
        calls = [slots for slots in used.values() if slots.layer.keep != "ledger"]
        batches = new_batches([(step, moved)], self.shard_builder.backward_hooks.credit.size_of)
        visits = max(1, sum(batch.size for batch in batches))
        columns = sum(len(batch.batch.columns) for batch in batches[:1])
        samples = sum(len(each.sample) + len(each.state_sample) for each in moved)
        tensors, waiting = _stored(calls)
        rest = self._rest()
        steps_a_shard = max(1, math.ceil(slot_buffers.SHARD_BYTES / max(1.0, waiting + rest)))
        station = self.shard_builder.state.checkpoints.size()
        return SizeEstimate(
            visits,
            slots=sum(tensors.values()),
            lines=CALL_BYTES * len(calls)
            + (VISIT_BYTES + 8 * columns) * visits
            + LINE_BYTES * len(moved)
            + samples / 2,
            rest=rest,
            steps_a_shard=steps_a_shard,
            shard=_padding(tensors, steps_a_shard),
            station=station,
            shards_a_station=max(1, math.ceil(state_checkpoints.SHARE * station / max(1, waiting * steps_a_shard))),
            fixed=self._last_weights() + self.shard_builder.writer.manifest.init.bytes,
        )

    def _rest(self) -> float:
        """What snapshots of the rest take a step: the parameters of it that are trained, as often as it is kept."""
        trained = [tensor for tensor in self.shard_builder.state.rest.tensors.values() if id(tensor) in self.plan.owner]
        return (_bytes_of(trained) + HEADER_BYTES * len(trained)) / self.shard_builder.state.rest.every

    def _last_weights(self) -> int:
        return _bytes_of([self.plan.tensors[name] for name in (*self.plan.explained, *self.plan.in_ledger)])


def _stored(calls: Sequence[CallSlots]) -> tuple[dict[str, int], int]:
    """The bytes that some calls put into each tensor of a shard, and how many of them wait for it in memory."""
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
    """What a shard of so many steps takes beside its slots: tensors begin on pages, and there is a header."""
    header = -(-HEADER_BYTES * len(tensors) // PAGE) * PAGE
    return header + sum(-size * steps % PAGE for size in tensors.values())


def in_bytes(size: float | int) -> str:
    """A size for people: "813 kB"."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    power = min(len(units) - 1, int(math.log10(max(size, 1.0)) // 3))
    number = size / 1000**power
    return f"{number:.3g} {units[power]}" if number < 999.5 else f"{number:,.0f} {units[power]}"


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
