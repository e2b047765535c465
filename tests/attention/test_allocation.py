"""Allocations of query heads: the golden vectors of the specification, and what holds for all norms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import random
from torch import Tensor

from dualform.attention.allocation import (
    head_norms,
    key_driven,
    owners,
    proportional,
    repaired_at_random,
    uniform,
)
from dualform.errors import SizeError

GOLDEN = [
    (12, [1, 2, 3, 4], [0, 2, 4, 6]),
    (12, [10, 11, 12, 13, 14, 15], [0, 1, 2, 2, 3, 4]),
    (16, [5, 5, 5, 6], [0, 0, 0, 16]),
    (12, [3, 1], [12, 0]),
    (8, [9, 4, 5, 9], [3, 0, 1, 4]),
    (12, [3, 10, 8, 10, 10, 10], [0, 2, 2, 2, 3, 3]),
    (8, [1, 6, 4, 10], [1, 2, 1, 4]),
    (16, [4, 6, 3, 8, 8, 10, 9, 11], [1, 1, 0, 2, 2, 3, 3, 4]),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("heads", "norms", "expected"), GOLDEN)
def test_golden_vectors(heads, norms, expected, dtype):
    assert key_driven(torch.tensor(norms, dtype=dtype), heads).tolist() == expected


def one_by_one(norms: list[float], heads: int) -> list[int]:
    """Spec §3, steps 2 to 5, in plain Python."""
    low, high = min(norms), max(norms)
    scaled = [(n - low) / (high - low) for n in norms]
    found = [round(heads * m / sum(scaled)) for m in scaled]
    while sum(found) > heads:
        found[found.index(max(found))] -= 1
    while sum(found) < heads:
        found[found.index(min(found))] += 1
    return found


@pytest.mark.parametrize(("groups", "heads"), [(2, 8), (3, 6), (3, 12), (4, 16), (6, 12), (8, 16), (5, 20)])
def test_ten_thousand_random_norms(groups, heads):
    """H in all, none negative, always the same, and what the plain loop gives."""
    norms = random(10_000, groups, seed=groups).abs() + 0.01
    found = key_driven(norms, heads)
    assert bool((found.sum(-1) == heads).all() & (found >= 0).all())
    assert torch.equal(found, key_driven(norms, heads))
    for line, each in zip(norms[:1000].tolist(), found[:1000].tolist(), strict=True):
        assert each == one_by_one(line, heads)


def test_how_often_the_smallest_gets_nothing():
    """Spec §3: 83 %, 81 %, 88 % and 100 % of Gaussian norms; two groups are all or nothing."""
    for groups, heads, expected in ((6, 12, 0.83), (8, 16, 0.81), (4, 16, 0.88), (3, 6, 1.0), (3, 12, 1.0)):
        norms = 10 + random(20_000, groups, seed=groups)
        none = key_driven(norms, heads).gather(-1, norms.argmin(-1, keepdim=True)) == 0
        assert float(none.double().mean()) == pytest.approx(expected, abs=0.015)
    assert set(map(tuple, key_driven(random(100, 2).abs(), 8).tolist())) == {(8, 0), (0, 8)}


def test_only_order_and_relative_gaps_count():
    steps = torch.arange(6).double()
    assert torch.equal(key_driven(10 + steps, 12), key_driven(100 + steps / 10, 12))


@given(
    norms=st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True), times=st.sampled_from([0.25, 2.0, 8.0]),
    data=st.data(),
)  # fmt: skip
def test_norms_decide_by_their_order_and_size(norms, times, data):
    """A common factor changes nothing; a permutation of heads permutes where nothing was repaired."""
    heads = 4 * len(norms)
    given = torch.tensor(norms, dtype=torch.float64)
    found = key_driven(given, heads)
    assert torch.equal(key_driven(times * given, heads), found)
    scaled = (given - given.min()) / (given.max() - given.min())
    if int((heads * scaled / scaled.sum()).round().sum()) == heads:
        order = torch.tensor(data.draw(st.permutations(range(len(norms)))))
        assert torch.equal(key_driven(given[order], heads), found[order])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_norms_share_evenly(dtype):
    """Also one group, no norm at all, and what is no number."""
    for norms in ([7.0] * 4, [0.0] * 4, [float("nan"), 1, 2, 3], [float("inf"), 1, 2, 3]):
        assert key_driven(torch.tensor(norms, dtype=dtype), 8).tolist() == [2, 2, 2, 2]
    assert key_driven(torch.tensor([3.0], dtype=dtype), 8).tolist() == [8]
    assert key_driven(torch.tensor([3.0] * 3, dtype=dtype), 8).tolist() == [3, 3, 2]
    small = 1e-13 if dtype == torch.float64 else 1e-7
    assert key_driven(torch.tensor([1, 1 + small, 1], dtype=dtype), 6).tolist() == [2, 2, 2]
    assert key_driven(torch.tensor([1, 1 + 100 * small, 1], dtype=dtype), 6).tolist() == [0, 6, 0]


def test_each_group_gets_the_least():
    norms = random(1000, 4).abs()
    found = key_driven(norms, 16, least=2)
    assert bool((found >= 2).all() & (found.sum(-1) == 16).all())
    assert torch.equal(found, 2 + key_driven(norms, 8))
    assert key_driven(torch.ones(4), 16, least=4).tolist() == [4] * 4


def test_runs_of_heads_have_their_owner():
    """Spec §2: group g owns the heads from Σ_{i<g} a_i on; a group without heads owns none."""
    assert owners(torch.tensor([2, 0, 3, 1]), 6).tolist() == [0, 0, 2, 2, 2, 3]
    found = key_driven(random(500, 4).abs(), 12)
    owner = owners(found, 12)
    assert torch.equal(torch.nn.functional.one_hot(owner, 4).sum(1), found)
    assert bool((owner.diff(dim=-1) >= 0).all())
    assert uniform(7, 3).tolist() == [3, 2, 2] and uniform(8, 4).tolist() == [2] * 4


def test_shares_are_rounded_by_largest_remainders():
    """Spec §4: of these norms, which differ by less than 25 % of the mean, each gets two."""
    assert proportional(torch.tensor([100.0, 110, 120, 130, 90, 95]), 12).tolist() == [2] * 6
    assert proportional(torch.tensor([1.0, 1, 1]), 7).tolist() == [3, 2, 2]
    weights = random(10_000, 5).abs()
    found = proportional(weights, 12)
    assert bool((found.sum(-1) == 12).all())
    shares = 12 * weights / weights.sum(-1, keepdim=True)
    assert bool(((found - shares).abs() < 1).all())


def seeded(weights: Tensor, seed: int) -> list[int]:
    torch.manual_seed(seed)
    return repaired_at_random(weights, 8).tolist()


def test_repair_at_random_is_within_a_few_of_the_shares_and_never_negative():
    """With a seed it is always the same; rounding that fits is left alone; 0/0 is caught."""
    weights = torch.tensor([1.0, 1, 1, 1, 1])
    one, two = ([seeded(weights, seed) for seed in range(50)] for _ in range(2))
    assert one == two and len(set(map(tuple, one))) > 5
    assert all(sum(each) == 8 and min(each) >= 0 for each in one)
    assert repaired_at_random(torch.tensor([100.0, 110, 120, 130, 90, 95]), 12).tolist() == [2] * 6
    with pytest.raises(SizeError, match=r"\[0\.0, 0\.0\] over their sum, 0: .*does not terminate here"):
        repaired_at_random(torch.zeros(2), 8)


def test_norms_are_those_of_tokens_that_are_there():
    k, padding = random(3, 2, 7, 4), torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 4:], padding[2] = True, True
    found = head_norms(k, padding)
    torch.testing.assert_close(found[0], k[0, :, :4].flatten(1).norm(dim=1))
    torch.testing.assert_close(found[1], torch.stack([torch.linalg.matrix_norm(each) for each in k[1]]))
    assert not found[2].any()
    large = torch.full((1, 2, 400, 64), 100.0, dtype=torch.float16)
    assert head_norms(large).tolist() == [[16_000.0] * 2] and head_norms(large).dtype == torch.float32
