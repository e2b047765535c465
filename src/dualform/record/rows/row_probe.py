"""The probe: how the rows of each layer follow the examples, found out on a shadow of the model.

The arguments of a call that has just run go through the shadow again. The outputs are labelled along an axis that has
as many entries as there are examples, and the errors of all layers show whose rows they are (``owners.py``). Which axis
of the outputs that is, is not known where several have this length: then the one along which the network keeps examples
apart (attention mixes along time), and the first one where it keeps all of them apart.

Rows that are selected by the values of the batch may lie as if they were not, by chance. So the shadow runs on
scrambled arguments, too, and what does not hold for them does not count.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..hooks import probe_shadow
from ..plan import RecordedModule
from .row_owners import MIXED, SELECTED, SHARED, RowsOfExample, draw_labels, rows_by_labels, rows_by_rolling
from .trial_call import CallPlace, TrialCall, apart

SCRAMBLED = 2
"""Runs on scrambled arguments."""


class OutputAxis(NamedTuple):
    """Where the outputs of a call count the examples: along one of the first axes, or along a part of the first."""

    axis: int = 0
    part: str = "whole"

    def fits(self, shape: Sequence[int], examples: int) -> bool:
        """Whether an output of some shape counts examples in this way."""
        if self.part in ("outer", "inner"):
            return len(shape) > 0 and shape[0] > examples and shape[0] % examples == 0
        return self.axis < len(shape) and shape[self.axis] == examples

    def examples(self, shape: Sequence[int], examples: int) -> Int[Tensor, "..."] | None:
        """The example of each entry of an output of some shape, ready to be broadcast; None where it has none."""
        if self.part != "whole" and self.fits(shape, examples):
            entries = torch.arange(shape[0])
            entries = entries // (shape[0] // examples) if self.part == "outer" else entries % examples
            return entries.reshape(-1, *[1] * (len(shape) - 1))
        for axis in (self.axis, *AXES):
            if axis < len(shape) and shape[axis] == examples:
                return torch.arange(examples).reshape(-1, *[1] * (len(shape) - axis - 1))
        return None


AXES = (0, 1, 2)

INPUTS = "inputs"
"""Where the outputs count no examples (a loss alone) the inputs do."""


class RowLayout(NamedTuple):
    """How the rows of a call lie, and the leading axes that they were seen with."""

    rows: RowsOfExample
    leading: tuple[int, ...]

    def confirmed(self, other: "RowLayout | None") -> "RowLayout":
        """What another run, in which the rows may not have been reached, agrees on."""
        if other is None:
            return self
        if self.leading != other.leading:
            return RowLayout(SELECTED, self.leading)
        one, two = self.rows, other.rows
        if isinstance(one, str) or isinstance(two, str):
            return RowLayout(one if one == two else MIXED if MIXED in (one, two) else SELECTED, self.leading)
        return RowLayout(one & two or SELECTED, self.leading)


class ProbeAnswer(NamedTuple):
    """How all rows of a call lie, if its outputs count the examples in some way."""

    along: OutputAxis
    examples: int
    rows: Mapping[CallPlace, RowLayout]

    @property
    def apart(self) -> int:
        """How many calls keep the examples apart."""
        return sum(not isinstance(lie.rows, str) for lie in self.rows.values())


def probe(
    module: nn.Module, recorded: Sequence[RecordedModule], args: tuple, kwargs: dict, noted: int | None
) -> list[ProbeAnswer]:
    """How the rows of all recorded layers lie, for each way in which the outputs may count the examples."""
    with apart(list(module.buffers())):
        return RowProbe(module, recorded).ask(args, kwargs, noted)


class RowProbe:
    """Runs the shadow of a module that the user has called."""

    def __init__(self, module: nn.Module, recorded: Sequence[RecordedModule]) -> None:
        self._module, self._recorded = module, recorded
        self._random = torch.Generator().manual_seed(0)

    def ask(self, args: tuple, kwargs: dict, noted: int | None) -> list[ProbeAnswer]:
        """How the rows of all recorded layers lie, for each way in which the outputs may count the examples."""
        self._state = torch.random.get_rng_state()
        first = self._trial(args, kwargs)
        ways = _ways([tuple(out.shape) for out in first.outputs], noted)
        answers = [ProbeAnswer(along, examples, self._rows(first, along, examples)) for along, examples in ways]
        answers = [answer for answer in answers if answer.rows]
        if not answers:
            return self._by_rolling(args, kwargs, noted)
        for other, _ in self._scrambles(args, kwargs):
            answers = [_confirmed(answer, self._rows(other, answer.along, answer.examples)) for answer in answers]
        return [self._with_keys(answer, first, args, kwargs) for answer in answers]

    def _trial(self, args: tuple, kwargs: dict, evaluating: bool = False) -> TrialCall:
        """Run a new shadow, with the same random numbers every time."""
        torch.random.set_rng_state(self._state)
        shadows = probe_shadow(self._module)
        for shadow in shadows.values() if evaluating else ():
            shadow.training = False
        pairs = [(shadows[each.module], each) for each in self._recorded if each.module in shadows]
        return TrialCall(shadows[self._module], pairs, args, kwargs)

    def _rows(self, trial: TrialCall, along: OutputAxis, examples: int) -> dict[CallPlace, RowLayout]:
        """How the rows of all calls lie that labels reach."""
        labels = draw_labels(examples, self._random)
        weights, labelled = [], []
        for out in trial.outputs:
            which = along.examples(out.shape, examples)
            weight = None if which is None else torch.randn(out.shape, generator=self._random)
            weights.append(weight)
            labelled.append(None if weight is None or which is None else weight * labels[which].to(weight))
        if all(weight is None for weight in weights):
            return {}
        plain, seen = trial.rows(weights), trial.rows(labelled)
        lies = {}
        for place, (key, error) in plain.items():
            other = seen[place].error
            if error is not None and other is not None:
                rows = rows_by_labels(error, other, labels)
                if rows is not None:
                    lies[place] = RowLayout(rows, tuple(key.shape[:-1]) or (1,))
        return lies

    def _with_keys(self, answer: ProbeAnswer, trial: TrialCall, args: tuple, kwargs: dict) -> ProbeAnswer:
        """What only the inputs of layers show, as each example takes the place of the next one: rows of several
        examples whose inputs stay as they are belong to all examples; and rows that no label reached follow.
        """
        before = trial.keys()
        open_places = [place for place in before if place not in answer.rows or answer.rows[place].rows == MIXED]
        axis = answer.along.axis
        inputs = [t.shape for t in _tensors(args, kwargs)]
        if not open_places or not any(axis < len(shape) and shape[axis] == answer.examples for shape in inputs):
            return answer
        after = self._trial(*_roll(args, kwargs, answer.examples, answer.along.axis)).keys()
        more = {}
        for place in open_places:
            rows = rows_by_rolling([before[place]], [after[place]], answer.examples) if place in after else SELECTED
            if rows == SHARED if place in answer.rows else not isinstance(rows, str):
                more[place] = RowLayout(rows, tuple(before[place].shape[:-1]) or (1,))
        return answer._replace(rows={**answer.rows, **more})

    # ------------------------------------------------------------------------------------- outputs without examples

    def _by_rolling(self, args: tuple, kwargs: dict, noted: int | None) -> list[ProbeAnswer]:
        """The same from the inputs: each example takes the place of the next one, and rows follow."""
        shapes = [tuple(t.shape) for t in _tensors(args, kwargs)]
        ways = {
            (OutputAxis(axis, INPUTS), noted or shape[axis]): None
            for shape in shapes
            for axis in AXES[:2]
            if axis < len(shape) and (shape[axis] == noted or (noted is None and axis == 0))
        }
        answers = []
        for along, examples in ways:
            if examples < 2:
                continue
            answer = ProbeAnswer(along, examples, self._follow(args, kwargs, along, examples))
            for _, scrambled in self._scrambles(args, kwargs):
                answer = _confirmed(answer, self._follow(*scrambled, along, examples))
            if any(lie.rows != SHARED for lie in answer.rows.values()):  # else all examples are the same
                answers.append(answer)
        return answers

    def _follow(self, args: tuple, kwargs: dict, along: OutputAxis, examples: int) -> dict[CallPlace, RowLayout]:
        before = self._evaluated(args, kwargs)
        after = self._evaluated(*_roll(args, kwargs, examples, along.axis))
        return {
            place: RowLayout(
                rows_by_rolling(before[place], after[place], examples), tuple(before[place][0].shape[:-1]) or (1,)
            )
            for place in before
            if place in after
        }

    def _evaluated(self, args: tuple, kwargs: dict) -> dict[CallPlace, list[Tensor]]:
        trial = self._trial(args, kwargs, evaluating=True)
        seen = trial.rows([torch.ones_like(out) for out in trial.outputs]) if trial.outputs else {}
        return {place: [key, error] for place, (key, error) in seen.items() if error is not None}

    def _scrambles(self, args: tuple, kwargs: dict) -> Iterator[tuple[TrialCall, tuple[tuple, dict]]]:
        """Runs on scrambled arguments; some have to fit together, and do not when scrambled."""
        for _ in range(SCRAMBLED):
            scrambled = self._scrambled(args, kwargs)
            try:
                trial = self._trial(*scrambled)
            except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError):
                continue
            yield trial, scrambled

    def _scrambled(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """All entries of each tensor in another order."""

        def scramble(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            order = torch.randperm(value.numel(), generator=self._random).to(value.device)
            return value.detach().reshape(-1)[order].reshape(value.shape)

        return pytree.tree_map(scramble, (args, kwargs))


def _ways(shapes: Sequence[Sequence[int]], noted: int | None) -> list[tuple[OutputAxis, int]]:
    """How outputs of some shapes may count the examples, what is usual first."""
    ways: dict[tuple[OutputAxis, int], None] = {}
    for shape in shapes:
        for axis in AXES:
            if axis < len(shape) and (noted == shape[axis] or (noted is None and axis <= max(0, len(shape) - 2))):
                ways[OutputAxis(axis), shape[axis]] = None
        if noted and shape and shape[0] > noted and shape[0] % noted == 0:
            ways |= {(OutputAxis(0, "outer"), noted): None, (OutputAxis(0, "inner"), noted): None}
    return [(along, examples) for along, examples in ways if examples > 1]


def _confirmed(answer: ProbeAnswer, again: Mapping[CallPlace, RowLayout]) -> ProbeAnswer:
    return answer._replace(rows={place: lie.confirmed(again.get(place)) for place, lie in answer.rows.items()})


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _roll(args: tuple, kwargs: dict, examples: int, axis: int) -> tuple[tuple, dict]:
    """Each example in the place of the next one, along the axis that counts examples or the first of their number."""

    def roll(value: Any) -> Any:
        if isinstance(value, Tensor):
            for dim in (axis, *AXES):
                if dim < value.ndim and value.shape[dim] == examples:
                    return value.detach().roll(1, dim)
        return value

    return pytree.tree_map(roll, (args, kwargs))
