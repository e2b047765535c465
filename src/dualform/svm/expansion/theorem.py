r"""The theorem on a real layer: solve the regression that a head is the expansion of, and get its values back.

From the head's keys k and values v targets are planted, y_jd = f_d(k_j) + ε sign(v_jd), and the values forgotten. The
dual problem is solved; its solution, over h(k_j), must be the values again, and attention with them the head's output
(Nguyen et al. 2023, arXiv 2406.13781, Theorem 1). Where queries see different keys, each set of keys is a regression.

Targets only tell values apart as far as keys differ. W is unique in any case, so attention from the values that were
found is the layer's even where the values are not; ``condition`` says which of the two it is.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dualform.attention import Heads, KernelName, Padding
from dualform.errors import QueryError

from .expansion import expand
from .regression import ROUNDING, Regression
from .solver import solve
from .support_vectors import askable

LONGEST = 1024
"""Keys that a regression may have: time grows with the cube of their number."""


@dataclass(frozen=True)
class Proof:
    """How one head of one example stood the test; the worst of its regressions.

    ``gap`` is relative to the optimum. ``needed`` is the largest |θ| of the layer's values, so the least C.
    ``value_error`` is relative to the norm of the values, ``output_error`` to the largest output of the head.
    """

    head: int
    example: int
    kernel: KernelName
    keys: int
    regressions: int
    epsilon: float
    gap: float
    needed: float
    condition: float
    value_error: float
    output_error: float
    rounds: int
    converged: bool

    @property
    def determined(self) -> bool:
        """Whether the targets tell the values apart, to six digits in double precision."""
        return self.condition * ROUNDING < 1e-6

    @property
    def holds(self) -> bool:
        """Whether attention from the solved regression is the layer's own, to six digits."""
        return self.converged and self.output_error < 1e-6 and (self.value_error < 1e-5 or not self.determined)

    def __str__(self) -> str:
        many = "one regression" if self.regressions == 1 else f"{self.regressions} regressions, one a set of keys"
        doubt = "NOT shown to be" if self.determined else "not, in double precision, shown to be"
        verdict = "is" if self.holds else f"was {doubt}"
        state, found = "solved" if self.converged else "NOT solved", f"{self.value_error:.1e} away"
        values = found if self.determined else f"not determined by targets in double precision ({found})"
        return "\n".join([
            f"head {self.head}, example {self.example} {verdict} a support vector expansion "
            f"({self.kernel} kernel, {self.keys} keys, ε = {self.epsilon:.2g}; {many})",
            f"  gap / optimum        {self.gap:.1e}   {state} in {self.rounds} rounds",
            f"  C needed             {self.needed:.3g}",
            f"  values from θ        {values}",
            f"  attention from them  {self.output_error:.1e} away from the layer's output",
            f"  condition number     {self.condition:.1e}",
        ])  # fmt: skip


def prove(
    layer: nn.Module, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, head: int = 0,
    example: int = 0, padding: Padding = None, causal: bool = False, epsilon: float | None = None,
) -> Proof:  # fmt: skip
    """Solve the regression of one head on one sequence, in double precision. ``epsilon`` None: 5 % of its values."""
    heads = askable(layer, x, context)
    if not 0 <= head < heads.heads or not 0 <= example < len(x):
        raise QueryError(f"head {head} of example {example}: there are {heads.heads} heads and {len(x)} examples.")
    given = (None if each is None else each[example : example + 1].cpu() for each in (x, context, padding))
    data = _taken(copy.deepcopy(heads).double().cpu().eval(), head, *given, causal=causal)
    epsilon = 0.05 * float(data.values.abs().mean()) if epsilon is None else epsilon
    trials = [_tried(some, epsilon, data.kernel) for some in _sets(data)]
    if not trials:
        raise QueryError(f"no query of example {example} sees a key, so there is no regression.")
    worst = {name: max(getattr(trial, name) for trial in trials) for name in _Trial._fields if name != "converged"}
    worst["output_error"] /= float(data.output.abs().max()) or 1.0
    converged = all(trial.converged for trial in trials)
    return Proof(
        head, example, data.kernel, len(data.values), len(trials), epsilon, converged=converged, **worst
    )  # fmt: skip


class _Data(NamedTuple):
    """One head on one sequence."""

    kernel: KernelName
    queries: Float[Tensor, "n d"]
    keys: Float[Tensor, "*n m d"]
    values: Float[Tensor, "m e"]
    hidden: Bool[Tensor, "n m"] | None
    output: Float[Tensor, "n e"]


class _Set(NamedTuple):
    """The data of one regression, and the head's output for the queries that see just these keys."""

    queries: Float[Tensor, "s d"]
    keys: Float[Tensor, "w d"]
    values: Float[Tensor, "w e"]
    output: Float[Tensor, "s e"]


class _Trial(NamedTuple):
    """How one regression stood the test."""

    gap: float
    needed: float
    condition: float
    value_error: float
    output_error: float
    rounds: int
    converged: bool


@torch.no_grad()
def _taken(layer: Heads, head: int, x: Any, context: Any, padding: Any, *, causal: bool) -> _Data:
    """What a head sees, and what it gives."""
    x, context = x.double(), None if context is None else context.double()
    found = layer.expansions(x, context, padding=padding, causal=causal)
    each = next(group for group in found if head in group.heads)
    at = each.heads.index(head)
    hidden = None if each.hidden is None else each.hidden.expand(1, len(each.heads), -1, -1)[0, at]
    output = layer.head_outputs(x, context, padding=padding, causal=causal)[0, head]
    return _Data(each.kernel, each.queries[0, at], each.keys[0, at], each.values[0, at], hidden, output)


def _sets(data: _Data) -> Iterator[_Set]:
    """The regressions of a head: one for all queries, or one for each set of keys that some query sees."""
    n, m = len(data.queries), len(data.values)
    seen = torch.ones(n, m, dtype=torch.bool) if data.hidden is None else ~data.hidden
    apart = data.keys.ndim == 3  # each query has keys of its own
    kinds, of_query = (seen, torch.arange(n)) if apart else seen.unique(dim=0, return_inverse=True)
    for i, there in enumerate(kinds):
        mine, keys = of_query == i, data.keys[i] if apart else data.keys
        if bool(there.any()):
            yield _Set(data.queries[mine], keys[there], data.values[there], data.output[mine])


def _tried(some: _Set, epsilon: float, kernel: KernelName) -> _Trial:
    """Plant, solve, recover, compare."""
    if len(some.keys) > LONGEST:
        raise QueryError(
            f"a regression on {len(some.keys):,} keys takes too long: the proof is for up to {LONGEST:,}. Give a "
            "shorter sequence, or ask for support_vectors."
        )
    problem = Regression.planted(some.keys, some.values, epsilon=epsilon, kernel=kernel)
    solution = solve(problem)
    found = expand(some.queries, some.keys, solution.values, kernel=kernel)
    return _Trial(
        gap=solution.relative_gap,
        needed=float((some.values.abs().amax(1) * problem.log_normaliser.exp()).max()),
        condition=problem.condition,
        value_error=float((solution.values - some.values).norm()) / (float(some.values.norm()) or 1.0),
        output_error=float((found - some.output).abs().max()),
        rounds=solution.iterations,
        converged=solution.converged,
    )
