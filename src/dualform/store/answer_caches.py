"""What is computed from a memory and kept while it is open: one typed cache for each kind of answer.

A function that fills one of these caches and a function that reads it name the same attribute of
:class:`AnswerCaches`. An entry may be dropped at any time, when the shared budget is used up.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.rules import Coefficients
from dualform.types import ParameterSplit

from .cache import AnswerCache, CacheBudget
from .step_table import ParameterSteps

ViewKey = tuple[int, bytes | None]
"""A horizon, and the mask of visible visits as bits (None: all visits)."""


class CoefficientsKey(NamedTuple):
    """A parameter at a horizon; ``quantity`` is "weight", or "buffer" for the optimiser's buffer."""

    parameter: str
    horizon: int
    quantity: str


class KeySumsKey(NamedTuple):
    """The keys of a layer, added up by the groups of a column."""

    layer: str
    column: str
    groups: tuple[Any, ...]
    view: ViewKey
    signed: bool


class SplitKey(NamedTuple):
    """A parameter, split by the groups of a column."""

    parameter: str
    column: str
    groups: tuple[Any, ...]
    view: ViewKey


class LedgerKey(NamedTuple):
    """A ledger: the view it was made for, and the group of each visit as bytes."""

    view: ViewKey
    group_of_visit: bytes


@dataclass(frozen=True)
class LedgerParts:
    """The parts of a ledger at a horizon, with the visits up to it and the group of each visit.

    The last group is for unknown visits.
    """

    horizon: int
    visits: Int[np.ndarray, " v"]
    of_visit: Int[np.ndarray, " v"]
    parts: dict[str, ParameterSplit]

    def shown(self, visible: Bool[np.ndarray, " V"]) -> list[int] | None:
        """The groups that a mask shows; None where the mask splits a group, or hides some of the unknown visits."""
        groups = len(next(iter(self.parts.values())).groups)
        count = np.bincount(self.of_visit, minlength=groups)
        visible_count = np.bincount(self.of_visit, weights=visible[self.visits], minlength=groups).astype(int)
        if ((visible_count > 0) & (visible_count < count)).any() or visible_count[-1] < count[-1]:
            return None
        return np.flatnonzero(visible_count == count).tolist()


@dataclass(frozen=True)
class KroneckerFactors:
    r"""The eigenbases of a layer's inputs and errors, and the mean square of the examples' gradients in both.

    .. math:: K = U_K\,\mathrm{diag}\,U_K^\top,\quad E = U_E\,\mathrm{diag}\,U_E^\top,\quad
        \Lambda_{jk} = \frac1n \sum_i (U_E^\top G_i U_K)_{jk}^2

    A bias counts as one more input, which is always 1.
    """

    inputs: Float[Tensor, "c c"]
    errors: Float[Tensor, "d_out d_out"]
    squares: Float[Tensor, "d_out c"]


class AnswerCaches:
    """The caches of one open memory, over one shared budget of bytes."""

    def __init__(self, budget: CacheBudget | None = None) -> None:
        budget = CacheBudget() if budget is None else budget
        self.step_tables: AnswerCache[str, ParameterSteps] = AnswerCache(budget)
        """The steps of each parameter."""
        self.first_calls: AnswerCache[str, Int[np.ndarray, " s1"]] = AnswerCache(budget)
        """For each layer the first call of every shard, and the number of all calls."""
        self.slot_ends: AnswerCache[str, Int[np.ndarray, " s"]] = AnswerCache(budget)
        """For each layer the number of its slots up to the end of every shard."""
        self.coefficients: AnswerCache[CoefficientsKey, Coefficients] = AnswerCache(budget)
        """The coefficients of each parameter at a horizon."""
        self.column_groups: AnswerCache[str, tuple[tuple[Any, ...], Int[np.ndarray, " V"]]] = AnswerCache(budget)
        """The sorted values of each column of the visits, and the number of its value for each visit."""
        self.key_sums: AnswerCache[KeySumsKey, Float[Tensor, "G d_in"] | None] = AnswerCache(budget)
        """Sums of keys by group; None where they cannot be used because some entry is negative."""
        self.splits: AnswerCache[SplitKey, ParameterSplit] = AnswerCache(budget)
        """Single parameters, split by the groups of a column."""
        self.ledgers: AnswerCache[LedgerKey, LedgerParts] = AnswerCache(budget)
        """Ledgers of the whole memory; the weights under a mask may be read from them."""
        self.masked_ledgers: AnswerCache[LedgerKey, LedgerParts] = AnswerCache(budget)
        """Ledgers of a memory under a mask."""
        self.weights: AnswerCache[ViewKey, dict[str, Tensor]] = AnswerCache(budget)
        """Every parameter and buffer of the model, in its own precision."""
        self.exact_weights: AnswerCache[int, dict[str, Tensor]] = AnswerCache(budget)
        """For each horizon the explained parameters without a mask, in float64."""
        self.kronecker_factors: AnswerCache[str, KroneckerFactors] = AnswerCache(budget)
        """For each layer of a survey the factors at its last checkpoint."""
