"""Separating selected tokens, Frobenius norm: exact instances, optimality, certificates, and laws of the solver.

Numbers of checks are those of the specification (attention as a support vector machine, section 8).
"""

import math
import subprocess
import sys
import time
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import unchecked
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import nnls
from selections import SELECTIONS, Selection, by_cvxpy, made, separable, unit
from torch import Tensor

from dualform.errors import QueryError, SizeError
from dualform.svm import Separation, fit

TIGHT = 1e-9
"""A gap so small that two solutions are the same to four digits, since ‖W − W*‖² ≤ 2 gap ‖W‖²."""


def same(one: Separation, two: Separation, W: Tensor | None = None) -> None:
    """Both are the same answer; W is the first one's, as the second should have it."""
    assert one.feasible is not None and one.feasible == two.feasible
    if one.feasible:
        assert one.converged and two.converged
        expected = one.W if W is None else W
        assert float((expected - two.W).norm()) <= 1e-4 * float(expected.norm())


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# ---------------------------------------------------------------- exact instances


@given(SELECTIONS)
def test_one_constraint_is_met_along_itself(one):
    """W = δzᵀ/(‖δ‖²‖z‖²), of norm 1/(‖δ‖‖z‖) in both norms."""
    tokens, z = one.tokens[:1, :2], one.queries[:1]
    delta = tokens[0, 0] - tokens[0, 1]
    assume(bool(delta.any()) and bool(z.any()))
    for norm in ("frobenius", "nuclear"):
        found = fit(tokens, z, torch.tensor([0]), norm)
        torch.testing.assert_close(found.W, torch.outer(delta, z[0]) / (delta @ delta) / (z @ z.mT).squeeze())
        assert found.upper == pytest.approx(1 / float(delta.norm() * z.norm()))


def test_the_identity_separates_two_axes():
    """Frobenius: W11 ≥ 1 and W22 ≥ 1."""
    tokens = torch.stack([torch.stack([axis, 0 * axis]) for axis in torch.eye(2, dtype=torch.float64)])
    found = fit(tokens, torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(found.W, torch.eye(2, dtype=torch.float64))
    assert found.upper == pytest.approx(math.sqrt(2))


def test_a_row_that_asks_for_a_sum_is_met_in_equal_parts():
    """Frobenius: W11 ≥ 1 and W21 + W22 ≥ 1."""
    tokens = torch.stack([torch.stack([axis, 0 * axis]) for axis in torch.eye(2, dtype=torch.float64)])
    found = fit(tokens, torch.stack([vector(1, 0), vector(1, 1)]), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(found.W, torch.stack([vector(1, 0), vector(0.5, 0.5)]))
    assert found.upper == pytest.approx(1.224745, abs=1e-6) and found.rank() == 2


def test_a_token_can_be_selected_well_that_is_not_the_best():
    """In both selections only the third token is support."""
    tokens = torch.stack([vector(0, -5, 0.1), vector(0, 1, 0.05), vector(0, 0, 0)]).unsqueeze(0)
    z = vector(1, 0, 0).unsqueeze(0)
    for chosen, column, other, margin in ((0, (0, -0.19992, 0.004), 1, 1.1997), (1, (0, 0.99751, 0.04988), 0, 5.9825)):
        found = fit(tokens, z, torch.tensor([chosen]))
        torch.testing.assert_close(found.W[:, 0], vector(*column), atol=1e-4, rtol=0)
        assert not bool(found.W[:, 1:].any())
        assert found.support.tolist() == [[False, False, True]]
        assert float(found.margins[0, other]) == pytest.approx(margin, abs=1e-3)


# ---------------------------------------------------------------- the optimum is the optimum


def test_twenty_random_problems_are_solved_in_seconds():
    """On 50 queries of 16 tokens, 32 numbers each; the reference is the exact least-distance form."""
    problems = [unit(50, 16, 32, seed) for seed in range(20)]
    fit(*problems[0])  # compiles
    begin = time.perf_counter()
    answers = [fit(*problem) for problem in problems]
    assert time.perf_counter() - begin < 5
    for found in answers:
        assert found.gap <= 1e-6 and float(found.margins.min()) >= 1 - 1e-6
    for problem, found in list(zip(problems, answers, strict=True))[:3]:
        phi, _ = problem.vectors()
        matrix = np.vstack([phi.numpy().T, np.ones(len(phi))])
        target = np.r_[np.zeros(phi.shape[1]), 1.0]
        residual = matrix @ nnls(matrix, target, maxiter=10_000)[0] - target
        w = torch.from_numpy(-residual[:-1] / residual[-1])
        assert found.upper == pytest.approx(float(w.norm()), rel=1e-5)
        assert 1 - float(torch.cosine_similarity(found.W.flatten(), w, dim=0)) <= 1e-6


@given(SELECTIONS)
def test_answers_are_those_of_other_solvers(problem):
    """Feasible or not by a linear program, and the optimum by an interior point method."""
    phi, _ = problem.vectors()
    found = fit(*problem)
    assert found.feasible is separable(phi)
    if found.feasible and found.upper < 1e3:
        value, W = by_cvxpy(phi, (problem.tokens.shape[2], problem.queries.shape[1]), "frobenius")
        assert found.upper == pytest.approx(value, rel=1e-5) and found.converged
        assert 1 - float(torch.cosine_similarity(found.W.flatten(), W.flatten(), dim=0)) <= 1e-5


@given(SELECTIONS)
def test_solutions_meet_the_conditions_of_karush_kuhn_and_tucker(problem):
    """W is rebuilt from the multipliers, margins are 1 or more, and slack ones have no multiplier."""
    found = fit(*problem, tolerance=TIGHT)
    assume(found.feasible)
    phi, at = problem.vectors()
    multipliers = found.multipliers[at[:, 0], at[:, 1]]
    size = float(found.W.norm())
    torch.testing.assert_close((multipliers @ phi).view_as(found.W), found.W, atol=1e-8 * size, rtol=0)
    margins = phi @ found.W.flatten()
    torch.testing.assert_close(found.margins[at[:, 0], at[:, 1]], margins, atol=1e-9 * size, rtol=1e-9)
    assert float(multipliers.min()) >= 0 and float(margins.min()) >= 1 - 1e-9
    assert float((multipliers * (margins - 1)).max()) <= 1e-6 * max(1.0, size**2)


@given(SELECTIONS, st.integers(0, 3))
def test_the_bounds_hold_at_every_moment(problem, rounds):
    """lower ≤ optimum ≤ upper, however early the search ends; the bounds are what their formulas say."""
    best, early = fit(*problem, tolerance=TIGHT), fit(*problem, epochs=1 + 5 * rounds, tolerance=1e-15)
    assume(best.feasible and early.feasible is not False)
    assert early.lower <= best.upper * (1 + 1e-9) and early.upper >= best.lower * (1 - 1e-9)
    assert early.lower == pytest.approx(float(early.multipliers.sum() / early.W.norm()))
    if early.feasible:
        assert early.upper == pytest.approx(float(early.W.norm() / early.margins.min()))
        assert early.gap == pytest.approx(1 - early.lower / early.upper, abs=1e-12)


def test_an_answer_that_is_not_finished_says_so():
    found = fit(*unit(50, 16, 32), epochs=1, tolerance=1e-9)
    assert not found.converged and ("NOT solved" in str(found) or "not decided" in str(found))


@given(problem=SELECTIONS, C=st.floats(0.01, 100), loss=st.sampled_from(["hinge", "squared"]))
def test_a_soft_margin_has_a_solution_for_every_selection(problem, C, loss):
    phi, _ = problem.vectors()
    found = fit(*problem, C=C, loss=loss, tolerance=1e-8)
    assert found.feasible and found.converged
    value, _ = by_cvxpy(phi, (problem.tokens.shape[2], problem.queries.shape[1]), "frobenius", C, loss)
    assert found.upper == pytest.approx(value, rel=1e-4, abs=1e-6)
    missed = (1 - phi @ found.W.flatten()).clamp(min=0)
    penalty = C * (missed if loss == "hinge" else missed.square()).sum()
    assert found.upper == pytest.approx(float(found.W.square().sum() / 2 + penalty), rel=1e-9, abs=1e-12)


def test_a_soft_margin_becomes_the_hard_one():
    problem = unit(6, 8, 10)
    same(fit(*problem, tolerance=TIGHT), fit(*problem, C=1e3, tolerance=TIGHT))


# ---------------------------------------------------------------- where there is none


@given(SELECTIONS)
def test_a_certificate_is_a_proof(problem):
    """Multipliers that are not negative, weighted to 1, and whose constraints cancel: formed here as they stand."""
    tokens = torch.cat([problem.tokens, problem.tokens])  # check 8: the same input, with two selections
    queries = torch.cat([problem.queries, problem.queries])
    selected = torch.cat([problem.selected, (problem.selected + 1) % tokens.shape[1]])
    found = fit(tokens, queries, selected)
    assert found.feasible is False and found.converged and found.certificate is not None
    phi, at = Selection(tokens, queries, selected).vectors()
    multipliers = found.certificate.multipliers[at[:, 0], at[:, 1]]
    assert float(multipliers.min()) >= 0 and float(multipliers.sum()) == pytest.approx(1)
    left = (multipliers @ phi).norm()
    assert float(left) <= 1e-9 * float(multipliers @ phi.norm(dim=1))
    assert found.certificate.left == pytest.approx(float(left), abs=1e-9 * float(phi.norm(dim=1).max()))


def test_where_no_matrix_separates_there_is_none_to_take_a_rank_of():
    """Never a number. (numpy's matrix_rank of None is 1, which is how the paper's figure counts it.)"""
    one = unit(1, 3, 4)
    found = fit(one.tokens.repeat(2, 1, 1), one.queries.repeat(2, 1), torch.tensor([0, 1]))
    assert found.feasible is False and math.isnan(found.gap) and found.upper == math.inf
    for ask in (lambda: found.W, lambda: found.margins, lambda: found.support, lambda: found.rank()):
        with pytest.raises(QueryError, match="no W separates these selected tokens: 2 constraints of 2 queries cancel"):
            ask()
    assert "no W separates them" in str(found)
    nuclear = fit(one.tokens.repeat(2, 1, 1), one.queries.repeat(2, 1), torch.tensor([0, 1]), "nuclear")
    assert nuclear.feasible is False and nuclear.certificate is not None


def test_a_token_cannot_score_above_itself():
    tokens = torch.zeros(1, 2, 3)
    found = fit(tokens, torch.ones(1, 3), torch.tensor([0]))
    assert found.feasible is False and found.certificate is not None and found.certificate.bound == math.inf


def test_a_contradiction_is_found_among_many_constraints():
    problem = unit(300, 16, 64)
    problem.tokens[7], problem.queries[7], problem.selected[7] = problem.tokens[3], problem.queries[3], 1
    problem.selected[3] = 0
    found = fit(*problem)
    assert found.feasible is False and found.certificate is not None
    assert {3, 7} <= set(found.certificate.multipliers.nonzero()[:, 0].tolist())
    assert found.certificate.relative < 1e-10


# ---------------------------------------------------------------- what must not change the answer


@pytest.mark.parametrize("way", [{"shrink": False}, {"working": 1}, {"working": 2, "shrink": False}, {"reduce": False}])
@given(problem=SELECTIONS)
def test_every_way_to_save_time_leads_to_the_same_answer(way, problem):
    same(fit(*problem, tolerance=TIGHT), fit(*problem, tolerance=TIGHT, **way))


@pytest.mark.parametrize("way", [{"shrink": False}, {"working": 2}, {"reduce": False}])
def test_and_so_it_does_where_the_savings_matter(way):
    """More queries than numbers in one, more tokens than a working set."""
    problem = unit(120, 12, 24)
    same(fit(*problem, tolerance=TIGHT), fit(*problem, tolerance=TIGHT, **way))


@given(problem=SELECTIONS, other=st.integers(0, 2**32 - 1))
def test_a_warm_start_ends_where_a_cold_one_does(problem, other):
    cold = fit(*problem, tolerance=TIGHT)
    (n, T, dx), dz = problem.tokens.shape, problem.queries.shape[1]
    before = fit(*made(n, T, dx, dz, False, other)[:2], problem.selected)
    same(cold, fit(*problem, tolerance=TIGHT, start=before))
    again = fit(*problem, tolerance=1e-6, start=cold)
    assert not cold.feasible or again.epochs == 0


def test_a_working_set_begins_with_the_largest_logits():
    problem = unit(60, 12, 8)
    teacher = torch.randn(8, 8, dtype=torch.float64)
    logits = torch.einsum("ntx,xz,nz->nt", problem.tokens, teacher, problem.queries)
    problem = problem._replace(selected=logits.argmax(1))
    same(fit(*problem, tolerance=TIGHT), fit(*problem, tolerance=TIGHT, working=3, logits=logits))


@given(problem=SELECTIONS, seed=st.integers(0, 2**32 - 1))
def test_the_order_of_examples_and_of_tokens_is_nothing(problem, seed):
    g = torch.Generator().manual_seed(seed)
    n, T = problem.tokens.shape[:2]
    rows, columns = torch.randperm(n, generator=g), torch.randperm(T, generator=g)
    moved = fit(problem.tokens[rows][:, columns], problem.queries[rows], columns.argsort()[problem.selected[rows]],
                tolerance=TIGHT)  # fmt: skip
    same(fit(*problem, tolerance=TIGHT), moved)


@given(problem=SELECTIONS, a=st.floats(1e-3, 1e3), b=st.floats(1e-3, 1e3), seed=st.integers(0, 2**32 - 1))
def test_shifts_turns_and_scales_of_the_input_are_those_of_the_answer(problem, a, b, seed):
    """A shift of a sequence is nothing; X U, Z V and aX, bZ turn and divide W."""
    (n, _, dx), dz = problem.tokens.shape, problem.queries.shape[1]
    g = torch.Generator().manual_seed(seed)
    shift, U, V = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, 1, dx), (dx, dx), (dz, dz)))
    U, V = torch.linalg.qr(U)[0], torch.linalg.qr(V)[0]
    found = fit(*problem, tolerance=TIGHT)
    assume(found.feasible)
    same(found, fit(problem.tokens + shift, problem.queries, problem.selected, tolerance=TIGHT))
    turned = fit(a * problem.tokens @ U.mT, b * problem.queries @ V.mT, problem.selected, tolerance=TIGHT)
    same(found, turned, U @ found.W @ V.mT / (a * b))


@given(SELECTIONS)
def test_tokens_without_support_may_go_and_those_with_it_hold_the_margin_up(problem):
    """W is the same without the others; without a support token its norm is not larger."""
    found = fit(*problem, tolerance=TIGHT)
    assume(found.feasible)
    idle = ~found.support & ~found.problem.selected
    same(found, fit(*problem, tolerance=TIGHT, hidden=idle))
    one = found.support.nonzero()[0]
    hidden = torch.zeros_like(idle)
    hidden[one[0], one[1]] = True
    assume(int((~hidden).sum()) > len(hidden))
    assert fit(*problem, hidden=hidden).lower <= found.upper * (1 + 1e-6)


@given(SELECTIONS)
def test_w_lives_in_the_spans_of_its_data(problem):
    """Rows in the span of the queries, columns in that of the differences, so rank ≤ min(n, d)."""
    found = fit(*problem, tolerance=TIGHT, reduce=False)
    assume(found.feasible)
    differences = problem.tokens[torch.arange(len(problem.tokens)), problem.selected].unsqueeze(1) - problem.tokens
    for W, rows in ((found.W, problem.queries), (found.W.mT, differences.flatten(0, 1))):
        onto = torch.linalg.pinv(rows, rtol=1e-10) @ rows
        torch.testing.assert_close(W @ onto, W, atol=1e-6 * float(W.norm()), rtol=0)
    assert found.rank(1e-8) <= min(len(problem.queries), *found.W.shape)


@given(problem=SELECTIONS, seed=st.integers(0, 2**32 - 1))
def test_queries_that_share_a_sequence_are_as_if_each_had_its_own(problem, seed):
    """And what is hidden, padding that is not a number included, is as if it were not there."""
    g = torch.Generator().manual_seed(seed)
    n, T = problem.tokens.shape[:2]
    sequence = torch.randint(n, (n,), generator=g)
    hidden = torch.rand(n, T, generator=g) < 0.3
    hidden[torch.arange(n), problem.selected] = False
    assume(not bool((hidden.sum(1) == T - 1).all()))
    own = problem.tokens[sequence].masked_fill(hidden.unsqueeze(2), math.nan)
    shared = fit(*problem, sequence=sequence, hidden=hidden, tolerance=TIGHT)
    same(shared, fit(own, *problem[1:], hidden=hidden, tolerance=TIGHT))
    if shared.feasible:
        phi, at = problem.vectors(hidden, sequence)
        assert float((phi @ shared.W.flatten()).min()) >= 1 - 1e-6
        everywhere = torch.full((n, T), math.inf, dtype=torch.float64)
        everywhere[at[:, 0], at[:, 1]] = phi @ shared.W.flatten()
        torch.testing.assert_close(shared.margins, everywhere)


def test_a_second_run_gives_the_same_numbers():
    problem = unit(40, 8, 16)
    one, two = fit(*problem), fit(*problem)
    assert torch.equal(one.W, two.W) and torch.equal(one.multipliers, two.multipliers) and one.gap == two.gap


# ---------------------------------------------------------------- what is installed


def test_the_answer_is_the_same_without_numba_and_importing_needs_neither():
    program = """
import sys
import dualform.svm
assert not {"numba", "cvxpy"} & set(sys.modules)
sys.modules["numba"] = None
import torch
from dualform.svm import fit
from dualform.svm.separation import coordinate_descent as descent
torch.manual_seed(0)
found = fit(torch.randn(20, 6, 8, dtype=torch.float64), torch.randn(20, 8, dtype=torch.float64), torch.arange(20) % 6)
assert not descent.COMPILED
print(found.upper, found.epochs)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    here = fit(
        torch.randn(20, 6, 8, dtype=torch.float64), torch.randn(20, 8, dtype=torch.float64), torch.arange(20) % 6
    )
    there, epochs = done.stdout.split()
    assert float(there) == pytest.approx(here.upper, rel=1e-9) and int(epochs) == here.epochs


# ---------------------------------------------------------------- what cannot work


X, Z, CHOSEN = torch.randn(3, 4, 5), torch.randn(3, 2), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda: fit(X[0], Z, CHOSEN), SizeError, r"tokens are \(sequences, tokens, width\) .* these are \(4, 5\)"),
        (lambda: fit(X[:0], Z[:0], CHOSEN[:0]), SizeError, "none of them empty"),
        (lambda: fit(X, Z[:2], CHOSEN[:2]), SizeError, "3 sequences and 2 queries: give sequence="),
        (lambda: fit(X, Z, CHOSEN, sequence=CHOSEN + 1), QueryError, "each of the 3 queries a sequence, from 0 to 2"),
        (lambda: fit(X, Z, CHOSEN, hidden=torch.zeros(3, 3).bool()), SizeError, r"hidden= is .* \(3, 4\)"),
        (lambda: fit(X, Z, CHOSEN + 2), QueryError, "3 numbers from 0 to 3, or a mask .* from 2 to 4"),
        (lambda: fit(X, Z, CHOSEN.float()), QueryError, r"this is torch.float32 of \(3,\)"),
        (lambda: fit(X, Z, torch.zeros(3, 3).bool()), SizeError, r"a mask of \(queries, tokens\) = \(3, 4\)"),
        (lambda: fit(X, Z, torch.zeros(3, 4).bool()), QueryError, "query 0 selects no token"),
        (lambda: fit(X, Z, CHOSEN, hidden=torch.eye(3, 4).bool()), QueryError, "query 0 selects a token .* hidden"),
        (lambda: fit(X[:, :1], Z, CHOSEN * 0), QueryError, "nothing to separate"),
        (lambda: fit(X * math.nan, Z, CHOSEN), QueryError, "hold NaN or infinity"),
        (lambda: fit(X, Z / 0, CHOSEN), QueryError, "hold NaN or infinity"),
        (lambda: fit(X, Z, CHOSEN, norm=cast(Any, "spectral")), QueryError, "norm='spectral' is 'frobenius' or"),
        (lambda: fit(X, Z, CHOSEN, loss=cast(Any, "log")), QueryError, "loss='log' 'hinge' or 'squared'"),
        (lambda: fit(X, Z, CHOSEN, C=0.0), QueryError, "C=0.0 must be larger than 0"),
        (lambda: fit(X, Z, CHOSEN, tolerance=math.nan), QueryError, "tolerance=nan must be larger"),
        (lambda: fit(X, Z, CHOSEN, epochs=0), QueryError, "epochs=0 must be larger"),
        (lambda: fit(X, Z, CHOSEN, working=0), QueryError, "working=0 tokens per query"),
        (lambda: fit(X, Z, CHOSEN, logits=Z), SizeError, r"logits= are \(queries, tokens\) = \(3, 4\): not \(3, 2\)"),
        (lambda: fit(X, Z, CHOSEN, "nuclear", C=1.0), QueryError, "a soft margin needs the Frobenius norm"),
        (lambda: fit(X, Z, torch.ones(3, 4).bool(), C=1.0), QueryError, "several selected tokens per query"),
        (lambda: fit(X, Z, CHOSEN, start=fit(X[:2], Z[:2], CHOSEN[:2])), QueryError, r"start= .*\(2, 4\).*\(3, 4\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_separated_is_refused_in_a_sentence(ask, error, words):
    with unchecked(), pytest.raises(error, match=words):
        ask()
