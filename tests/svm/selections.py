"""Token selections to separate, and what others make of them: constraints written out as vectors."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import reject
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor
from torch.nn import functional as F


class Selection(NamedTuple):
    """The arguments of ``fit``."""

    tokens: Tensor
    queries: Tensor
    selected: Tensor

    def vectors(self, hidden: Tensor | None = None, sequence: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """φ = vec(δ zᵀ) of every constraint, and which query and token it is."""
        tokens = self.tokens if sequence is None else self.tokens[sequence]
        seen = ~F.one_hot(self.selected, tokens.shape[1]).bool()
        seen = seen if hidden is None else seen & ~hidden
        chosen = tokens[torch.arange(len(tokens)), self.selected]
        phi = torch.einsum("ntx,nz->ntxz", chosen.unsqueeze(1) - tokens, self.queries)
        return phi[seen].flatten(1), seen.nonzero()


def unit(n: int, T: int, d: int, seed: int = 0) -> Selection:
    """The paper's data: Gaussian tokens and queries of length 1; selected is what scores best along some v."""
    made = torch.Generator().manual_seed(seed)
    tokens, queries, v = (
        F.normalize(torch.randn(*shape, generator=made, dtype=torch.float64), dim=-1)
        for shape in ((n, T, d), (n, d), (d,))
    )
    signs = torch.randint(2, (n, 1), generator=made) * 2 - 1
    return Selection(tokens, queries, (signs * (tokens @ v)).argmax(1))


def made(n: int, T: int, dx: int, dz: int, whole: bool, seed: int) -> Selection:
    """Any selection; of whole numbers, so that tokens, queries and constraints occur more than once, or of any."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        found = torch.randn(*shape, generator=g, dtype=torch.float64)
        return found.round() if whole else found

    return Selection(draw(n, T, dx), draw(n, dz), torch.randint(T, (n,), generator=g))


SELECTIONS = st.builds(
    made, n=st.integers(1, 6), T=st.integers(2, 5), dx=st.integers(1, 5), dz=st.integers(1, 5), whole=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip


def separable(phi: Tensor) -> bool:
    """Whether a linear program finds a W."""
    found = linprog(np.zeros(phi.shape[1]), A_ub=-phi.numpy(), b_ub=-np.ones(len(phi)), bounds=(None, None))
    return found.status == 0


def surely(problem: Any) -> float:
    """The value of a problem of cvxpy; an example that its solver itself is not sure of is passed over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        value = problem.solve(solver="CLARABEL")
    if problem.status != "optimal":
        reject()
    return value


def by_cvxpy(phi: Tensor, shape: tuple[int, int], norm: str, C: float | None = None, loss: str = "hinge") -> Any:
    """The optimum and W, by an interior point method; with C the soft margin's."""
    cp = pytest.importorskip("cvxpy", reason="cvxpy is in the extra svm")
    W = cp.Variable(shape)
    met = phi.numpy() @ cp.vec(W, order="C")
    if C is None:
        goal = cp.Minimize(cp.norm(W, "fro" if norm == "frobenius" else "nuc"))
        value = surely(cp.Problem(goal, [met >= 1]))
    else:
        missed = cp.pos(1 - met)
        penalty = cp.sum(missed) if loss == "hinge" else cp.sum_squares(missed)
        value = surely(cp.Problem(cp.Minimize(cp.sum_squares(W) / 2 + C * penalty)))
    return value, torch.from_numpy(np.asarray(W.value))
