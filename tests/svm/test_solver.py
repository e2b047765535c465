"""The optimum is the optimum: by its own conditions, and as others find it, when nothing is planted."""

import math

import numpy as np
import pytest
import torch
from helpers import unchecked
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.svm import SVR
from torch import Tensor

from dualform.attention.expansion import KernelName
from dualform.errors import QueryError, SizeError
from dualform.svm import Regression, Solution, expand, solve
from dualform.svm.expansion.expansion import log_kernel, log_normaliser


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def objective(G: Tensor, y: Tensor, epsilon: float, theta: Tensor) -> float:
    """The dual objective, as it stands in the specification."""
    return float(((y - G @ theta / 2) * theta).sum() - epsilon * theta.abs().sum())


def gram(k: Tensor, kernel: KernelName = "exp") -> Tensor:
    """G_ij = Φ(k_i)ᵀΦ(k_j) / h(k_i) h(k_j)."""
    h = log_normaliser(k, k, kernel).exp()
    return log_kernel(k, k, kernel).exp() / h / h.unsqueeze(1)


def violation(solution: Solution) -> float:
    """By how much the best b and θ violate the conditions of Karush, Kuhn and Tucker; they are sufficient."""
    problem, theta = solution.problem, solution.theta
    r, bound = problem.targets - solution.fitted, problem.C * (1 - 1e-13)
    too_low = (r - torch.where(theta >= 0, problem.epsilon, -problem.epsilon)).where(theta < bound, -math.inf)
    too_high = (-r - torch.where(theta <= 0, problem.epsilon, -problem.epsilon)).where(theta > -bound, -math.inf)
    return max(0.0, float(too_low.max()), float(too_high.max()))


PROBLEMS = st.fixed_dictionaries({
    "n": st.integers(1, 12), "d": st.integers(1, 5), "length": st.floats(0.1, 3.0), "epsilon": st.floats(0, 0.5),
    "C": st.one_of(st.just(math.inf), st.floats(1e-3, 1e4)), "with_bias": st.booleans(),
    "kernel": st.sampled_from(["exp", "elu"]), "seed": st.integers(0, 2**32 - 1),
})  # fmt: skip


def made(n: int, d: int, length: float, seed: int, **options) -> tuple[Tensor, Regression]:
    k = length * random(n, d, seed=seed)
    return k, Regression.of_keys(k, random(n, 3, seed=seed + 1), **options)


@given(PROBLEMS)
def test_what_is_called_solved_is_optimal(options):
    k, problem = made(**options)
    solution = solve(problem)
    if options["C"] < math.inf:
        assert solution.converged
    assume(solution.converged)
    theta = solution.theta
    scale = max(1.0, float(problem.targets.abs().max()))
    slack = solution.gap / max(
        float(theta.abs().max()), 1e-12
    )  # a small dual variable may be as far off as the gap lets it
    assert violation(solution) <= 1e-6 * scale + 10 * slack
    value = objective(gram(k, options["kernel"]), problem.targets, options["epsilon"], theta)
    assert value == pytest.approx(solution.dual, rel=1e-6, abs=1e-9 * scale)
    assert solution.primal >= solution.dual - 1e-12 * abs(solution.primal)
    if options["with_bias"]:
        assert float(theta.sum(0).abs().max()) <= 1e-9 * max(1.0, float(theta.abs().max()))


@given(
    n=st.integers(2, 12), d=st.integers(1, 4), epsilon=st.floats(0.001, 0.4), C=st.floats(0.1, 50),
    normalised=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_scikit_learn_finds_the_same_with_a_bias(n, d, epsilon, C, normalised, seed):
    k, y = random(n, d, seed=seed), random(n, 2, seed=seed + 1)
    G = gram(k) if normalised else log_kernel(k, k).exp()
    h = log_normaliser(k, k).exp() if normalised else None
    matrix = log_kernel(k, k).exp()
    ours = solve(Regression.of_gram(matrix, y, epsilon=epsilon, C=C, with_bias=True, normaliser=h))
    assert ours.converged
    theirs = torch.zeros_like(y)
    for column in range(2):
        svr = SVR(kernel="precomputed", C=C, epsilon=epsilon, tol=1e-8).fit(G.numpy(), y[:, column].numpy())
        theirs[torch.from_numpy(svr.support_), column] = torch.from_numpy(svr.dual_coef_[0])
    best, other = (objective(G, y, epsilon, theta) for theta in (ours.theta, theirs))
    assert best >= other - 1e-6 * max(1.0, abs(other))
    assert best == pytest.approx(other, rel=1e-3, abs=1e-4)  # libsvm stops where its own tolerance lets it
    torch.testing.assert_close(G @ ours.theta, G @ theirs, atol=2e-2, rtol=0)  # W is unique


@given(
    n=st.integers(1, 9), d=st.integers(1, 4), epsilon=st.floats(0, 0.4), C=st.floats(0.1, 50), bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_scipy_finds_nothing_better(n, d, epsilon, C, bias, seed):
    k, y = random(n, d, seed=seed), random(n, 1, seed=seed + 1)
    ours = solve(Regression.of_keys(k, y, epsilon=epsilon, C=C, with_bias=bias))
    G, target = gram(k).numpy(), y[:, 0].numpy()

    def value(split: np.ndarray) -> tuple[float, np.ndarray]:
        theta = split[:n] - split[n:]
        slope = G @ theta - target
        return float(theta @ (slope - target) / 2 + epsilon * split.sum()), np.r_[slope + epsilon, -slope + epsilon]

    signs = np.r_[np.ones(n), -np.ones(n)]
    balance = [{"type": "eq", "fun": lambda split: signs @ split, "jac": lambda split: signs}] if bias else []
    found = minimize(value, np.zeros(2 * n), jac=True, bounds=[(0, C)] * (2 * n), constraints=balance, method="SLSQP",
                     options={"ftol": 1e-14, "maxiter": 500})  # fmt: skip
    assert -ours.dual <= found.fun + 1e-6 * max(1.0, abs(found.fun))
    if found.success:
        assert ours.dual == pytest.approx(-found.fun, rel=1e-5, abs=1e-6)


def test_the_gap_bounds_how_far_the_weights_are_off():
    """½‖W − W*‖² is no more than the gap, at every round: this is what makes it a stopping rule."""
    problem = Regression.of_keys(0.2 * random(40, 4), random(40, 3, seed=1), epsilon=0.1, C=1e4)
    best, last = solve(problem), math.inf
    assert best.converged and best.iterations > 3
    for rounds in range(best.iterations):
        solution = solve(problem, rounds=rounds)
        apart = solution.theta - best.theta
        distance = math.sqrt(max(0.0, float((apart * problem.fitted(apart)).sum())))
        assert distance <= solution.error + 1e-6 * math.sqrt(best.primal)
        assert solution.iterations == rounds and solution.relative_gap <= last
        last = solution.relative_gap


def test_columns_are_solved_one_by_one_as_together():
    k, y = random(20, 3), random(20, 4, seed=1)
    for bias in (False, True):
        together = solve(Regression.of_keys(k, y, epsilon=0.1, C=5.0, with_bias=bias))
        for i in range(4):
            alone = solve(Regression.of_keys(k, y[:, i : i + 1], epsilon=0.1, C=5.0, with_bias=bias))
            torch.testing.assert_close(alone.theta[:, 0], together.theta[:, i], atol=1e-8, rtol=1e-6)
            torch.testing.assert_close(alone.bias[0], together.bias[i], atol=1e-8, rtol=0)


def test_keys_of_very_different_length_are_told_apart():
    """h(k) spans six orders of magnitude, and values come back all the same."""
    k, v = (
        torch.linspace(0.3, 2.5, 8, dtype=torch.float64).unsqueeze(1) * random(8, 4).sign() * 1.5,
        random(8, 3, seed=1),
    )
    problem = Regression.planted(k, v, epsilon=0.02)
    h = problem.log_normaliser
    assert float(h.max() - h.min()) > math.log(1e5)
    solution = solve(problem)
    assert solution.converged
    assert float((solution.values - v).norm() / v.norm()) < 1e-14 * problem.condition + 1e-12


def test_targets_within_the_tube_need_no_support_vector():
    solution = solve(Regression.of_keys(random(5, 2), 0.1 * random(5, 3, seed=1).sign(), epsilon=0.2))
    assert solution.converged and not bool(solution.support.any()) and solution.primal == solution.dual == 0


def test_keys_that_are_the_same_with_targets_that_are_not():
    """With a box there is a best compromise; without one no function meets the targets, and it says so."""
    k, y = random(1, 3).expand(2, 3), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = solve(Regression.of_keys(k, y, epsilon=0.1, C=2.0))
    assert found.converged and violation(found) < 1e-12
    torch.testing.assert_close(found.theta, torch.tensor([[2.0], [-2.0]], dtype=torch.float64))
    endless = solve(Regression.of_keys(k, y, epsilon=0.1))
    assert not endless.converged and "NOT solved" in str(endless)


def test_a_finite_kernel_has_one_function_but_many_values():
    """φ has 3 numbers and there are 9 keys: values are not determined, W and so attention are."""
    k, v, q = random(9, 3), random(9, 2, seed=1), random(5, 3, seed=2)
    problem = Regression.planted(k, v, epsilon=0.05, kernel="elu")
    solution = solve(problem)
    assert problem.condition > 1e12 and solution.converged
    assert float((solution.values - v).abs().max()) > 0.01
    torch.testing.assert_close(expand(q, k, solution.values, kernel="elu"), expand(q, k, v, kernel="elu"),
                               atol=1e-10, rtol=0)  # fmt: skip


def test_a_solution_is_a_sentence():
    told = str(solve(Regression.planted(random(6, 3), random(6, 2, seed=1), epsilon=0.05)))
    assert told.startswith("regression on 6 keys, 2 columns: solved in ") and "6 support vectors" in told


# ---------------------------------------------------------------- what cannot work


K, Y = random(4, 2), random(4, 3, seed=1)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: Regression.of_keys(K, Y[:3]),
            SizeError,
            "there are 4 keys and 3 rows of targets: give one row for each",
        ),
        (lambda: Regression.planted(K, Y[:3], epsilon=0.1), SizeError, "4 keys and 3 rows"),
        (lambda: Regression.of_gram(K @ K.mT, Y[:2]), SizeError, "4 lines of the matrix and 2 rows"),
        (lambda: Regression.of_keys(K[:0], Y[:0]), SizeError, "nothing to fit"),
        (lambda: Regression.of_keys(K, Y, C=0.0), QueryError, "C=0.0 bounds the dual variables: .* larger than 0"),
        (lambda: Regression.of_keys(K, Y, C=-2.0), QueryError, "C=-2.0"),
        (lambda: Regression.of_keys(K, Y, C=math.nan), QueryError, "C=nan"),
        (lambda: Regression.of_keys(K, Y, epsilon=-0.1), QueryError, "epsilon=-0.1 is the half width"),
        (lambda: Regression.of_keys(K, Y, epsilon=math.inf), QueryError, "epsilon=inf"),
        (lambda: Regression.of_keys(K, Y * math.nan), QueryError, "the targets hold NaN or infinity"),
        (lambda: Regression.of_keys(K * math.nan, Y), QueryError, "the keys hold NaN or infinity"),
        (lambda: Regression.of_keys(K * 100, Y), QueryError, r"h\(k\) reaches e\^\d+: keys this long are beyond"),
        (lambda: Regression.of_gram(-K @ K.mT, Y), QueryError, "larger than 0"),
        (
            lambda: Regression.of_gram(torch.ones(4, 4).tril(), Y),
            QueryError,
            "not a kernel matrix: it must be symmetric",
        ),
        (lambda: Regression.of_gram(1 - 3 * (1 - torch.eye(4)), Y), QueryError, "no negative eigenvalues"),
        (lambda: Regression.of_gram(torch.eye(4), Y, normaliser=torch.zeros(4)), QueryError, "normaliser must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_solved_is_refused_in_a_sentence(make, error, words):
    with unchecked(), pytest.raises(error, match=words):
        make()
