"""What probes have shown: in which way the user's calls count examples, and how the rows of each layer lie then."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..slots import ModelCall, Shapes
from .row_owners import MIXED, SELECTED, SHARED, AxisSplit
from .row_probe import INPUTS, OutputAxis, ProbeAnswer, RowLayout

OTHER_ROWS = "it has other rows than those that could be followed"
TWO_WAYS = "its rows can lie in two ways"


class ProbedCase(NamedTuple):
    """How rows lay in one probe, and the sizes it was made with."""

    lie: RowLayout
    examples: int
    inputs: Shapes

    @property
    def splits(self) -> frozenset[AxisSplit]:
        """The splits that the rows agreed with."""
        return frozenset() if isinstance(self.lie.rows, str) else self.lie.rows


class RowArrangements:
    """All answers of probes. ``axes`` are the axes of examples of the layers that know theirs, by module."""

    def __init__(self, axes: Mapping[str, int | None]) -> None:
        self._axes = axes
        self._cases: dict[tuple[str, OutputAxis], dict[tuple[str, int], dict[int, list[ProbedCase]]]] = {}
        """By the user's call and its way of counting: by the module and its map: by the number of the call."""
        self._scores: dict[str, dict[OutputAxis, int]] = {}
        """How many layers keep the examples apart, and how many find them along the axis that they know."""

    def learn(self, entry: ModelCall, answers: Sequence[ProbeAnswer]) -> None:
        """Take the answers of a probe."""
        scores = self._scores.setdefault(entry.path, {})
        for answer in answers:
            numbered = self._cases.setdefault((entry.path, answer.along), {})
            for (name, number, place), lie in answer.rows.items():
                cases = numbered.setdefault((name, place), {}).setdefault(number, [])
                cases.append(ProbedCase(lie, answer.examples, entry.inputs))
            agreeing = sum(self._agrees(name, lie) for (name, _, _), lie in answer.rows.items())
            scores[answer.along] = scores.get(answer.along, 0) + answer.apart + agreeing

    def _agrees(self, name: str, lie: RowLayout) -> bool:
        axis = self._axes[name]
        return axis is not None and not isinstance(lie.rows, str) and AxisSplit(axis, True) in lie.rows

    def of(self, entry: ModelCall, size: int | None) -> tuple[OutputAxis | None, int | None]:
        """In which way the user's call counts examples, and how many there are: the best one that has as many."""
        scores = {a: score for a, score in self._scores.get(entry.path, {}).items() if score or size is not None}
        counts = {along: _count(along, entry, size) for along in scores}
        best = max((score for along, score in scores.items() if counts[along] is not None), default=0)
        ways = [along for along, score in scores.items() if score == best and counts[along] is not None]
        if not ways or {"outer", "inner"} <= {along.part for along in ways}:
            return None, None  # some rows an example, and nothing tells in which order
        return ways[0], counts[ways[0]]

    def cases(self, path: str, along: OutputAxis, place: tuple[str, int], number: int | None) -> Iterator[ProbedCase]:
        """What was seen of one call of a module; of all its calls where that one is not known."""
        numbered = self._cases.get((path, along), {}).get(place, {})
        for cases in [numbered[number]] if number in numbered else numbered.values():
            yield from cases

    def anywhere(self, place: tuple[str, int]) -> Iterator[ProbedCase]:
        """What was seen of a module in all calls of the user, each counted in the best way."""
        for path, scores in self._scores.items():
            if scores:
                yield from self.cases(path, max(scores, key=lambda along: scores[along]), place, None)


def applied(cases: Sequence[ProbedCase], leading: Sequence[int], size: int, entry: ModelCall | None) -> int | str:
    """The stride of examples in the rows of a call, from what was seen of it before; or why it is not known."""
    reasons = {case.lie.rows for case in cases if isinstance(case.lie.rows, str)}
    if reasons:
        return SHARED if reasons == {SHARED} and not any(case.splits for case in cases) else (
            MIXED if reasons <= {MIXED, SHARED} and not any(case.splits for case in cases) else SELECTED
        )  # fmt: skip
    splits = frozenset.intersection(*(case.splits for case in cases))
    inputs = () if entry is None else entry.inputs
    strides = {
        split.stride(leading, size)
        for split in splits
        if any(_follows(split, case, leading, size, inputs) for case in cases)
    } - {None}
    if len(strides) == 1:
        return strides.pop() or 1
    return TWO_WAYS if strides else OTHER_ROWS if splits else SELECTED


def _follows(split: AxisSplit, case: ProbedCase, leading: Sequence[int], size: int, inputs: Shapes) -> bool:
    """Whether the rows an example has along an axis are those of a probe, or have grown like an axis of the inputs."""
    if len(leading) != len(case.lie.leading) or leading[split.axis] % size:
        return False
    rows, before = leading[split.axis] // size, case.lie.leading[split.axis] // case.examples
    if rows == before:
        return True
    now, then = ([n for shape in shapes for n in shape] for shapes in (inputs, case.inputs))
    return inputs != case.inputs and any(rows * old == before * new for new, old in zip(now, then, strict=False))


def _count(along: OutputAxis, entry: ModelCall, size: int | None) -> int | None:
    """How many examples a call has, counted in some way; None where it does not count so."""
    shapes = entry.inputs if along.part == INPUTS else entry.outputs
    if size is not None:
        return size if any(along.fits(shape, size) for shape in shapes) else None
    if along.part in ("outer", "inner"):
        return None
    return next((shape[along.axis] for shape in shapes if along.axis < len(shape)), None)
