"""Judges of scores, tried on worlds where the truth is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.errors import QueryError
from dualform.evaluate import brittleness, lds, leave_one_out, mislabelled, ranks, removal_runs, spearman


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=9))
def test_ranks_of_equal_values_are_shared(values):
    naive = [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]
    assert ranks(torch.tensor(values).double()).tolist() == naive


def test_rank_correlation_does_not_care_for_monotone_changes():
    torch.manual_seed(0)
    a, b = torch.randn(4, 30), torch.randn(4, 30)
    torch.testing.assert_close(spearman(a, b), spearman(a.exp(), b**3))
    assert spearman(a, a).allclose(torch.ones(4, dtype=torch.float64))


def test_true_effects_have_a_score_of_one_and_their_negatives_of_minus_one():
    torch.manual_seed(0)
    effects = torch.randn(5, 40)
    runs = removal_runs(lambda weights: effects @ weights, 40, drop=0.2, runs=30)
    assert lds(effects, runs).mean == pytest.approx(1)
    assert lds(-effects, runs).mean == pytest.approx(-1)
    chance = lds(torch.randn(5, 40), runs)
    assert chance.low < chance.mean < chance.high < 0.9


def test_scores_of_another_shape_are_refused():
    runs = removal_runs(lambda weights: weights[:3], 10, runs=2)
    with pytest.raises(QueryError, match=r"shape \(3, 4\).*3 queries and 10 examples"):
        lds(torch.zeros(3, 4), runs)
    with pytest.raises(QueryError, match="leaves out 0"):
        removal_runs(lambda weights: weights, 10, drop=0.01)


def test_leaving_one_out_changes_a_linear_world_by_its_effect():
    effects = torch.tensor([3.0, -5.0, 1.0, 0.0])
    predicted, real = leave_one_out(effects, lambda weights: (effects @ weights)[None], strongest=2)
    assert predicted.tolist() == [5.0, -3.0]
    torch.testing.assert_close(predicted, real)


@given(seed=st.integers(0, 2**31), n=st.integers(4, 30))
def test_the_auc_counts_pairs(seed, n):
    generator = torch.Generator().manual_seed(seed)
    suspicion = torch.randint(4, (n,), generator=generator).double()
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[: n // 3 + 1] = True
    pairs = suspicion[wrong][:, None] - suspicion[~wrong]
    naive = ((pairs > 0).double() + (pairs == 0).double() / 2).mean()
    assert mislabelled(suspicion, wrong) == pytest.approx(float(naive))


@given(need=st.integers(1, 40), n=st.integers(1, 40))
def test_the_smallest_flip_is_found(need, n):
    scores = torch.arange(n).double()
    found = brittleness(scores, lambda weights: int((weights == 0).sum()) >= need)
    assert found.removed == (need if need <= n else None)
    assert len(found.tried) <= 14
