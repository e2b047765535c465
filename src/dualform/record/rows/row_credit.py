"""Credits the rows of a call to examples: as the user stated, as probes have shown, or to none, with a mark."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ..plan import RecordingPlan
from ..slots import CallSlots, ModelCall, Shapes
from ..verify import Marks
from .arrangements import ProbedCase, RowArrangements, stride_from_cases
from .constant_inputs import ConstantInputs
from .row_owners import MIXED, SELECTED, SHARED, AxisSplit
from .row_probe import probe

MAX_PROBES = 12
"""The largest number of probes in one recording."""

NEVER_RUN = "the model could not be run separately to follow its rows"
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
        """Whether a probe is running, and whether it ran the model itself instead of its shadow."""
        self._axes = {recorded.uses[0].info.name: recorded.kind.batch_dim for recorded in plan.modules}
        self._arrangements = RowArrangements(self._axes)
        self._constants = ConstantInputs()
        self._probed: dict[str, set[Shapes]] = {}
        self._failed: dict[str, str] = {}
        """The error of the last probe of a module."""
        self._unresolved: set[str] = set()
        """The user's calls with rows that a further probe could assign to examples."""
        self._lengths: dict[tuple, int] = {}
        self._varying: set[tuple[str, str, int]] = set()
        """Maps whose number of rows changes while the batch has the same sizes."""
        self._answers: dict[tuple, RowOwners | str] = {}

    # ------------------------------------------------------------------------------------------- learning

    def see(self, call: ModelCall, module: nn.Module, args: tuple, kwargs: dict, noted: int | None) -> None:
        """The user has called a module: probe it if the layout of its rows is not known."""
        if call.path and self._constants.see(call.path, (*args, *kwargs.values())):
            self._answers.clear()
        if noted == 1 or not self._needs_probe(call) or not _may_hold(call.inputs, noted):
            return
        self._probed.setdefault(call.path, set()).add(call.inputs)
        self.probing, self.reached_model = True, False
        try:
            answers = probe(module, self.plan.modules, args, kwargs, noted)
        except Exception as error:  # the user's code may raise anything; without an answer the usual axis is assumed
            self._failed[call.path] = f"{NEVER_RUN} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            return
        finally:
            self.probing = False
        if not self.reached_model:
            self._unresolved.discard(call.path)
            self._arrangements.learn(call, answers)
            self._answers.clear()

    @property
    def probes(self) -> int:
        """The number of probes so far."""
        return sum(map(len, self._probed.values()))

    def _needs_probe(self, call: ModelCall) -> bool:
        if self.probes >= MAX_PROBES or len(self.plan.stated) == len(self.plan.layers):
            return False
        before = self._probed.get(call.path)
        return before is None or (self.alone and call.path in self._unresolved and call.inputs not in before)

    # ------------------------------------------------------------------------------------------- answers

    def size_of(self, slots: CallSlots) -> int:
        """The number of examples in the batch of a call: as noted, else from the axes of the call."""
        if slots.batch.size is not None:
            return slots.batch.size
        _, examples = (None, None) if slots.entry is None else self._arrangements.axis_and_count(slots.entry, None)
        if examples is not None and slots.layer.name not in self.plan.stated:
            return examples
        return slots.leading[slots.layer.batch_dim if slots.layer.batch_dim < len(slots.leading) else 0]

    def owners_of(self, slots: CallSlots) -> RowOwners | str:
        """The examples that the rows of a call belong to; or the reason why they are not known."""
        call = slots.entry
        shapes = None if call is None else (call.path, call.inputs, call.outputs)
        key = slots.place, slots.order, slots.leading, slots.batch.size, shapes
        answer = self._answers.get(key)
        if answer is None:
            size = self.size_of(slots)
            self._watch_length(slots, size)
            answer = self._answers[key] = self._find(slots, size)
            if isinstance(answer, str) and answer not in (SHARED, MIXED, SELECTED, SAME_INPUT) and call is not None:
                self._unresolved.add(call.path)
        return answer

    def owners_or_mark(self, slots: CallSlots, step: int) -> RowOwners | None:
        """The examples that the rows of a call belong to. None, with a mark, where rows belong to unknown examples."""
        answer = self.owners_of(slots)
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
            f"slots cannot be assigned to visits; pass batch_dim= if an axis counts the examples{copies}"
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
            stride = SELECTED if varying else stride_from_cases(cases, leading, size, slots.entry)
            return stride if isinstance(stride, str) else RowOwners(size, stride)
        input_axes = [] if slots.entry is None else [axes for s in slots.entry.inputs for axes in (s, s[:-1])]
        return usual if usual and (self._axes[slots.place[0]] is not None or leading in input_axes) else NEVER_RUN

    def _cases(self, slots: CallSlots, size: int) -> Iterator[ProbedCase]:
        """The probed cases of a call: those with its number, else those of all calls of its module."""
        if slots.entry is None:
            return self._arrangements.anywhere(slots.place)
        along, _ = self._arrangements.axis_and_count(slots.entry, size)
        if along is None:
            return iter(())
        return self._arrangements.cases(slots.entry.path, along, slots.place, slots.order)

    def _watch_length(self, slots: CallSlots, size: int) -> None:
        """Note maps whose number of rows changes while the batch has the same sizes: their rows are selected."""
        call = slots.entry
        if call is None or slots.order is None:
            return
        for axis in {split.axis for case in self._cases(slots, size) for split in case.splits}:
            key = call.path, call.inputs, call.outputs, slots.place, slots.order, axis
            length = slots.leading[axis] if axis < len(slots.leading) else 0
            if self._lengths.setdefault(key, length) != length:
                self._varying.add((call.path, *slots.place))
                self._answers.clear()


def _may_hold(inputs: Shapes, noted: int | None) -> bool:
    """Whether inputs of these shapes can hold the noted examples. An evaluation on another batch must not be probed."""
    return noted is None or any(noted in shape or (shape and shape[0] % noted == 0) for shape in inputs)
