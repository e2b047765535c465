"""How many examples must go until an answer flips? Found with scores, checked by training again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dualform.errors import QueryError, require

from .bootstrap import interval_of_mean
from .removal_runs import Retrains, train_each, without
from .scores import ScoreMatrix, as_matrix


@dataclass(frozen=True)
class Brittleness:
    """The smallest number of tried examples whose removal flips the answer (None: none of those tried does)."""

    removed: int | None
    tried: tuple[int, ...]


@dataclass(frozen=True)
class Flips:
    """The number of examples whose removal flips the answer to each query, up to ``most``."""

    removed: tuple[int | None, ...]
    """None: the removal of ``most`` examples does not flip it."""
    most: int
    trainings: int

    def share(self, count: int) -> float:
        """The share of answers that the removal of at most ``count`` examples flips."""
        return float(self._flipped_by(count).mean())

    def interval(self, count: int, seed: int = 0) -> tuple[float, float]:
        """A 95 % interval of :meth:`share`, by bootstrap over queries."""
        return interval_of_mean(self._flipped_by(count), seed)

    def _flipped_by(self, count: int) -> Float[Tensor, " queries"]:
        return torch.tensor([float(number is not None and number <= count) for number in self.removed])

    def __str__(self) -> str:
        low, high = self.interval(self.most)
        counts = sorted(number for number in self.removed if number is not None)
        half = (len(self.removed) - 1) // 2
        median = f"{counts[half]}" if len(counts) > half else f"more than {self.most}"
        return (
            f"{self.share(self.most):.0%} of {len(self.removed)} answers (95 % interval {low:.0%} to {high:.0%}) flip "
            f"when at most {self.most} examples go; the median answer needs {median}. {self.trainings} trainings."
        )

    def to_pandas(self) -> Any:
        pandas = require("pandas", "pandas")
        return pandas.DataFrame({"query": range(len(self.removed)), "removed": self.removed})


def flips(
    scores: ScoreMatrix,
    retrain: Retrains,
    most: int | None = None,
    *,
    flipped: Callable[[Float[Tensor, "... queries"]], Bool[Tensor, "... queries"]] = lambda margins: margins < 0,
) -> Flips:
    """For each query, the smallest number of its top examples without which its answer is another one.

    ``retrain`` gives the margins of the answers (above 0: as before); ``flipped`` says which values count as another
    answer. The number is found as by :func:`brittleness`, for all queries at once: each round of trainings runs in
    parallel if ``retrain`` comes from ``run.retraining(…)``.
    """
    matrix = as_matrix(scores)
    queries, examples = matrix.shape
    most = examples if most is None else min(most, examples)
    if most < 1:
        raise QueryError(f"most={most} must be 1 or more: the largest number of examples that are left out.")
    orders = matrix.argsort(1, descending=True)
    searches = [_Search(most) for _ in range(queries)]
    trainings = 0
    while active := [query for query, search in enumerate(searches) if search.next is not None]:
        weights = torch.stack([without(orders[query], searches[query].next or 0, examples) for query in active])
        values = flipped(train_each(retrain, weights))
        trainings += len(active)
        for line, query in enumerate(active):
            searches[query].take(bool(values[line, query]))
    return Flips(tuple(search.removed for search in searches), most, trainings)


def brittleness(
    scores: Float[Tensor, " examples"],
    flips: Callable[[Float[Tensor, " examples"]], bool],
    most: int | None = None,
) -> Brittleness:
    """Leave out the examples with the largest scores, and search for the smallest number that flips the answer.

    ``flips(weights)`` trains again with these weights of the examples and says whether the answer is another one. The
    search doubles the number until the answer flips, then halves the interval: it takes about 2 log₂(n) trainings, and
    assumes that more removals do not flip the answer back. :func:`flips` does so for many queries at once.
    """
    order = scores.argsort(descending=True)
    search, tried = _Search(len(scores) if most is None else min(most, len(scores))), list[int]()
    while search.next is not None:
        tried.append(search.next)
        search.take(flips(without(order, search.next, len(scores))))
    return Brittleness(search.removed, tuple(tried))


class _Search:
    """Doubles a number until it is enough, then halves the interval. ``next`` is the number to try, None at the end."""

    def __init__(self, most: int) -> None:
        self.low, self.high, self.most, self.is_enough = 0, 1, most, False

    @property
    def next(self) -> int | None:
        if not self.is_enough:
            return self.high if self.high > self.low else None
        return (self.low + self.high) // 2 if self.high - self.low > 1 else None

    @property
    def removed(self) -> int | None:
        return self.high if self.is_enough else None

    def take(self, enough: bool) -> None:
        """What came out for ``next``."""
        number = self.next
        assert number is not None
        if enough:
            self.high, self.is_enough = number, True
        elif self.is_enough:
            self.low = number
        else:
            self.low, self.high = number, min(2 * number, self.most)
