"""Reviews: how many, on which side; texts as bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.data import as_bytes, reviews
from dualform.errors import DataNotFound


def test_no_text_is_in_both_parts_and_both_are_balanced():
    try:
        train, test = reviews("train"), reviews("test")
    except DataNotFound as error:
        pytest.skip(str(error))
    assert (len(train.texts), len(test.texts)) == (len(train.labels), len(test.labels)) == (20_000, 5_000)
    assert int(train.labels.sum() + test.labels.sum()) == 12_500
    assert 2_400 < int(test.labels.sum()) < 2_600
    assert not set(train.texts) & set(test.texts)
    assert len({*train.texts, *test.texts}) == 25_000 - 96


def test_it_is_said_where_the_reviews_come_from(monkeypatch, tmp_path):
    for name in ("DUALFORM_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(DataNotFound, match=r"cannot find imdb/.*Put it there.*stanford"):
        reviews("train")


@given(texts=st.lists(st.text(max_size=12), max_size=4), length=st.integers(1, 30))
def test_bytes_are_the_text_up_to_its_length(texts, length):
    tokens, padding = as_bytes(texts, length)
    assert tokens.shape == padding.shape == (len(texts), length)
    assert torch.equal(padding, tokens == 0)
    for row, empty, text in zip(tokens, padding, texts, strict=True):
        assert bytes((row[~empty] - 1).tolist()) == text.encode()[:length]
        assert torch.equal(empty, torch.arange(length) >= len(text.encode()))
