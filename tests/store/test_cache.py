"""What is kept: as much as fits, the longest unused goes first."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.store import AnswerCache
from dualform.store.cache import bytes_of_answer


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60), st.integers(1, 100))
def test_it_never_takes_more_than_it_may_and_the_last_is_always_there(asked, most):
    kept, made = AnswerCache(most), []
    for key, size in asked:
        before = kept.get(key)
        found = kept(key, lambda key=key, size=size: made.append(key) or np.zeros(size, np.int8))
        assert key in kept and kept.get(key) is found
        assert before is None or found is before, "what is kept is not made again"
        held = [kept.get(k) for k in range(10) if k in kept]
        assert sum(each.nbytes for each in held) <= most or len(held) == 1


def test_what_was_used_last_stays_longest():
    kept = AnswerCache(20)
    for key in "ab":
        kept(key, lambda: np.zeros(10, np.int8))
    kept("a", lambda: np.zeros(10, np.int8))
    kept("c", lambda: np.zeros(10, np.int8))
    assert "a" in kept and "c" in kept and "b" not in kept


def test_things_of_a_kind_can_be_found():
    kept = AnswerCache()
    kept[("ledger", 1)], kept[("ledger", 2)], kept["ledger"] = "one", "two", "other"
    assert kept.all("ledger") == ["two", "one"]


def test_the_size_of_a_value_is_that_of_its_arrays():
    @dataclass
    class Both:
        a: torch.Tensor
        b: dict

    value = Both(torch.zeros(3, dtype=torch.float64), {"x": [np.zeros(5, np.float32), "text"], "y": 7})
    assert bytes_of_answer(value) == 24 + 20
    assert bytes_of_answer((1, 2, 3)) == bytes_of_answer("text") == bytes_of_answer(None) == 0
