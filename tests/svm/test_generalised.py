"""Several selected tokens: a direction that scores them alike, and a finite part that fixes their weights."""

import pytest
import torch
from helpers import unchecked
from hypothesis import assume, given
from hypothesis import strategies as st
from selections import surely, unit
from torch import Tensor
from torch.nn import functional as F

from dualform.errors import QueryError, SizeError
from dualform.svm import TwoParts, fit, fit_generalised

SIZES = {"n": st.integers(1, 4), "T": st.integers(3, 5), "d": st.integers(3, 8), "seed": st.integers(0, 2**32 - 1)}


def mixed(n: int, T: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, queries, and attention weights of one to T − 1 tokens a query, the others below 1e-9."""
    g = torch.Generator().manual_seed(seed)
    tokens, queries, _ = unit(n, T, d, seed)
    weights = torch.rand(n, T, generator=g, dtype=torch.float64) + 0.1
    count = torch.randint(1, T, (n, 1), generator=g)
    weights = torch.where(torch.arange(T) < count, weights, 1e-9 * weights)
    return tokens, queries, F.normalize(weights[:, torch.randperm(T, generator=g)], p=1, dim=1)


def pairs(tokens: Tensor, queries: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, list[tuple[int, int, int]]]:
    """Constraints written out: of selected above masked tokens, and of selected tokens among themselves."""
    n, T = chosen.shape
    every = [(i, t, u) for i in range(n) for t in range(T) for u in range(T) if t != u and bool(chosen[i, t])]
    above = [(i, t, u) for i, t, u in every if not bool(chosen[i, u])]
    alike = [(i, t, u) for i, t, u in every if bool(chosen[i, u]) and t < u]

    def vectors(of: list[tuple[int, int, int]]) -> Tensor:
        made = [torch.outer(tokens[i, t] - tokens[i, u], queries[i]).flatten() for i, t, u in of]
        return torch.stack(made) if made else tokens.new_zeros(0, tokens.shape[2] * queries.shape[1])

    return vectors(above), vectors(alike), alike


@given(**SIZES)
def test_both_parts_are_the_smallest_that_meet_their_constraints(n, T, d, seed):
    cp = pytest.importorskip("cvxpy", reason="cvxpy is in the extra svm")
    tokens, queries, weights = mixed(n, T, d, seed)
    found = fit_generalised(tokens, queries, weights, tolerance=1e-8)
    assume(found.feasible and found.direction.upper < 1e3 and found.finite.upper < 1e3)
    above, alike, at = pairs(tokens, queries, found.selected)
    logs = torch.stack([(weights[i, t] / weights[i, u]).log() for i, t, u in at]) if at else torch.zeros(0).double()
    along, fixed = found.direction.W.flatten(), found.finite.W.flatten()
    assert float((above @ along).min()) >= 1 - 1e-6
    torch.testing.assert_close(alike @ along, torch.zeros_like(logs), atol=1e-6, rtol=0)
    torch.testing.assert_close(alike @ fixed, logs, atol=1e-6, rtol=1e-6)
    w = cp.Variable(d * d)
    equal = [alike.numpy() @ w == 0] if at else []
    value = surely(cp.Problem(cp.Minimize(cp.norm(w)), [above.numpy() @ w >= 1, *equal]))
    assert found.direction.upper == pytest.approx(value, rel=1e-4)
    if at:
        value = surely(cp.Problem(cp.Minimize(cp.norm(w)), [alike.numpy() @ w == logs.numpy()]))
        assert found.finite.upper == pytest.approx(value, rel=1e-4)


@given(**SIZES)
def test_one_selected_token_a_query_is_the_simple_problem(n, T, d, seed):
    tokens, queries, selected = unit(n, T, d, seed)
    weights = F.one_hot(selected, T).double()
    found, simple = fit_generalised(tokens, queries, weights), fit(tokens, queries, selected)
    assert found.feasible == simple.feasible
    if simple.feasible:
        torch.testing.assert_close(found.direction.W, simple.W, atol=1e-5 * simple.upper, rtol=0)
        assert not bool(found.finite.W.any()) and found.finite.gap == 0


@given(**SIZES, R=st.floats(0.1, 1e3))
def test_a_sum_of_both_parts_is_told_apart_again(n, T, d, seed, R):
    """W = W_fin + R W_dir gives attention whose mixture is the weights, and its own R."""
    tokens, queries, weights = mixed(n, T, d, seed)
    found = fit_generalised(tokens, queries, weights)
    assume(found.feasible)
    W = found.finite.W + R * found.direction.W
    assert found.scale(W) == pytest.approx(R, rel=1e-6)
    torch.testing.assert_close(found.predicted(W), W)
    attention = torch.einsum("ntx,xz,nz->nt", tokens, W, queries).masked_fill(~found.selected, -torch.inf).softmax(1)
    expected = F.normalize(weights * found.selected, p=1, dim=1)
    torch.testing.assert_close(attention, expected, atol=1e-3, rtol=0)  # an equality that R magnifies a thousandfold


def test_weights_that_no_matrix_gives_are_proved_to_be_so():
    """The same tokens and query, with two mixtures: the finite part has no solution, the direction has."""
    tokens, queries, _ = unit(1, 3, 4)
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]], dtype=torch.float64)
    found = fit_generalised(tokens.repeat(2, 1, 1), queries.repeat(2, 1), weights)
    assert found.direction.feasible and found.finite.feasible is False and found.feasible is False
    certificate = found.finite.certificate
    assert certificate is not None and certificate.relative < 1e-9
    with pytest.raises(QueryError, match="no W separates"):
        found.predicted(found.direction.W)


def test_tokens_between_the_thresholds_are_shown_and_left_out():
    tokens, queries, _ = unit(2, 4, 6)
    weights = torch.tensor([[0.7, 0.29, 1e-4, 1e-9], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    found = fit_generalised(tokens, queries, weights)
    assert isinstance(found, TwoParts) and found.ambiguous.nonzero().tolist() == [[0, 2]]
    assert found.selected.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert torch.isinf(found.direction.margins[0, 2]) and found.direction.support.nonzero()[:, 1].min() > 0


def test_where_everything_is_selected_there_is_no_direction():
    tokens, queries, _ = unit(2, 3, 6)
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64)
    found = fit_generalised(tokens, queries, weights)
    assert found.feasible and not bool(found.direction.W.any()) and found.scale(found.finite.W) == 0
    torch.testing.assert_close(torch.einsum("ntx,xz,nz->nt", tokens, found.finite.W, queries).softmax(1), weights)


X, Z, S = unit(2, 3, 4).tokens, unit(2, 3, 4).queries, torch.full((2, 3), 1 / 3)


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda: fit_generalised(X, Z, S, selected=1e-7), QueryError, "masked=1e-06 is below selected=1e-07"),
        (lambda: fit_generalised(X, Z, S, tolerance=0.0), QueryError, "tolerance=0.0 and epochs=20000 are larger"),
        (lambda: fit_generalised(X, Z, S[:1]), SizeError, r"weights are .*: these are \(1, 3\), and 2"),
        (lambda: fit_generalised(X, Z, -S), QueryError, "those of attention: 0 or more"),
        (lambda: fit_generalised(X, Z, S * 0), QueryError, "something above 0 for every query"),
    ],
)  # fmt: skip
def test_what_makes_no_mixture_is_refused_in_a_sentence(ask, error, words):
    with unchecked(), pytest.raises(error, match=words):
        ask()
