"""The answers of all probes: which axis of the user's calls counts examples, and how each layer arranges its rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..slots import ModelCall, Shapes
from .row_owners import MIXED, SELECTED, SHARED, AxisSplit
from .row_probe import INPUTS, OutputAxis, ProbeAnswer, RowLayout

OTHER_ROWS = "it has other rows than those that could be followed"
TWO_WAYS = "there are two ways to arrange its rows"


class ProbedCase(NamedTuple):
    """The layout of rows in one probe, and the sizes of that probe."""

    layout: RowLayout
    examples: int
    inputs: Shapes

    @property
    def splits(self) -> frozenset[AxisSplit]:
        """The axis splits that agree with the rows."""
        return frozenset() if isinstance(self.layout.rows, str) else self.layout.rows


class RowArrangements:
    """The answers of all probes. ``axes`` are the axes of examples by module, for the kinds that fix it."""

    def __init__(self, axes: Mapping[str, int | None]) -> None:
        self._axes = axes
        self._cases: dict[tuple[str, OutputAxis], dict[tuple[str, int], dict[int, list[ProbedCase]]]] = {}
        """By the user's call and its axis of examples, then by module and map, then by the number of the call."""
        self._scores: dict[str, dict[OutputAxis, int]] = {}
        """By axis: how many layers keep the examples apart, plus how many have them along the axis of their kind."""

    def learn(self, call: ModelCall, answers: Sequence[ProbeAnswer]) -> None:
        """Add the answers of a probe."""
        scores = self._scores.setdefault(call.path, {})
        for answer in answers:
            numbered = self._cases.setdefault((call.path, answer.along), {})
            for (name, number, place), layout in answer.rows.items():
                cases = numbered.setdefault((name, place), {}).setdefault(number, [])
                cases.append(ProbedCase(layout, answer.examples, call.inputs))
            agreeing = sum(self._agrees(name, layout) for (name, _, _), layout in answer.rows.items())
            scores[answer.along] = scores.get(answer.along, 0) + answer.apart + agreeing

    def _agrees(self, name: str, layout: RowLayout) -> bool:
        axis = self._axes[name]
        return axis is not None and not isinstance(layout.rows, str) and AxisSplit(axis, True) in layout.rows

    def axis_and_count(self, call: ModelCall, size: int | None) -> tuple[OutputAxis | None, int | None]:
        """The axis along which the user's call counts examples, and their number: the best axis that fits ``size``."""
        scores = {a: score for a, score in self._scores.get(call.path, {}).items() if score or size is not None}
        counts = {along: _count(along, call, size) for along in scores}
        best = max((score for along, score in scores.items() if counts[along] is not None), default=0)
        ways = [along for along, score in scores.items() if score == best and counts[along] is not None]
        if not ways or {"outer", "inner"} <= {along.part for along in ways}:
            return None, None  # several rows per example, in an unknown order
        return ways[0], counts[ways[0]]

    def cases(self, path: str, along: OutputAxis, place: tuple[str, int], number: int | None) -> Iterator[ProbedCase]:
        """The cases of one call of a module; of all its calls where that one is not known."""
        numbered = self._cases.get((path, along), {}).get(place, {})
        for cases in [numbered[number]] if number in numbered else numbered.values():
            yield from cases

    def anywhere(self, place: tuple[str, int]) -> Iterator[ProbedCase]:
        """The cases of a module in all calls of the user, each along its best axis."""
        for path, scores in self._scores.items():
            if scores:
                yield from self.cases(path, max(scores, key=lambda along: scores[along]), place, None)


def stride_from_cases(
    cases: Sequence[ProbedCase], leading: Sequence[int], size: int, call: ModelCall | None
) -> int | str:  # fmt: skip
    """The stride of examples in the rows of a call, from the cases of earlier probes; or why it is not known."""
    reasons = {case.layout.rows for case in cases if isinstance(case.layout.rows, str)}
    if reasons:
        return SHARED if reasons == {SHARED} and not any(case.splits for case in cases) else (
            MIXED if reasons <= {MIXED, SHARED} and not any(case.splits for case in cases) else SELECTED
        )  # fmt: skip
    splits = frozenset.intersection(*(case.splits for case in cases))
    inputs = () if call is None else call.inputs
    strides = {
        split.stride(leading, size)
        for split in splits
        if any(_follows(split, case, leading, size, inputs) for case in cases)
    } - {None}
    if len(strides) == 1:
        return strides.pop() or 1
    return TWO_WAYS if strides else OTHER_ROWS if splits else SELECTED


def _follows(split: AxisSplit, case: ProbedCase, leading: Sequence[int], size: int, inputs: Shapes) -> bool:
    """Whether an example has as many rows along an axis as in a probe, or has more in proportion to an input axis."""
    if len(leading) != len(case.layout.leading) or leading[split.axis] % size:
        return False
    rows, before = leading[split.axis] // size, case.layout.leading[split.axis] // case.examples
    if rows == before:
        return True
    now, then = ([n for shape in shapes for n in shape] for shapes in (inputs, case.inputs))
    return inputs != case.inputs and any(rows * old == before * new for new, old in zip(now, then, strict=False))


def _count(along: OutputAxis, call: ModelCall, size: int | None) -> int | None:
    """The number of examples that a call has along an axis; None where it has no such axis."""
    shapes = call.inputs if along.part == INPUTS else call.outputs
    if size is not None:
        return size if any(along.fits(shape, size) for shape in shapes) else None
    if along.part in ("outer", "inner"):
        return None
    return next((shape[along.axis] for shape in shapes if along.axis < len(shape)), None)
