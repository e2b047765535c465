"""Numbers say their unit, and columns of numbers add up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform.explain.notebook import ends, plain, same_digits
from dualform.show.text.words import disk_size, parts, size, sum_check

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@given(NUMBERS)
def test_numbers_of_one_column_have_the_same_decimals_and_their_sign(values):
    texts = same_digits(values)
    assert len({len(text.partition(".")[2]) for text in texts}) == 1
    assert all(text[0] in "+-" for text in texts)


@given(NUMBERS)
def test_a_column_adds_up_as_far_as_it_is_shown(values):
    places = len(same_digits(values)[0].partition(".")[2])
    shown = sum(float(text) for text in same_digits(values))
    assert math.isclose(shown, sum(values), abs_tol=0.51 * len(values) * 10.0**-places, rel_tol=1e-9)


def test_small_numbers_keep_three_digits_and_what_is_not_kept_says_so():
    assert same_digits([0.00123, -0.0004]) == ["+0.00123", "-0.00040"]
    assert same_digits([math.nan, 1.0]) == ["not kept", "+1.00"]


@given(st.lists(st.floats(-10, 10), max_size=30), st.integers(1, 5))
def test_the_ends_are_the_largest_and_the_smallest_in_order(values, shown):
    chosen = [values[i] for i in ends(values, shown)]
    assert chosen == sorted(chosen, reverse=True)
    assert len(chosen) == min(len(values), 2 * shown)
    if values:
        assert chosen[0] == max(values) and chosen[-1] == min(values)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (134_900_000, "135 MB"), (2e15, "2,000 TB")],
)
def test_sizes_are_for_people(count, text):
    assert size(count) == text


def test_plain_numbers_have_no_exponent():
    assert [plain(86283.2), plain(1.23456)] == ["86,283", "1.235"]


def test_the_parts_sum_to_the_whole(recorded):
    groups = recorded.memory.attend(recorded.model, recorded.x[:2]).by("label", layer="fc2")
    for query in range(2):
        assert math.isclose(sum(parts(groups, query).values()), float(groups.total[query]), abs_tol=1e-4)
    assert "sum to the whole" in sum_check(groups) and "residual" in sum_check(groups)
    assert "the logit of the predicted class" in sum_check(groups)


def test_the_size_on_disk_is_that_of_all_files_but_the_manifest(recorded):
    files = [
        file for file in recorded.path.rglob("*") if file.is_file() and file.name not in ("manifest.json", ".lock")
    ]
    assert disk_size(recorded.memory) == sum(file.stat().st_size for file in files)
