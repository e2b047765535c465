"""Which examples the rows of a call are credited to: as stated, as probes have shown, or to none, with a mark."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ..plan import RecordingPlan
from ..slots import CallSlots, ModelCall, Shapes
from ..verify import Marks
from .arrangements import ProbedCase, RowArrangements, applied
from .constant_inputs import ConstantInputs
from .row_owners import MIXED, SELECTED, SHARED, AxisSplit
from .row_probe import probe

MOST_PROBES = 12
"""Probes in one recording."""

NEVER_RUN = "the model could not be run apart to follow its rows"
ONLY_BACKWARD = (
    "it was run with gradients only inside the backward pass (activation checkpointing with use_reentrant=True; its "
    "rows can be followed with use_reentrant=False)"
)
SAME_INPUT = "its input was the same in every batch, while that of other modules changed"
OTHER_LENGTH = "the axis that batch_dim names has another length"


class RowOwners(NamedTuple):
    """Row r belongs to example r // stride % examples of its batch."""

    examples: int
    stride: int


class RowCredit:
    """Learns how the rows of each layer follow the examples, and applies it to all calls."""

    def __init__(self, plan: RecordingPlan, marks: Marks, alone: bool) -> None:
        self.plan, self.marks, self.alone = plan, marks, alone
        self.probing = self.reached_model = False
        """Whether a probe runs now, and whether it ran the model itself, not its shadow."""
        self._axes = {recorded.uses[0].info.name: recorded.kind.batch_dim for recorded in plan.modules}
        self._ways = RowArrangements(self._axes)
        self._constants = ConstantInputs()
        self._probed: dict[str, set[Shapes]] = {}
        self._failed: dict[str, str] = {}
        """What the last probe of a module raised."""
        self._wanted: set[str] = set()
        self._lengths: dict[tuple, int] = {}
        self._varying: set[tuple[str, str, int]] = set()
        self._answers: dict[tuple, RowOwners | str] = {}

    # ------------------------------------------------------------------------------------------- learning

    def see(self, entry: ModelCall, module: nn.Module, args: tuple, kwargs: dict, noted: int | None) -> None:
        """The user has called a module: probe it if it is not known how its rows lie."""
        if entry.path and self._constants.see(entry.path, (*args, *kwargs.values())):
            self._answers.clear()
        if noted == 1 or not self._wants(entry) or not _may_hold(entry.inputs, noted):
            return
        self._probed.setdefault(entry.path, set()).add(entry.inputs)
        self.probing, self.reached_model = True, False
        try:
            answers = probe(module, self.plan.modules, args, kwargs, noted)
        except Exception as error:  # whatever the user's code raises: then only what is usual is known of it
            self._failed[entry.path] = f"{NEVER_RUN} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            return
        finally:
            self.probing = False
        if not self.reached_model:
            self._wanted.discard(entry.path)
            self._ways.learn(entry, answers)
            self._answers.clear()

    @property
    def probes(self) -> int:
        """How many there were."""
        return sum(map(len, self._probed.values()))

    def _wants(self, entry: ModelCall) -> bool:
        if self.probes >= MOST_PROBES or len(self.plan.stated) == len(self.plan.layers):
            return False
        before = self._probed.get(entry.path)
        return before is None or (self.alone and entry.path in self._wanted and entry.inputs not in before)

    # ------------------------------------------------------------------------------------------- answers

    def size_of(self, slots: CallSlots) -> int:
        """How many examples the batch of a call has: as noted, else as its rows count them."""
        if slots.batch.size is not None:
            return slots.batch.size
        _, examples = (None, None) if slots.entry is None else self._ways.of(slots.entry, None)
        if examples is not None and slots.layer.name not in self.plan.stated:
            return examples
        return slots.leading[slots.layer.batch_dim if slots.layer.batch_dim < len(slots.leading) else 0]

    def of(self, slots: CallSlots) -> RowOwners | str:
        """Whose rows a call has; or why nobody knows."""
        entry = slots.entry
        shapes = None if entry is None else (entry.path, entry.inputs, entry.outputs)
        key = slots.place, slots.order, slots.leading, slots.batch.size, shapes
        answer = self._answers.get(key)
        if answer is None:
            size = self.size_of(slots)
            self._watch_length(slots, size)
            answer = self._answers[key] = self._find(slots, size)
            if isinstance(answer, str) and answer not in (SHARED, MIXED, SELECTED, SAME_INPUT) and entry is not None:
                self._wanted.add(entry.path)
        return answer

    def told(self, slots: CallSlots, step: int) -> RowOwners | None:
        """The same, with a mark where rows belong to some example and nobody knows to which."""
        answer = self.of(slots)
        if not isinstance(answer, str):
            return answer
        if answer != SHARED:
            self.marks("unknown-visits", slots.layer.name, self._reason(slots, answer), step)
        return None

    def _reason(self, slots: CallSlots, answer: str) -> str:
        size = self.size_of(slots)
        path, outputs = ("", ()) if slots.entry is None else (slots.entry.path, slots.entry.outputs)
        if answer == NEVER_RUN:
            answer = ONLY_BACKWARD if slots.order is None else self._failed.get(path, answer)
        blocks = next((shape[0] // size for shape in outputs if shape and shape[0] > size and shape[0] % size == 0), 0)
        copies = f", or copies={blocks} if each noted example sends {blocks} blocks of rows" if blocks else ""
        return (
            f"its input has the leading axes {slots.leading} where the batch has {size} examples, and {answer}, so its "
            f"slots cannot be told apart by visit; pass batch_dim= if an axis counts the examples{copies}"
        )

    def _find(self, slots: CallSlots, size: int) -> RowOwners | str:
        axis, leading = slots.layer.batch_dim, slots.leading
        fits = axis < len(leading) and leading[axis] == size
        usual = RowOwners(size, AxisSplit(axis, True).stride(leading, size) or 1) if fits else None
        if slots.layer.name in self.plan.stated:
            return usual or OTHER_LENGTH
        if slots.entry is not None and slots.entry.path in self._constants:
            return SAME_INPUT
        if size == 1:
            return RowOwners(1, 1)
        cases = list(self._cases(slots, size))
        if cases:
            varying = slots.entry is not None and (slots.entry.path, *slots.place) in self._varying
            stride = SELECTED if varying else applied(cases, leading, size, slots.entry)
            return stride if isinstance(stride, str) else RowOwners(size, stride)
        own_axes = [] if slots.entry is None else [each for s in slots.entry.inputs for each in (s, s[:-1])]
        return usual if usual and (self._axes[slots.place[0]] is not None or leading in own_axes) else NEVER_RUN

    def _cases(self, slots: CallSlots, size: int) -> Iterator[ProbedCase]:
        """What probes have shown of a call: of its very number, or of all calls of its module."""
        if slots.entry is None:
            return self._ways.anywhere(slots.place)
        along, _ = self._ways.of(slots.entry, size)
        return iter(()) if along is None else self._ways.cases(slots.entry.path, along, slots.place, slots.order)

    def _watch_length(self, slots: CallSlots, size: int) -> None:
        """Rows whose number changes from batch to batch, while the batch has the same sizes, are selected."""
        entry = slots.entry
        if entry is None or slots.order is None:
            return
        for axis in {split.axis for case in self._cases(slots, size) for split in case.splits}:
            key = entry.path, entry.inputs, entry.outputs, slots.place, slots.order, axis
            length = slots.leading[axis] if axis < len(slots.leading) else 0
            if self._lengths.setdefault(key, length) != length:
                self._varying.add((entry.path, *slots.place))
                self._answers.clear()


def _may_hold(inputs: Shapes, noted: int | None) -> bool:
    """Whether so many examples can be in tensors of some shapes; an evaluation on another batch is not to be probed."""
    return noted is None or any(noted in shape or (shape and shape[0] % noted == 0) for shape in inputs)
