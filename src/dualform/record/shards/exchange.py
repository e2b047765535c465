r"""What processes that train together tell each other, and what follows from it.

Each of them sees the slots of its own rows, and gradients to which all have added. Let S be the *sum* over all
processes of a gradient as each of them has it. A backward pass adds to it the products of all slots; that
``DistributedDataParallel`` puts the mean in place of every process's own gradient leaves it as it is; and what the
optimisers use is :math:`S/N`. So a few watched entries are added up, and all that one process alone would look for
(``audit.py``) is looked for in the sums.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from dualform.errors import NoteError, RecordError
from dualform.store import EntrySample

from ..distributed import TOGETHER, Ranks
from ..verify import GradientFactors, GradientFollower, OnMark, PassGradient, ProbedSlots, audit

WatchedValues = Float[np.ndarray, " k"]


class PassSummary(NamedTuple):
    """A backward pass as one process saw it: the watched entries of a gradient, right after it and later."""

    begins: tuple[int, ...]
    width: int
    after: WatchedValues
    later: WatchedValues | None
    left_over: bool


class RankReport(NamedTuple):
    """What a process has to say."""

    step: int
    columns: Mapping[str, str] | None
    passes: Mapping[tuple[int, str], Sequence[PassSummary]]
    batches: Sequence[tuple[int, int, int]]
    """The batches that steps used for the first time: the step, which of its batches, how many examples."""
    bytes: int
    seconds: float


def summarize_pass(added: PassGradient) -> PassSummary:
    """A pass, for the others."""
    seen = added.watched
    after, later = (None if b is None else seen.values([b])[0] for b in (added.after, added.later))
    assert after is not None
    return PassSummary(seen.begins, seen.width, after, later, added.left_over)


def compare(said: Sequence[RankReport]) -> None:
    """See that all processes do the same."""
    steps = [each.step for each in said]
    if len(set(steps)) > 1:
        raise RecordError(f"the processes have come to different steps: {steps}. {TOGETHER}")
    columns = [each.columns for each in said if each.columns is not None]
    if any(each != columns[0] for each in columns):
        raise NoteError(f"the processes note different columns: {columns}. Note the same ones in all of them.")


class Exchange:
    """The processes have met, and know what each has to say."""

    def __init__(self, ranks: Ranks, mine: RankReport) -> None:
        self.ranks, self.said = ranks, ranks.gather(mine)
        compare(self.said)

    def audit(
        self, follower: GradientFollower, steps: Sequence[int], passes: Sequence[Sequence[PassGradient]], mark: OnMark
    ) -> list[GradientFactors]:
        """Look at the passes of a parameter that each of some steps used up, in all processes."""
        whole = [self._whole(follower, step, own) for step, own in zip(steps, passes, strict=True)]
        found = audit(follower, steps, whole, mark)
        own = audit(follower, steps, passes, _ignore)
        return [
            GradientFactors(
                None if each.scale is None else each.scale / self.ranks.world,
                each.factors if len(each.factors) == len(mine.factors) else mine.factors,
                each.marked,
            )
            for each, mine in zip(found, own, strict=True)
        ]

    def add_up(
        self, sums: dict[tuple[int, GradientFollower], ProbedSlots], followers: Mapping[str, GradientFollower]
    ) -> None:
        """Put what the slots of all processes put into the gradients in place of what those of this one did."""
        wanted = sorted({key for each in self.said for key in each.passes})
        mine = {(step, follower.name): probed for (step, follower), probed in sums.items()}
        parts = [mine.get((step, name)) or _nothing(followers[name]) for step, name in wanted]
        numbers = [part.numbers.double() for part in parts]
        sizes = torch.tensor([[part.power, float(part.rows)] for part in parts], dtype=torch.float64)
        self.ranks.add_up([*numbers, sizes])
        for (step, name), part, total, (power, rows) in zip(wanted, parts, numbers, sizes.tolist(), strict=True):
            sums[step, followers[name]] = ProbedSlots(total.to(part.numbers.dtype), power, int(rows), part.eps)

    def looks(self, name: str) -> tuple[tuple[int, ...], int] | None:
        """Where the first process looks at a gradient, so that all of them look there."""
        passes = self.said[0].passes
        last = max((step for step, other in passes if other == name and passes[step, other]), default=None)
        return None if last is None else passes[last, name][-1][:2]

    def without_slots(self, step: int, name: str) -> bool:
        """Whether no process had slots for a gradient."""
        return not any(each.passes.get((step, name)) for each in self.said)

    def place(self, step: int, batch: int) -> tuple[int, int]:
        """Where the examples of a batch come among those of all processes: the visits before them since the last
        meeting, and the rows before them in the batch that all make together.
        """
        visits = rows = 0
        for rank, each in enumerate(self.said):
            for s, b, size in each.batches:
                visits += size if (s, b, rank) < (step, batch, self.ranks.rank) else 0
                rows += size if (s, b) == (step, batch) and rank < self.ranks.rank else 0
        return visits, rows

    @property
    def visits(self) -> int:
        """The examples of all batches since the last meeting."""
        return sum(size for each in self.said for _, _, size in each.batches)

    def _whole(self, follower: GradientFollower, step: int, own: Sequence[PassGradient]) -> list[PassGradient]:
        """The passes of all processes, added up. Where these do not match, those of the one that had the most."""
        lists = [each.passes.get((step, follower.name), ()) for each in self.said]
        first = max(lists, key=len)
        same = all(
            [(each.begins, each.width) for each in some] == [(each.begins, each.width) for each in first]
            for some in lists
        )
        if not same:
            return [_pass([each._replace(left_over=False)]) for each in first]
        if first:
            self._see_same(follower, [some[-1].later for some in lists])
        return [_pass(some) for some in zip(*lists, strict=True)]

    @staticmethod
    def _see_same(follower: GradientFollower, later: Sequence[WatchedValues | None]) -> None:
        """The optimisers of all processes must have found the same gradient."""
        found = [each for each in later if each is not None]
        if not found:
            return
        size = max(float(np.abs(each).max()) for each in found)
        if any(float(np.abs(each - found[0]).max()) > 64 * follower.eps * size for each in found):
            raise RecordError(
                f"the gradient of '{follower.name}' was not the same in all processes when their optimisers used it: "
                "they train different models. Wrap the model in DistributedDataParallel, or give each process a path "
                "of its own."
            )


def _pass(seen: Sequence[PassSummary]) -> PassGradient:
    """What several processes saw of a pass, as one."""
    first = seen[0]
    return PassGradient(
        EntrySample(first.begins, first.width, torch.float64),
        _sum([each.after for each in seen]) or b"",
        slots=[],
        probed=[],
        left_over=any(each.left_over for each in seen),
        version=0,
        later=_sum([each.later for each in seen]),
    )


def _nothing(follower: GradientFollower) -> ProbedSlots:
    return ProbedSlots(follower.probe.nothing(), 0.0, 0, follower.eps)


def _sum(values: Sequence[WatchedValues | None]) -> bytes | None:
    known = [each for each in values if each is not None]
    return np.sum(known, axis=0).tobytes() if known else None


def _ignore(kind: str, name: str, message: str, step: int) -> Any:
    """Noticed elsewhere."""
