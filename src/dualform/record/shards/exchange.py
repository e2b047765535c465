r"""What processes that train together report to each other, and what follows from it.

Each process sees the slots of its own rows, and gradients to which all processes have added. Let S be the *sum* over
all N processes of a gradient as each of them has it. A backward pass adds the products of all slots to S;
``DistributedDataParallel``, which replaces every process's own gradient by the mean, leaves S as it is; and the
optimisers use :math:`S/N`. So a few watched entries are added up, and the sums are audited as the gradient of a single
process would be (``gradient_audit.py``).
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
    """A backward pass in one process: the watched entries of a gradient right after it, and before the step."""

    begins: tuple[int, ...]
    width: int
    after: WatchedValues
    later: WatchedValues | None
    left_over: bool


class RankReport(NamedTuple):
    """What a process reports to the others."""

    step: int
    columns: Mapping[str, str] | None
    passes: Mapping[tuple[int, str], Sequence[PassSummary]]
    batches: Sequence[tuple[int, int, int]]
    """The batches that steps used for the first time: step, number of the batch in it, number of examples."""
    bytes: int
    seconds: float


def summarize_pass(gradient_pass: PassGradient) -> PassSummary:
    """What other processes need to know of a pass."""
    watched, read = gradient_pass.watched, (gradient_pass.after, gradient_pass.later)
    after, later = (None if entries is None else watched.values([entries])[0] for entries in read)
    assert after is not None
    return PassSummary(watched.begins, watched.width, after, later, gradient_pass.left_over)


def require_agreement(reports: Sequence[RankReport]) -> None:
    """Raise an error unless all processes are at the same step and note the same columns."""
    steps = [report.step for report in reports]
    if len(set(steps)) > 1:
        raise RecordError(f"the processes have come to different steps: {steps}. {TOGETHER}")
    columns = [report.columns for report in reports if report.columns is not None]
    if any(types != columns[0] for types in columns):
        raise NoteError(f"the processes note different columns: {columns}. Note the same ones in all of them.")


class Exchange:
    """The reports of all processes at one moment, and what follows from them."""

    def __init__(self, ranks: Ranks, report: RankReport) -> None:
        self.ranks, self.reports = ranks, ranks.gather(report)
        require_agreement(self.reports)

    def audit(
        self, follower: GradientFollower, steps: Sequence[int], passes: Sequence[Sequence[PassGradient]], mark: OnMark
    ) -> list[GradientFactors]:
        """Audit the passes that each of some steps used up for a parameter, summed over all processes."""
        summed = [self._summed_passes(follower, step, own) for step, own in zip(steps, passes, strict=True)]
        common_factors = audit(follower, steps, summed, mark)
        own_factors = audit(follower, steps, passes, _ignore)
        return [
            GradientFactors(
                None if common.scale is None else common.scale / self.ranks.world,
                common.factors if len(common.factors) == len(own.factors) else own.factors,
                common.marked,
            )
            for common, own in zip(common_factors, own_factors, strict=True)
        ]

    def add_up(
        self, sums: dict[tuple[int, GradientFollower], ProbedSlots], followers: Mapping[str, GradientFollower]
    ) -> None:
        """Replace the probes of this process's slots by those of the slots of all processes."""
        keys = sorted({key for report in self.reports for key in report.passes})
        own = {(step, follower.name): probed for (step, follower), probed in sums.items()}
        parts = [own.get((step, name)) or _no_slots(followers[name]) for step, name in keys]
        numbers = [part.numbers.double() for part in parts]
        sizes = torch.tensor([[part.power, float(part.rows)] for part in parts], dtype=torch.float64)
        self.ranks.add_up([*numbers, sizes])
        for (step, name), part, total, (power, rows) in zip(keys, parts, numbers, sizes.tolist(), strict=True):
            sums[step, followers[name]] = ProbedSlots(total.to(part.numbers.dtype), power, int(rows), part.eps)

    def watched_places(self, name: str) -> tuple[tuple[int, ...], int] | None:
        """The entries of a gradient that the first process watches, so that all processes watch them."""
        passes = self.reports[0].passes
        last = max((step for step, parameter in passes if parameter == name and passes[step, parameter]), default=None)
        return None if last is None else passes[last, name][-1][:2]

    def without_slots(self, step: int, name: str) -> bool:
        """Whether no process had slots for a gradient."""
        return not any(report.passes.get((step, name)) for report in self.reports)

    def place(self, step: int, batch: int) -> tuple[int, int]:
        """Where the examples of a batch come among those of all processes: the number of visits before them since the
        last exchange, and the number of rows before them in the joint batch.
        """
        visits = rows = 0
        for rank, report in enumerate(self.reports):
            for s, b, size in report.batches:
                visits += size if (s, b, rank) < (step, batch, self.ranks.rank) else 0
                rows += size if (s, b) == (step, batch) and rank < self.ranks.rank else 0
        return visits, rows

    @property
    def visits(self) -> int:
        """The examples of all batches since the last exchange."""
        return sum(size for report in self.reports for _, _, size in report.batches)

    def _summed_passes(self, follower: GradientFollower, step: int, own: Sequence[PassGradient]) -> list[PassGradient]:
        """The passes of all processes, added up. If they watched different entries, those of the process that had the
        most passes.
        """
        lists = [report.passes.get((step, follower.name), ()) for report in self.reports]
        longest = max(lists, key=len)
        same = all(
            [(summary.begins, summary.width) for summary in summaries]
            == [(summary.begins, summary.width) for summary in longest]
            for summaries in lists
        )
        if not same:
            return [_summed_pass([summary._replace(left_over=False)]) for summary in longest]
        if longest:
            self._require_same_gradient(follower, [summaries[-1].later for summaries in lists])
        return [_summed_pass(summaries) for summaries in zip(*lists, strict=True)]

    @staticmethod
    def _require_same_gradient(follower: GradientFollower, later: Sequence[WatchedValues | None]) -> None:
        """Raise an error unless the optimisers of all processes used the same gradient."""
        gradients = [values for values in later if values is not None]
        if not gradients:
            return
        size = max(float(np.abs(values).max()) for values in gradients)
        if any(float(np.abs(values - gradients[0]).max()) > 64 * follower.eps * size for values in gradients):
            raise RecordError(
                f"the gradient of '{follower.name}' was not the same in all processes when their optimisers used it: "
                "they train different models. Wrap the model in DistributedDataParallel, or give each process a path "
                "of its own."
            )


def _summed_pass(summaries: Sequence[PassSummary]) -> PassGradient:
    """A pass as several processes saw it, added up."""
    first = summaries[0]
    return PassGradient(
        EntrySample(first.begins, first.width, torch.float64),
        _sum([summary.after for summary in summaries]) or b"",
        slots=[],
        probed=[],
        left_over=any(summary.left_over for summary in summaries),
        version=0,
        later=_sum([summary.later for summary in summaries]),
    )


def _no_slots(follower: GradientFollower) -> ProbedSlots:
    return ProbedSlots(follower.probe.nothing(), 0.0, 0, follower.eps)


def _sum(values: Sequence[WatchedValues | None]) -> bytes | None:
    arrays = [array for array in values if array is not None]
    return np.sum(arrays, axis=0).tobytes() if arrays else None


def _ignore(kind: str, name: str, message: str, step: int) -> Any:
    """The audit of the summed passes marks it."""
