"""Separating selected tokens, nuclear norm: exact instances, certificates, and the rank that it is known for."""

import time

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from selections import SELECTIONS, by_cvxpy, unit
from torch import Tensor

from dualform.svm import fit


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def axes(*queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Constraints eᵢᵀWz ≥ 1."""
    tokens = torch.stack([torch.stack([axis, 0 * axis]) for axis in torch.eye(2, dtype=torch.float64)])
    return tokens, torch.stack(queries), torch.zeros(2, dtype=torch.int64)


def test_two_axes_cost_two():
    """Nuclear: every [[1, b], [b, 1]] with |b| ≤ 1 is optimal, so only the value is one."""
    found = fit(*axes(vector(1, 0), vector(0, 1)), "nuclear", tolerance=1e-6)
    assert found.converged and found.upper == pytest.approx(2, rel=1e-6)
    assert float(torch.linalg.norm(found.W, "nuc")) == pytest.approx(2, rel=1e-6)
    assert float(found.margins.min()) >= 1 - 1e-9


def test_one_direction_is_cheaper_than_two():
    """Nuclear: rank one where the Frobenius norm takes rank two."""
    found = fit(*axes(vector(1, 0), vector(1, 1)), "nuclear", tolerance=1e-8)
    assert found.converged and found.upper == pytest.approx(1.317122, abs=1e-5) and found.rank() == 1
    expected = torch.stack([vector(1, 0.308586), vector(0.764184, 0.235816)])
    torch.testing.assert_close(found.W, expected, atol=1e-3, rtol=0)


def test_a_hundred_queries_are_solved_in_seconds():
    """Gap 1e-3 on 100 queries of 32 tokens, 64 numbers each, with a lower rank and nuclear norm."""
    problem = unit(100, 32, 64)
    begin = time.perf_counter()
    found = fit(*problem, norm="nuclear")
    assert time.perf_counter() - begin < 30
    assert found.gap <= 1e-3 and float(found.margins.min()) >= 1 - 1e-9
    other = fit(*problem)
    assert found.upper <= float(torch.linalg.norm(other.W, "nuc")) and found.rank() < other.rank() / 2


@pytest.mark.parametrize(("n", "d", "rank"), [(5, 10, 2.5), (10, 10, 3.7), (10, 20, 3.6), (15, 15, 4.9), (15, 20, 4.7)])
def test_ranks_are_those_of_an_accurate_solver(n, d, rank):
    """The corrected column of the specification's table, ten trials each; Frobenius has rank n or d."""
    both = [
        [fit(*unit(n, 5, d, seed), norm, tolerance=1e-4) for seed in range(10)] for norm in ("frobenius", "nuclear")
    ]
    plain, low = ([one.rank(cut) for one in answers] for answers, cut in zip(both, (1e-6, 1e-3), strict=True))
    assert sum(low) / len(low) == pytest.approx(rank, abs=0.7)
    assert plain == [min(n, d)] * 10


@given(SELECTIONS)
def test_bounds_and_value_are_those_of_an_interior_point_method(problem):
    """The bounds are what their formulas say, formed here; cvxpy's value lies between them."""
    found = fit(*problem, norm="nuclear", seconds=2.0)
    assume(found.feasible and found.upper < 1e3)
    phi, at = problem.vectors()
    multipliers = found.multipliers[at[:, 0], at[:, 1]]
    largest = torch.linalg.norm((multipliers @ phi).view_as(found.W), 2)
    assert float(multipliers.min()) >= 0
    assert found.lower == pytest.approx(float(multipliers.sum() / largest))
    assert found.upper == pytest.approx(float(torch.linalg.norm(found.W, "nuc") / (phi @ found.W.flatten()).min()))
    value, _ = by_cvxpy(phi, (found.W.shape[0], found.W.shape[1]), "nuclear")
    assert found.lower * (1 - 1e-6) <= value <= found.upper * (1 + 1e-6)
    assert found.converged


@settings(max_examples=10)
@given(problem=SELECTIONS, way=st.sampled_from([{"shrink": False}, {"reduce": False}, {"working": 1}]))
def test_every_way_to_save_time_leads_to_the_same_value(problem, way):
    one, two = (fit(*problem, norm="nuclear", tolerance=1e-4, seconds=2.0, **options) for options in ({}, way))
    assert one.feasible == two.feasible
    assert not one.feasible or max(one.lower, two.lower) <= min(one.upper, two.upper) * (1 + 1e-9)


def test_another_separation_is_a_place_to_start_from():
    problem = unit(50, 8, 16)
    cold = fit(*problem, norm="nuclear")
    warm = fit(*problem, norm="nuclear", start=fit(*problem))
    assert warm.converged and warm.upper == pytest.approx(cold.upper, rel=1e-3)
