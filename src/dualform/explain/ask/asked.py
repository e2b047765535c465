"""What is asked in one go, and its answers."""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from jaxtyping import Float
from torch import Tensor

from dualform.engine import StoreView
from dualform.errors import QueryError
from dualform.types import Order, Per, Score

from ..answers import Groups, Timeline
from ..hits import HitOrigin, Hits, Summands
from ..query import Target

CHOICES = {
    "score": ("weight", "abs", "contribution"),
    "order": ("largest", "smallest", "magnitude"),
    "per": ("example", "visit", "slot"),
}


@dataclass(frozen=True)
class AskedQuestions:
    """Several questions at once: top hits (in each group of ``top_by``), sums ``by`` columns, a timeline."""

    view: StoreView
    top: int
    top_by: str | None
    by: tuple[str, ...]
    timeline: int
    timeline_by: str | None
    per: Per
    score: Score
    order: Order
    target: Target
    position: int | None
    places: bool
    after: int = 0
    """The last step that is left out; the ``view`` leaves it out already."""

    def require_sense(self, whole_network: bool) -> None:
        """Raise where an option is not known, or does not go together with others."""
        for option, choices in CHOICES.items():
            value = getattr(self, option)
            if value not in choices:
                raise QueryError(f"{option}={value!r} is not known; choose one of {list(choices)}.")
        require_count(0, "top", self.top)
        require_count(0, "timeline", self.timeline)
        if self.places and self.score == "contribution":
            raise QueryError("places=True is for weights α: say score='abs' or score='weight'.")
        if not whole_network:
            return
        if self.score != "contribution":
            raise QueryError(
                f"score={self.score!r} ranks by the weights α of one layer, and those of different layers do not add "
                "up: name a layer (layer=…), or ask for contributions."
            )
        if self.top and self.per == "slot":
            raise QueryError("per='slot' is about the rows of one layer: name it (layer=…), or ask per='visit'.")
        if self.position is not None:
            raise QueryError("position= is about the rows of one layer: name it (layer=…).")

    def hits_of(
        self, summands: Summands, sums: Float[Tensor, "n G1"], layer: str, target: str, left_out: tuple[str, ...],
        remark: str,
    ) -> "ScanAnswers":  # fmt: skip
        """The top examples or visits, from the sums of all of them."""

        def hits(of_name: int | None = None) -> Hits:
            group = None if of_name is None else summands.names[of_name]
            return summands.hits(
                sums, self.top, layer=layer, score=self.score, target=target, order=self.order, left_out=left_out,
                remark=remark, origin=HitOrigin(self.after, self.position, self.top_by, group), of_name=of_name,
            )  # fmt: skip

        if self.top_by is None:
            return ScanAnswers(hits(), {}, None, {})
        return ScanAnswers(None, {}, None, {name: hits(number) for number, name in enumerate(summands.names)})


@dataclass(frozen=True)
class ScanAnswers:
    """Several answers from one pass over the slots."""

    hits: Hits | None
    groups: dict[str, Groups]
    timeline: Timeline | None
    hits_by: dict[Any, Hits]
    """The top hits of each group."""

    def without_totals(self) -> "ScanAnswers":
        """The same without totals, where the first steps are left out: sums are not all parts of the whole."""
        groups = {column: replace(parts, initial=None, total=None) for column, parts in self.groups.items()}
        return replace(self, groups=groups)


def require_count(least: int, option: str, value: int) -> None:
    """Raise unless an option is a whole number that is large enough."""
    if not isinstance(value, Integral) or value < least:
        raise QueryError(f"{option}={value!r} cannot be; choose a whole number, {least} or more.")
