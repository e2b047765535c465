"""The language model that comes trained tells its published story, and its tokenizer is that of its author."""

import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.data import Stories, data_file, stories
from dualform.errors import DataNotFound

pytest.importorskip("transformers", reason="the extra hf is not installed")


@pytest.fixture(scope="module")
def told() -> Stories:
    try:
        return stories()
    except DataNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def table(told) -> list[tuple[float, bytes]]:
    """Score and bytes of each token, as the file has them."""
    data, at, found = data_file("stories260k/tok512.bin").read_bytes(), 4, []
    while at < len(data):
        score, length = struct.unpack_from("fi", data, at)
        found.append((score, data[at + 8 : at + 8 + length]))
        at += 8 + length
    return found


def naive(text: str, table: list[tuple[float, bytes]]) -> list[int]:
    """llama2.c: from single letters, always merge the pair whose token has the best score."""
    numbers = {token: i for i, (_, token) in enumerate(table)}
    ids = []
    for letter in f" {text}":
        byte = letter.encode()
        ids += [numbers[byte]] if byte in numbers else [3 + b for b in byte]
    while True:
        pairs = [(numbers.get(table[a][1] + table[b][1]), i) for i, (a, b) in enumerate(pairwise(ids))]
        able = [(table[token][0], -i, token) for token, i in pairs if token is not None]
        if not able:
            return [1, *ids]
        _, place, token = max(able)
        ids[-place : 2 - place] = [token]


def test_it_tells_its_published_story(told):
    out = told.model.generate(torch.tensor([[1]]), attention_mask=torch.ones(1, 1), max_new_tokens=40, do_sample=False)
    story = told.tokenizer.decode(out[0], skip_special_tokens=True)
    begin = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    assert story.startswith(begin)


@given(text=st.text(st.sampled_from("aehilnorst THEWLF,.\"'!?\néÆ—"), max_size=40))
def test_the_tokenizer_merges_as_its_author_does_and_forgets_nothing(text, told, table):
    ids = told.tokenizer(text).input_ids
    assert ids == (naive(text, table) if text else [1])
    assert told.tokenizer.decode(ids, skip_special_tokens=True) == text
