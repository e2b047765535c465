"""Attention is the support vector expansion of a regression: the theory of the specification, A1 to A6 and A8."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dualform.attention import SoftmaxAttention
from dualform.attention.masked_attention import attend, split_heads
from dualform.errors import SizeError
from dualform.svm import Regression, Solution, expand, polynomial_features, primal, solve, truncation_bound
from dualform.svm.expansion.expansion import log_kernel, log_normaliser
from dualform.svm.expansion.features import multi_indices

ROUNDING = torch.finfo(torch.float64).eps


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def short(q: Tensor, k: Tensor, longest: float = 2.0) -> tuple[Tensor, Tensor]:
    """Queries and keys scaled so that no score is larger."""
    scale = (float((q @ k.mT).abs().max()) / math.sqrt(q.shape[1]) / longest) ** 0.5
    return q / scale, k / scale


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """The layers' own, on the fused kernel."""
    return attend(q[None], k[None], v[None], hidden=None if hidden is None else hidden[None])[0]


def balanced(k: Tensor, v: Tensor) -> Tensor:
    """The nearest values with Σ h(k_j) v_j = 0."""
    h = log_normaliser(k, k).exp()
    return v - h.unsqueeze(1) * (h @ v) / (h @ h)


def away(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def assert_slack(solution: Solution, tolerance: float = 1e-9) -> None:
    """Complementary slackness, every case of §2.1, and that the bias is free where there is one."""
    problem, theta, epsilon, C = solution.problem, solution.theta, solution.problem.epsilon, solution.problem.C
    r = problem.targets - solution.fitted
    assert bool((theta.abs() <= C * (1 + ROUNDING)).all())
    bound = theta.abs() >= C * (1 - 1e-12)
    size = tolerance * max(1.0, float(problem.targets.abs().max()))
    inside, free = theta == 0, (theta != 0) & ~bound
    assert bool((r[inside].abs() <= epsilon + size).all())
    assert bool(((r - epsilon * theta.sign())[free].abs() <= size).all())
    assert bool((theta.sign() * r >= epsilon - size)[bound].all())
    if problem.with_bias:
        assert float(theta.sum(0).abs().max()) <= 1e-10 * max(1.0, float(theta.abs().max()))
    else:
        assert not bool(solution.bias.any())


# ---------------------------------------------------------------- A1, A2: features


def test_features_up_to_a_degree_give_the_kernel():
    q, k = short(random(5, 3), random(7, 3, seed=1))
    one, two = polynomial_features(q, 20), polynomial_features(k, 20)
    assert one.shape == (5, 1771)
    error = (one @ two.mT - log_kernel(q, k).exp()).abs()
    assert float(error.max()) < 1e-12
    for degree in range(21):
        one, two = polynomial_features(q, degree), polynomial_features(k, degree)
        error = (one @ two.mT - log_kernel(q, k).exp()).abs()
        assert bool((error <= truncation_bound(q, k, degree) + 1e-13).all())


@given(d=st.integers(1, 4), degree=st.integers(0, 6))
def test_there_is_one_feature_for_each_multi_index_and_low_degrees_come_first(d, degree):
    indices = multi_indices(d, degree)
    assert len(indices) == len(indices.unique(dim=0)) == math.comb(d + degree, degree)
    assert int(indices.sum(1).max()) == degree and bool((indices.sum(1).diff() >= 0).all())
    x = random(3, d)
    longer = polynomial_features(x, degree + 1)
    torch.testing.assert_close(polynomial_features(x, degree), longer[:, : len(indices)])
    roots = [math.sqrt(math.prod(math.factorial(n) for n in index)) for index in indices.tolist()]
    naive = torch.stack(
        [(x / d**0.25).pow(index).prod(1) / root for index, root in zip(indices, roots, strict=True)], 1
    )
    torch.testing.assert_close(longer[:, : len(indices)], naive)


def test_too_many_features_are_refused():
    with pytest.raises(SizeError, match=r"64 numbers have .* features up to degree 9"):
        polynomial_features(random(2, 64), 9)
    with pytest.raises(SizeError, match="degree=-1 must be 0 or more"):
        polynomial_features(random(2, 3), -1)


def test_primal_is_dual():
    """A layer with explicit features is softmax attention, the more the higher their degree."""
    q, k = short(random(5, 3), random(7, 3, seed=1))
    v, bias = random(7, 4, seed=2), random(4, seed=3)
    errors = [float((primal(q, k, v, t) - attention(q, k, v)).abs().max()) for t in (2, 4, 8, 12, 16, 24)]
    assert errors[-1] < 1e-12
    assert errors[:-1] == sorted(errors[:-1], reverse=True) and errors[-2] < 1e-9
    torch.testing.assert_close(expand(q, k, v), attention(q, k, v), atol=1e-14, rtol=0)
    torch.testing.assert_close(primal(q, k, v, 24, bias=bias), expand(q, k, v, bias=bias), atol=1e-12, rtol=0)


# ---------------------------------------------------------------- A3, A4: the round trip


@pytest.mark.parametrize("length", [0.3, 1.0, 2.0, 3.0])  # h(k) spans up to 14 orders of magnitude
def test_values_are_dual_variables(length):
    """Plant, forget, solve, recover."""
    k, v, q = length * random(6, 3), random(6, 4, seed=1), length * random(5, 3, seed=2)
    problem = Regression.planted(k, v, epsilon=0.05)
    solution = solve(problem)
    assert solution.converged and solution.relative_gap < 1e-12
    assert away(solution.values, v) < 1e-8
    torch.testing.assert_close(expand(q, k, solution.values), attention(q, k, v), atol=1e-10, rtol=0)
    h = log_normaliser(k, k).exp()
    closed = torch.linalg.solve(log_kernel(k, k).exp() / h / h.unsqueeze(1), problem.targets - 0.05 * v.sign())
    assert away(solution.theta, closed) < 1e-8


@given(
    n=st.integers(1, 9), d=st.integers(1, 4), length=st.floats(0.3, 2), epsilon=st.floats(0, 0.3), zeros=st.booleans(),
    bias=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_values_come_back_as_far_as_keys_tell_them_apart(n, d, length, epsilon, zeros, bias, seed):
    """Wherever: also with dual variables that are zero, and any target within ε there."""
    k, v = length * random(n, d, seed=seed), random(n, 3, seed=seed + 1)
    if zeros:
        v = v * (random(n, 3, seed=seed + 2) > 0)
    if bias and zeros:
        v = torch.zeros_like(v)
    shift = random(3, seed=seed + 3) if bias else None
    v = balanced(k, v) if bias else v
    inside = epsilon * (torch.rand(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5)
    targets = expand(k, k, v, bias=shift) + torch.where(v == 0, inside, epsilon * v.sign())
    solution = solve(Regression.of_keys(k, targets, epsilon=epsilon, with_bias=bias))
    condition = solution.problem.condition
    assert solution.converged
    assert_slack(solution)
    assert float((solution.values - v).norm()) <= 1e3 * ROUNDING * condition * (1 + float(v.norm()))
    if epsilon > 0.01 and condition < 1e8:  # targets well within the tube: zeros are zeros
        assert not bool(solution.theta[v == 0].any())


def test_both_problems_have_one_value():
    """½‖W‖² + penalty, with W written out, is what the dual problem says; θ = 0 coordinates included."""
    k, v = 0.7 * random(8, 3), random(8, 5, seed=1) * (random(8, 5, seed=2) > 0)
    targets = expand(k, k, v) + torch.where(v == 0, 0.02 * random(8, 5, seed=3).sign(), 0.05 * v.sign())
    for C in (math.inf, 1e3, 3.0, 0.1):
        solution = solve(Regression.of_keys(k, targets, epsilon=0.05, C=C))
        features = polynomial_features(k, 24) / log_normaliser(k, k).exp().unsqueeze(1)
        weight = solution.theta.mT @ features
        outside = ((targets - features @ weight.mT).abs() - 0.05).clamp(min=0)
        penalty = 0.0 if math.isinf(C) else C * float(outside.sum())
        value = float(weight.square().sum()) / 2 + penalty
        theta = solution.theta
        dual = float((-theta * (features @ weight.mT) / 2 - 0.05 * theta.abs() + targets * theta).sum())
        assert value == pytest.approx(dual, rel=1e-8) == pytest.approx(solution.primal, rel=1e-8)
        assert solution.dual == pytest.approx(dual, rel=1e-8)
        assert_slack(solution)
        if math.isinf(C):
            assert torch.equal(solution.support, v != 0)
            assert float(outside.max()) < 1e-12
        if C == 3.0:  # all three kinds of dual variables are there
            bound = theta.abs() >= 3 * (1 - 1e-12)
            assert bool(bound.any()) and bool((theta == 0).any()) and bool((~bound & (theta != 0)).any())


# ---------------------------------------------------------------- A5, A6: the box and the bias


def test_a_box_that_is_large_enough_changes_nothing_and_a_smaller_one_binds():
    k, v = random(6, 3), random(6, 4, seed=1)
    needed = float((v * log_normaliser(k, k).exp().unsqueeze(1)).abs().max())
    enough = solve(Regression.planted(k, v, epsilon=0.05, C=1.01 * needed))
    assert enough.converged and away(enough.values, v) < 1e-8
    small = solve(Regression.planted(k, v, epsilon=0.05, C=0.5 * needed))
    assert small.converged and away(small.values, v) > 0.05
    bound = (small.theta.abs() - 0.5 * needed).abs() < 1e-12 * needed
    assert bool(bound.any()) and bool((small.theta.abs() <= 0.5 * needed * (1 + ROUNDING)).all())
    assert torch.equal(small.theta.sign()[bound], v.sign()[bound])
    assert_slack(small)


def test_with_a_bias_balanced_values_come_back():
    """And so does the bias. Values that are not balanced cannot."""
    k, v, b, q = random(6, 3), random(6, 4, seed=1), random(4, seed=2), random(5, 3, seed=3)
    solution = solve(Regression.planted(k, balanced(k, v), epsilon=0.05, bias=b))
    assert solution.converged and away(solution.values, balanced(k, v)) < 1e-8
    torch.testing.assert_close(solution.bias, b, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        expand(q, k, solution.values, bias=solution.bias), attention(q, k, balanced(k, v)) + b, atol=1e-10, rtol=0
    )
    assert_slack(solution)
    other = solve(Regression.planted(k, v, epsilon=0.05, bias=b))
    assert other.converged and away(other.values, v) > 0.01
    assert_slack(other)


# ---------------------------------------------------------------- A8: other attentions from the same recipe


@given(seed=st.integers(0, 2**32 - 1))
def test_sparse_attention_is_a_regression_on_the_keys_that_a_query_sees(seed):
    q, k, v = random(4, 3, seed=seed), random(7, 3, seed=seed + 1), random(7, 2, seed=seed + 2)
    hidden = torch.rand(4, 7, generator=torch.Generator().manual_seed(seed)) < 0.5
    hidden[torch.arange(4), torch.arange(4)] = False
    found = attention(q, k, v, hidden)
    torch.testing.assert_close(expand(q, k, v, hidden=hidden), found, atol=1e-13, rtol=0)
    for i, there in enumerate(~hidden):
        solution = solve(Regression.planted(k[there], v[there], epsilon=0.05))
        torch.testing.assert_close(expand(q[i : i + 1], k[there], solution.values)[0], found[i], atol=1e-10, rtol=0)


def test_heads_are_regressions_whose_outputs_are_combined():
    """Multi-head attention is Σ_s W_O^s f^s."""
    torch.manual_seed(0)
    layer, x = SoftmaxAttention(12, 4).double(), random(1, 7, 12)
    q, k, v = (split_heads(each(x), 4)[0] for each in (layer.query, layer.key, layer.value))
    total = layer.out.bias.expand(7, 12)
    for s in range(4):
        solution = solve(Regression.planted(k[s], v[s], epsilon=0.01))
        total = total + expand(q[s], k[s], solution.values) @ layer.out.weight[:, 3 * s : 3 * s + 3].mT
    torch.testing.assert_close(total, layer(x)[0], atol=1e-10, rtol=0)


def test_a_residual_is_a_regression_on_what_is_left_of_the_targets():
    """F(x) = WΦ(x)/h(x) + x is fitted by subtracting the keys, and attention gains a skip."""
    k, v, q = random(6, 3), random(6, 3, seed=1), random(5, 3, seed=2)
    targets = attention(k, k, v) + k + 0.05 * v.sign()
    solution = solve(Regression.of_keys(k, targets - k, epsilon=0.05))
    torch.testing.assert_close(expand(q, k, solution.values) + q, attention(q, k, v) + q, atol=1e-10, rtol=0)
    assert float((targets - (solution.fitted + k)).abs().max()) <= 0.05 + 1e-12
