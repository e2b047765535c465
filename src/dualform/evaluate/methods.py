"""All methods side by side: the LDS of each with its interval, and what it cost."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualform.errors import QueryError, require

from .lds import Correlation, lds
from .removal_runs import RemovalRuns, average_runs
from .scores import ScoreMatrix


@dataclass(frozen=True)
class MethodTable:
    """The linear datamodeling score of each method on the same runs, and the CPU seconds that its scores took."""

    correlations: dict[str, Correlation]
    seconds: dict[str, float]
    """Of the methods whose seconds are known."""

    def __str__(self) -> str:
        width = max(map(len, self.correlations))
        lines = [f"{'method':{width}s}    LDS    95 % interval   CPU seconds"]
        for name, result in self.correlations.items():
            seconds = f"{self.seconds[name]:11.2f}" if name in self.seconds else f"{'–':>11s}"
            lines.append(f"{name:{width}s} {result.mean:+.3f} {result.low:+.3f} to {result.high:+.3f}   {seconds}")
        return "\n".join(lines)

    def to_pandas(self) -> Any:
        """A table with one line for each method."""
        pandas = require("pandas", "pandas")
        return pandas.DataFrame(
            [
                {
                    "method": name,
                    "lds": part.mean,
                    "low": part.low,
                    "high": part.high,
                    "seconds": self.seconds.get(name),
                }
                for name, part in self.correlations.items()
            ]
        )


def table(
    scores: Mapping[str, ScoreMatrix | Callable[[], ScoreMatrix]],
    runs: RemovalRuns | Sequence[RemovalRuns],
    seconds: Mapping[str, float] | None = None,
    seed: int = 0,
) -> MethodTable:
    """Judge several methods by the same runs.

    A method may be a function without arguments that computes its scores: its CPU seconds (of this process) are then
    measured; ``seconds`` gives those of others. Lists of scores and of runs are averaged, as in :func:`lds`.
    """
    if not scores:
        raise QueryError("there are no scores to judge: pass {'name of the method': its scores, …}.")
    truth = runs if isinstance(runs, RemovalRuns) else average_runs(runs)
    correlations, measured = {}, dict(seconds or {})
    for name, part in scores.items():
        if callable(part):
            start = time.process_time()
            part = part()
            measured[name] = time.process_time() - start
        correlations[name] = lds(part, truth, seed)
    return MethodTable(correlations, measured)
