"""Cached answers: as many as fit into the budget; the one that was unused for the longest time is dropped first."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.store.cache import AnswerCache, CacheBudget, bytes_of_answer


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60), st.integers(1, 100))
def test_it_never_takes_more_than_it_may_and_the_last_is_always_there(requests, limit):
    cache, made = AnswerCache[int, np.ndarray](CacheBudget(limit)), []
    for key, size in requests:
        before = cache.get(key)
        value = cache(key, lambda key=key, size=size: made.append(key) or np.zeros(size, np.int8))
        assert key in cache and cache.get(key) is value
        assert before is None or value is before, "what is cached is not computed again"
        values = [cache.get(k) for k in range(10) if k in cache]
        assert sum(array.nbytes for array in values if array is not None) <= limit or len(values) == 1


def test_what_was_used_last_stays_longest():
    cache = AnswerCache[str, np.ndarray](CacheBudget(20))
    for key in "ab":
        cache(key, lambda: np.zeros(10, np.int8))
    cache("a", lambda: np.zeros(10, np.int8))
    cache("c", lambda: np.zeros(10, np.int8))
    assert "a" in cache and "c" in cache and "b" not in cache


def test_caches_share_a_budget_but_no_keys():
    budget = CacheBudget(20)
    ledgers, splits = AnswerCache[int, np.ndarray](budget), AnswerCache[int, np.ndarray](budget)
    ledgers[1], splits[1] = np.zeros(10, np.int8), np.ones(10, np.int8)
    first = ledgers.get(1)
    assert first is not None and not first.any()
    splits[2] = np.ones(10, np.int8)
    assert 1 not in ledgers and 1 in splits and 2 in splits


def test_the_values_of_a_cache_are_listed_latest_first():
    budget = CacheBudget()
    ledgers, splits = AnswerCache[int, str](budget), AnswerCache[int, str](budget)
    ledgers[1], ledgers[2], splits[1] = "one", "two", "other"
    assert ledgers.values() == ["two", "one"]


def test_the_size_of_a_value_is_that_of_its_arrays():
    @dataclass
    class Both:
        a: torch.Tensor
        b: dict

    value = Both(torch.zeros(3, dtype=torch.float64), {"x": [np.zeros(5, np.float32), "text"], "y": 7})
    assert bytes_of_answer(value) == 24 + 20
    assert bytes_of_answer((1, 2, 3)) == bytes_of_answer("text") == bytes_of_answer(None) == 0
