"""Rows by their numbers, and inputs in the form that a model is called with."""

import pytest
import torch
from torch import nn

from dualform.errors import QueryError
from dualform.show.inputs import as_inputs, parse_rows


def test_rows_are_numbers_and_stretches():
    assert parse_rows("0,3,5") == [0, 3, 5]
    assert parse_rows("2:5,-1,:2") == [2, 3, 4, -1, 0, 1]
    for text in ("", "a", "3:3", "1:", "0;1"):
        with pytest.raises(QueryError, match="0,3,5"):
            parse_rows(text)


def test_integers_are_tokens_only_for_an_embedding():
    data = torch.tensor([[1, 2]], dtype=torch.uint8)
    assert as_inputs(data, nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))).dtype == torch.int64
    assert as_inputs(data, nn.Linear(2, 2)).dtype == torch.float32
    assert as_inputs(data.double(), nn.Linear(2, 2).double()).dtype == torch.float64
