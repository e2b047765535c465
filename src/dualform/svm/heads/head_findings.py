r"""The report on one head: its selections, the matrix that separates them, and how the head's own matrix compares."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError

from ..separation import Separation, TwoParts
from .alignment import Alignment, Null, Spectrum
from .head_inputs import SingleHeadInputs, Space
from .saturation import Saturation


@dataclass(frozen=True)
class HeadReportOptions:
    """How a report is made.

    ``queries`` is the number of queries, sampled with ``seed`` from those whose largest weight is larger than
    ``above``. ``nuclear`` also solves in the nuclear norm, ``mixtures`` for several selected tokens per query; ``null``
    is the number of random matrices to compare with. A token of weight ``selected`` or more is selected, one of
    ``masked`` or less is masked. A search ends at its ``tolerance`` or after ``epochs``; then its results are bounds.
    """

    queries: int = 256
    above: float = 0.0
    nuclear: bool = True
    mixtures: bool = False
    null: int = 5
    selected: float = 1e-3
    masked: float = 1e-6
    tolerance: float = 1e-3
    epochs: int = 2000
    seed: int = 0
    space: Space | None = None

    def __post_init__(self) -> None:
        for name, least in (("queries", 1), ("null", 0), ("epochs", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value < 2**62:
                raise QueryError(f"{name}={value} must be a whole number, {least} or more.")
        if self.space not in (None, "model", "head") or not 0 <= self.above < 1 or not self.tolerance > 0:
            raise QueryError(
                f"space={self.space!r} is 'model' or 'head' (or None), above={self.above} from 0 to below 1, and "
                f"tolerance={self.tolerance} above 0."
            )
        if not 0 <= self.masked < self.selected <= 1:
            raise QueryError(f"masked={self.masked} must be below selected={self.selected}, both from 0 to 1.")


class SupportToken(NamedTuple):
    """A token that supports the margin of a query: the position of both, its multiplier, and its share of the sum."""

    sequence: int
    query: int
    token: int
    multiplier: float
    share: float


class Optimality(NamedTuple):
    """Whether selected tokens are the best ones, by first-order scores of a loss.

    ``better`` support tokens score above the selected one (none: the selection is locally optimal), in ``queries``
    queries; ``at_best`` is the share of queries that select the best token of all. The scores are an extension: the
    theory has a fixed linear head.
    """

    better: int
    queries: int
    at_best: float


@dataclass(frozen=True)
class HeadReport:
    """The report on one head. ``tied`` is the number of queries without a unique best token, which are left out.

    ``found`` and ``low`` compare the head's matrix with the separating one, in the Frobenius and in the nuclear norm.
    They are None where no matrix separates the tokens, which ``separation`` then proves, or none was found in time.
    """

    sight: SingleHeadInputs
    options: HeadReportOptions
    tied: int
    saturation: Saturation
    separation: Separation
    nuclear: Separation | None
    mixture: TwoParts | None
    found: Alignment | None
    low: Alignment | None
    null: Null
    optimality: Optimality | None
    items: Int[Tensor, "b m"] | None

    @property
    def head(self) -> int:
        """The head's number in the layer."""
        return self.sight.head

    @property
    def W(self) -> Float[Tensor, "x z"]:
        """The head's query-key matrix: the logit of token x for query z is xᵀWz."""
        return self.sight.W

    @property
    def selected(self) -> Int[Tensor, " c"]:
        """The token that each query attends to most."""
        return self.separation.problem.chosen

    @cached_property
    def margins(self) -> Float[Tensor, " r"]:
        """The margins of selected tokens over the others, for all queries and tokens, the smallest first."""
        margins = self.separation.problem.margins(self.W)
        return margins[margins.isfinite()].sort().values

    @cached_property
    def spectra(self) -> dict[str, Spectrum]:
        """Singular values of the head's own matrix and of the separating matrices."""
        matrices = {"own": self.W}
        matrices |= {} if self.found is None else {"frobenius": self.separation.W}
        matrices |= {} if self.low is None or self.nuclear is None else {"nuclear": self.nuclear.W}
        return {name: Spectrum.of(W) for name, W in matrices.items()}

    @property
    def above_null(self) -> float:
        """The cosine minus the mean cosine of random matrices."""
        return math.nan if self.found is None else self.found.cosine - self.null.cosine

    def support(self, k: int | None = None) -> list[SupportToken]:
        """The tokens that support the margin, the largest multiplier first."""
        if self.found is None:
            return []
        table = self.separation.multipliers
        at = (table > 0).nonzero()
        order = table[at[:, 0], at[:, 1]].argsort(descending=True, stable=True)[:k]
        total, inputs = float(table.sum()), self.sight
        return [
            SupportToken(
                int(inputs.sequence[i]), int(inputs.place[i]), int(t), float(table[i, t]), float(table[i, t]) / total
            )
            for i, t in at[order].tolist()
        ]

    def by_place(self) -> Float[Tensor, " m"]:
        """The share of all multipliers at each position of the sequence."""
        table = self._held
        return table.sum(0) / table.sum().clamp(min=1e-300)

    def by_item(self) -> dict[int, float]:
        """The share of all multipliers for each item (a word, a byte), the largest first; needs ``items=``."""
        if self.items is None:
            raise QueryError("this report has no items for its tokens: give report(…, items=…).")
        table = self._held
        items = self.items[self.sight.sequence]
        totals: dict[int, float] = {}
        for i, t in table.nonzero().tolist():
            totals[int(items[i, t])] = totals.get(int(items[i, t]), 0.0) + float(table[i, t] / table.sum())
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))

    @property
    def _held(self) -> Float[Tensor, "c m"]:
        """The multipliers; zeros where no matrix separates the tokens."""
        return self.separation.multipliers.clamp(min=0) * (self.found is not None)

    def row(self) -> dict[str, Any]:
        """The head's row in a table, by column."""
        none, own = math.nan, self.spectra["own"]
        return {
            "head": self.head,
            "space": self.sight.space,
            "queries": len(self.separation.problem.queries),
            "tied": self.tied,
            "above 0.9": self.saturation.above[0],
            "above 0.99": self.saturation.above[1],
            "above 0.999": self.saturation.above[2],
            "entropy": self.saturation.entropy,
            "ambiguous": self.saturation.ambiguous,
            "smallest margin": float(self.margins[0]),
            "median margin": float(self.margins.median()),
            "norm": float(self.W.norm()),
            "feasible": self.separation.feasible,
            "separating norm": self.separation.upper,
            "gap": self.separation.gap,
            "efficiency": none if self.found is None else self.found.efficiency.high,
            "efficiency at least": none if self.found is None else self.found.efficiency.low,
            "cosine": none if self.found is None else self.found.cosine,
            "cosine inside": none if self.found is None else self.found.inside,
            "null cosine": self.null.cosine,
            "null efficiency": self.null.efficiency,
            "nuclear norm": none if self.nuclear is None else self.nuclear.upper,
            "nuclear gap": none if self.nuclear is None else self.nuclear.gap,
            "nuclear efficiency": none if self.low is None else self.low.efficiency.high,
            "nuclear cosine": none if self.low is None else self.low.cosine,
            "rank": own.rank,
            "effective rank": own.effective,
            "separating rank": self.spectra["frobenius"].rank if "frobenius" in self.spectra else none,
            "nuclear rank": self.spectra["nuclear"].rank if "nuclear" in self.spectra else none,
            "support tokens": 0 if self.found is None else int(self.separation.support.sum()),
            "at best": none if self.optimality is None else self.optimality.at_best,
            "better supports": none if self.optimality is None else self.optimality.better,
        }
