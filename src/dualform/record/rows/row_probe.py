"""The probe: finds out on a shadow of the model to which example each row of each layer belongs.

The shadow runs on the arguments of a call that has just ended. The outputs are labelled along an axis that has as many
entries as there are examples, and the errors of all layers then show whose rows they are (``row_owners.py``). Where
several axes of the outputs have this length, the right one is the axis along which the network keeps the examples apart
(attention mixes along time); where it keeps them apart along all axes, the first one is taken.

Rows that the values of the batch select may look regular by chance. The shadow therefore also runs on scrambled
arguments, and only an arrangement that holds for these counts.
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
from .trial_call import CallPlace, TrialCall, without_trace

SCRAMBLED = 2
"""How many times the shadow runs on scrambled arguments."""


class OutputAxis(NamedTuple):
    """Where the outputs of a call count the examples: along one of the first axes, or along a part of the first one."""

    axis: int = 0
    part: str = "whole"

    def fits(self, shape: Sequence[int], examples: int) -> bool:
        """Whether an output of this shape counts the examples along this axis."""
        if self.part in ("outer", "inner"):
            return len(shape) > 0 and shape[0] > examples and shape[0] % examples == 0
        return self.axis < len(shape) and shape[self.axis] == examples

    def examples(self, shape: Sequence[int], examples: int) -> Int[Tensor, "..."] | None:
        """The example of each entry of an output of this shape, ready to be broadcast; None without such an axis."""
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
"""Where no axis of the outputs counts examples (the output is a loss), an axis of the inputs does."""


class RowLayout(NamedTuple):
    """How the rows of a call are arranged, and the leading axes in that probe."""

    rows: RowsOfExample
    leading: tuple[int, ...]

    def confirmed(self, second: "RowLayout | None") -> "RowLayout":
        """The layout on which this run agrees with a second one (None where that did not reach the rows)."""
        if second is None:
            return self
        if self.leading != second.leading:
            return RowLayout(SELECTED, self.leading)
        rows, again = self.rows, second.rows
        if isinstance(rows, str) or isinstance(again, str):
            return RowLayout(rows if rows == again else MIXED if MIXED in (rows, again) else SELECTED, self.leading)
        return RowLayout(rows & again or SELECTED, self.leading)


class ProbeAnswer(NamedTuple):
    """The layouts of all rows in a call, on the assumption that its outputs count the examples along one axis."""

    along: OutputAxis
    examples: int
    rows: Mapping[CallPlace, RowLayout]

    @property
    def apart(self) -> int:
        """The number of calls of layers that keep the examples apart."""
        return sum(not isinstance(layout.rows, str) for layout in self.rows.values())


def probe(
    module: nn.Module, recorded: Sequence[RecordedModule], args: tuple, kwargs: dict, noted: int | None
) -> list[ProbeAnswer]:
    """The layouts of the rows of all recorded layers, for each axis that may count the examples."""
    with without_trace(list(module.buffers())):
        return RowProbe(module, recorded).ask(args, kwargs, noted)


class RowProbe:
    """Runs the shadow of a module that the user has called."""

    def __init__(self, module: nn.Module, recorded: Sequence[RecordedModule]) -> None:
        self._module, self._recorded = module, recorded
        self._random = torch.Generator().manual_seed(0)

    def ask(self, args: tuple, kwargs: dict, noted: int | None) -> list[ProbeAnswer]:
        """The layouts of the rows of all recorded layers, for each axis that may count the examples."""
        self._state = torch.random.get_rng_state()
        first = self._trial(args, kwargs)
        axes = _candidate_axes([tuple(out.shape) for out in first.outputs], noted)
        answers = [ProbeAnswer(along, examples, self._rows(first, along, examples)) for along, examples in axes]
        answers = [answer for answer in answers if answer.rows]
        if not answers:
            return self._by_rolling(args, kwargs, noted)
        for trial, _ in self._scrambled_trials(args, kwargs):
            answers = [_confirmed(answer, self._rows(trial, answer.along, answer.examples)) for answer in answers]
        return [self._with_keys(answer, first, args, kwargs) for answer in answers]

    def _trial(self, args: tuple, kwargs: dict, evaluating: bool = False) -> TrialCall:
        """Run a new shadow with the same random numbers every time."""
        torch.random.set_rng_state(self._state)
        shadows = probe_shadow(self._module)
        for shadow in shadows.values() if evaluating else ():
            shadow.training = False
        pairs = [(shadows[recorded.module], recorded) for recorded in self._recorded if recorded.module in shadows]
        return TrialCall(shadows[self._module], pairs, args, kwargs)

    def _rows(self, trial: TrialCall, along: OutputAxis, examples: int) -> dict[CallPlace, RowLayout]:
        """The layouts of the rows of all calls that labels reach."""
        labels = draw_labels(examples, self._random)
        weights, labelled = [], []
        for out in trial.outputs:
            example = along.examples(out.shape, examples)
            weight = None if example is None else torch.randn(out.shape, generator=self._random)
            weights.append(weight)
            labelled.append(None if weight is None or example is None else weight * labels[example].to(weight))
        if all(weight is None for weight in weights):
            return {}
        plain, with_labels = trial.rows(weights), trial.rows(labelled)
        layouts = {}
        for place, (key, error) in plain.items():
            labelled_error = with_labels[place].error
            if error is not None and labelled_error is not None:
                rows = rows_by_labels(error, labelled_error, labels)
                if rows is not None:
                    layouts[place] = RowLayout(rows, tuple(key.shape[:-1]) or (1,))
        return layouts

    def _with_keys(self, answer: ProbeAnswer, trial: TrialCall, args: tuple, kwargs: dict) -> ProbeAnswer:
        """Add what only the inputs of layers show, when every example moves to the place of the next one. Rows with
        errors of several examples belong to all examples if their inputs do not change. Rows that no label reached
        move with their examples.
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
        """Find the layouts from the inputs: every example moves to the place of the next one, and its rows with it."""
        shapes = [tuple(t.shape) for t in _tensors(args, kwargs)]
        axes = {
            (OutputAxis(axis, INPUTS), noted or shape[axis]): None
            for shape in shapes
            for axis in AXES[:2]
            if axis < len(shape) and (shape[axis] == noted or (noted is None and axis == 0))
        }
        answers = []
        for along, examples in axes:
            if examples < 2:
                continue
            answer = ProbeAnswer(along, examples, self._rolled_rows(args, kwargs, along, examples))
            for _, scrambled in self._scrambled_trials(args, kwargs):
                answer = _confirmed(answer, self._rolled_rows(*scrambled, along, examples))
            if any(layout.rows != SHARED for layout in answer.rows.values()):  # else all examples are the same
                answers.append(answer)
        return answers

    def _rolled_rows(self, args: tuple, kwargs: dict, along: OutputAxis, examples: int) -> dict[CallPlace, RowLayout]:
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
        """Keys and errors of all calls in evaluation mode, where every output has the weight 1."""
        trial = self._trial(args, kwargs, evaluating=True)
        rows = trial.rows([torch.ones_like(out) for out in trial.outputs]) if trial.outputs else {}
        return {place: [key, error] for place, (key, error) in rows.items() if error is not None}

    def _scrambled_trials(self, args: tuple, kwargs: dict) -> Iterator[tuple[TrialCall, tuple[tuple, dict]]]:
        """Runs on scrambled arguments. Arguments that have to fit together may fail then; such a run is left out."""
        for _ in range(SCRAMBLED):
            scrambled = self._scrambled(args, kwargs)
            try:
                trial = self._trial(*scrambled)
            except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError):
                continue
            yield trial, scrambled

    def _scrambled(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with the entries of each tensor in random order."""

        def scramble(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            order = torch.randperm(value.numel(), generator=self._random).to(value.device)
            return value.detach().reshape(-1)[order].reshape(value.shape)

        return pytree.tree_map(scramble, (args, kwargs))


def _candidate_axes(shapes: Sequence[Sequence[int]], noted: int | None) -> list[tuple[OutputAxis, int]]:
    """The axes along which outputs of these shapes may count examples, with their number, the usual ones first."""
    axes: dict[tuple[OutputAxis, int], None] = {}
    for shape in shapes:
        for axis in AXES:
            if axis < len(shape) and (noted == shape[axis] or (noted is None and axis <= max(0, len(shape) - 2))):
                axes[OutputAxis(axis), shape[axis]] = None
        if noted and shape and shape[0] > noted and shape[0] % noted == 0:
            axes |= {(OutputAxis(0, "outer"), noted): None, (OutputAxis(0, "inner"), noted): None}
    return [(along, examples) for along, examples in axes if examples > 1]


def _confirmed(answer: ProbeAnswer, again: Mapping[CallPlace, RowLayout]) -> ProbeAnswer:
    return answer._replace(rows={place: layout.confirmed(again.get(place)) for place, layout in answer.rows.items()})


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _roll(args: tuple, kwargs: dict, examples: int, axis: int) -> tuple[tuple, dict]:
    """Move every example to the place of the next one, along ``axis`` or else the first axis of that length."""

    def roll(value: Any) -> Any:
        if isinstance(value, Tensor):
            for dim in (axis, *AXES):
                if dim < value.ndim and value.shape[dim] == examples:
                    return value.detach().roll(1, dim)
        return value

    return pytree.tree_map(roll, (args, kwargs))
