r"""A test of the theorem on a real layer: solve the regression behind a head, and recover the head's values from it.

Targets are made from the head's keys k and values v, y_jd = f_d(k_j) + ε sign(v_jd), and the values are discarded. The
solution of the dual problem, divided by h(k_j), must equal the values, and attention with it must equal the head's
output (Nguyen et al. 2023, arXiv 2406.13781, Theorem 1). Where queries see different keys, each set of keys is a
regression of its own.

Targets determine the values only as far as the keys differ. W is unique in any case, so attention from the recovered
values equals the layer's even where the values themselves do not; ``condition`` says which of the two cases it is.
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
from .support_vectors import require_expansions

MOST_KEYS = 1024
"""The most keys that a regression may have: the time grows with the cube of their number."""


@dataclass(frozen=True)
class Proof:
    """The result of the test for one head of one example: the worst of its regressions.

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
        """Whether the targets determine the values to six digits in double precision."""
        return self.condition * ROUNDING < 1e-6

    @property
    def holds(self) -> bool:
        """Whether attention from the solved regression equals the layer's own to six digits."""
        return self.converged and self.output_error < 1e-6 and (self.value_error < 1e-5 or not self.determined)

    def __str__(self) -> str:
        many = "one regression" if self.regressions == 1 else f"{self.regressions} regressions, one a set of keys"
        doubt = "NOT shown to be" if self.determined else "not, in double precision, shown to be"
        verdict = "is" if self.holds else f"was {doubt}"
        state, distance = "solved" if self.converged else "NOT solved", f"{self.value_error:.1e} away"
        values = distance if self.determined else f"not determined by targets in double precision ({distance})"
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
    heads = require_expansions(layer, x, context)
    if not 0 <= head < heads.heads or not 0 <= example < len(x):
        raise QueryError(f"head {head} of example {example}: there are {heads.heads} heads and {len(x)} examples.")
    sequence = (None if tensor is None else tensor[example : example + 1].cpu() for tensor in (x, context, padding))
    data = _head_data(copy.deepcopy(heads).double().cpu().eval(), head, *sequence, causal=causal)
    epsilon = 0.05 * float(data.values.abs().mean()) if epsilon is None else epsilon
    trials = [_run_trial(key_set, epsilon, data.kernel) for key_set in _key_sets(data)]
    if not trials:
        raise QueryError(f"no query of example {example} sees a key, so there is no regression.")
    worst = {name: max(getattr(trial, name) for trial in trials) for name in _Trial._fields if name != "converged"}
    worst["output_error"] /= float(data.output.abs().max()) or 1.0
    converged = all(trial.converged for trial in trials)
    return Proof(
        head, example, data.kernel, len(data.values), len(trials), epsilon, converged=converged, **worst
    )  # fmt: skip


class _HeadData(NamedTuple):
    """One head on one sequence."""

    kernel: KernelName
    queries: Float[Tensor, "n d"]
    keys: Float[Tensor, "*n m d"]
    values: Float[Tensor, "m e"]
    hidden: Bool[Tensor, "n m"] | None
    output: Float[Tensor, "n e"]


class _KeySet(NamedTuple):
    """The data of one regression, and the head's output for the queries that see exactly these keys."""

    queries: Float[Tensor, "s d"]
    keys: Float[Tensor, "w d"]
    values: Float[Tensor, "w e"]
    output: Float[Tensor, "s e"]


class _Trial(NamedTuple):
    """The errors of one regression."""

    gap: float
    needed: float
    condition: float
    value_error: float
    output_error: float
    rounds: int
    converged: bool


@torch.no_grad()
def _head_data(layer: Heads, head: int, x: Any, context: Any, padding: Any, *, causal: bool) -> _HeadData:
    """The inputs and the output of one head."""
    x, context = x.double(), None if context is None else context.double()
    expansions = layer.expansions(x, context, padding=padding, causal=causal)
    expansion = next(group for group in expansions if head in group.heads)
    at = expansion.heads.index(head)
    hidden = None if expansion.hidden is None else expansion.hidden.expand(1, len(expansion.heads), -1, -1)[0, at]
    output = layer.head_outputs(x, context, padding=padding, causal=causal)[0, head]
    return _HeadData(
        expansion.kernel, expansion.queries[0, at], expansion.keys[0, at], expansion.values[0, at], hidden, output
    )


def _key_sets(data: _HeadData) -> Iterator[_KeySet]:
    """The data of a head's regressions: one for each distinct set of keys that a query sees."""
    n, m = len(data.queries), len(data.values)
    visible = torch.ones(n, m, dtype=torch.bool) if data.hidden is None else ~data.hidden
    apart = data.keys.ndim == 3  # each query has keys of its own
    kinds, of_query = (visible, torch.arange(n)) if apart else visible.unique(dim=0, return_inverse=True)
    for i, present in enumerate(kinds):
        rows, keys = of_query == i, data.keys[i] if apart else data.keys
        if bool(present.any()):
            yield _KeySet(data.queries[rows], keys[present], data.values[present], data.output[rows])


def _run_trial(key_set: _KeySet, epsilon: float, kernel: KernelName) -> _Trial:
    """Make the targets of one regression, solve it, and compare the recovered values and output with the head's."""
    if len(key_set.keys) > MOST_KEYS:
        raise QueryError(
            f"a regression on {len(key_set.keys):,} keys takes too long: the proof is for up to {MOST_KEYS:,}. Give a "
            "shorter sequence, or ask for support_vectors."
        )
    problem = Regression.planted(key_set.keys, key_set.values, epsilon=epsilon, kernel=kernel)
    solution = solve(problem)
    output = expand(key_set.queries, key_set.keys, solution.values, kernel=kernel)
    return _Trial(
        gap=solution.relative_gap,
        needed=float((key_set.values.abs().amax(1) * problem.log_normaliser.exp()).max()),
        condition=problem.condition,
        value_error=float((solution.values - key_set.values).norm()) / (float(key_set.values.norm()) or 1.0),
        output_error=float((output - key_set.output).abs().max()),
        rounds=solution.iterations,
        converged=solution.converged,
    )
