"""The made tasks are what they say: lists come to their values, and a needle and a frequency make a class."""

import sys

import pytest
import torch

from dualform.errors import SizeError
from dualform.show.commands.reproduce import source_tree

sys.path.insert(0, str(source_tree()))

from experiments.primal_dual.tasks import ListOps, listops, needle
from experiments.primal_dual.tasks.listops import TOKENS, evaluate, write


@pytest.fixture(scope="module")
def trees() -> ListOps:
    return listops(2_000)


def read(text: str) -> list[int]:
    return [TOKENS.index(word) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
        ("[MED 1 2 ]", 1),
        ("[SM 9 9 [SM 1 1 ] ]", 0),
    ],
)
def test_a_written_tree_comes_to_its_value(text, value):
    assert evaluate([*read(text), 0, 0]) == value
    assert write(read(text)) == text


@pytest.mark.parametrize("text", ["1 2", "]", "[MIN 1 2 ] ]", "[MIN 1 [MAX 2 ]", ""])
def test_what_is_not_one_tree_is_refused(text):
    with pytest.raises(ValueError, match="not one tree"):
        evaluate(read(text))


def test_labels_are_the_values_of_the_trees(trees):
    assert [evaluate(row) for row in trees.tokens.tolist()] == trees.labels.tolist()
    assert set(trees.labels.tolist()) == set(range(10))


def test_trees_are_of_the_lengths_asked_for_and_all_different(trees):
    lengths = (~trees.padding).sum(1)
    assert trees.tokens.shape == (2_000, 128)
    assert 17 <= lengths.min() <= 20 and 125 <= lengths.max() <= 128
    assert torch.equal(trees.padding, torch.arange(128) >= lengths.unsqueeze(1))
    assert torch.equal(trees.padding, trees.tokens == 0)
    assert len(trees.tokens.unique(dim=0)) == 2_000


def test_trees_are_no_deeper_and_no_wider_than_asked_for():
    trees = listops(200, min_length=8, max_length=40, max_depth=4, max_arguments=3)
    for row in trees.tokens.tolist():
        deepest, opened = 0, []
        for word in write(row).split():
            if word == "]":
                assert 2 <= opened.pop() <= 3
                continue
            if opened:
                opened[-1] += 1
            deepest = max(deepest, len(opened) + 1)
            if word.startswith("["):
                opened.append(0)
        assert deepest <= 4


def test_a_seed_makes_its_own_trees(trees):
    again, other = listops(50), listops(50, seed=1)
    assert torch.equal(again.tokens, trees.tokens[:50])  # a smaller set is the beginning of a larger one
    assert not torch.equal(again.tokens, other.tokens)


def test_more_trees_than_there_are_are_refused():
    with pytest.raises(SizeError, match=r"only \d+ of 1000 different trees of 2 to 4 tokens"):
        listops(1_000, min_length=2, max_length=4, max_arguments=2)


def test_half_of_a_needle_tells_half_of_the_class():
    """Matched filters, which know the motif and the frequencies, find both halves."""
    values, labels = needle(2_000)
    assert values.shape == (2_000, 64, 2) and labels.shape == (2_000,)
    assert labels.bincount().min() > 400
    windows = values[:, :, 0].unfold(1, 8, 1)
    signs = torch.tensor([1.0, -1.0]).repeat(4)
    alternating = (windows @ signs).amax(1) > windows.sum(2).amax(1)
    power = torch.fft.rfft(values[:, :, 1]).abs()
    fast = power[:, 5] > power[:, 2]
    assert (alternating == (labels >= 2)).float().mean() > 0.99
    assert torch.equal(fast.long(), labels % 2)


def test_what_is_not_motif_or_sine_is_noise_of_deviation_one_half():
    values, labels = needle(4_000)
    flat = values[:, :, 0][labels < 2]
    assert flat.mean() == pytest.approx(2 * 8 / 64, abs=0.01)
    assert values[:, :, 0][labels >= 2].mean() == pytest.approx(0, abs=0.01)
    assert values[:, :, 0].var() == pytest.approx(0.25 + 4 * 8 / 64 - (1 / 8) ** 2, rel=0.02)
    assert values[:, :, 1].var() == pytest.approx(0.25 + 0.5, rel=0.02)


def test_a_seed_makes_its_own_needles():
    assert torch.equal(needle(8, seed=3).values, needle(8, seed=3).values)
    assert not torch.equal(needle(8, seed=3).values, needle(8, seed=4).values)
