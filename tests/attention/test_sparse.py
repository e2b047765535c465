"""Sparse attention: the gathered way equals the dense one, and costs what is seen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import close, layer, random
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dualform.attention import build
from dualform.attention.sparse import Pattern, SparseKernel, gathered
from dualform.attention.windows import Windows
from dualform.errors import SizeError

NAMES = ["sparse", "sparse-bn", "sparse-sh", "sparse-bn+sh"]


@pytest.mark.parametrize("name", NAMES)
@given(
    n=st.integers(1, 70), window=st.integers(0, 40), stride=st.integers(1, 80), causal=st.booleans(),
    padded=st.booleans(), seed=st.integers(0, 99), stats=st.sampled_from(["all", "subset"]),
)  # fmt: skip
def test_the_gathered_way_equals_the_dense_one(name, n, window, stride, causal, padded, seed, stats):
    options = {"window": window, "stride": stride, "stats": stats}
    fast, slow = layer(name, **options), layer(name, way="dense", **options)
    x = random(2, n, 12, seed=seed)
    padding = torch.arange(n) >= torch.tensor([[n], [1 + seed % n]]) if padded else None
    a, b = (each.head_outputs(x, padding=padding, causal=causal) for each in (fast, slow))
    there = torch.ones(2, n, dtype=torch.bool) if padding is None else ~padding
    close(a.transpose(1, 2)[there], b.transpose(1, 2)[there], 1e-9)  # variances near zero are divided by


@given(n=st.integers(1, 60), m=st.integers(1, 60))
def test_cross_attention_is_gathered_too(n, m):
    fast, slow = layer("sparse-sh"), layer("sparse-sh", way="dense")
    x, context = random(2, n, 12, seed=n), random(2, m, 12, seed=m)
    close(fast(x, context), slow(x, context))


def test_a_query_sees_its_neighbours_and_every_strided_token():
    """Spec §5.1: |i − j| ≤ w, or (j + 1) mod c = 0; ⌈√N⌉ by default."""
    made, x = layer("sparse", window=2, stride=5), random(1, 23, 12)
    i, j = torch.arange(23)[:, None], torch.arange(23)
    expected = ((i - j).abs() <= 2) | ((j + 1) % 5 == 0)
    assert torch.equal(made.weights(x)[0, 0] > 0, expected)
    for tokens, root in ((1, 1), (16, 4), (17, 5), (100, 10)):
        assert SparseKernel().pattern(Windows(tokens)) == Pattern(root, root)


def test_a_pooled_window_is_seen_where_any_of_its_tokens_is():
    made, x = layer("sparse-sh", scales=(3, 3, 3, 3), window=2, stride=7), random(1, 23, 12)
    i, j = torch.arange(23)[:, None], torch.arange(23)
    seen = ((i - j).abs() <= 2) | ((j + 1) % 7 == 0)
    windows = torch.stack([each.any(-1) for each in seen.split(3, -1)], -1)
    weights = made.expansions(x)[0].weights()[0, 0]
    assert torch.equal(weights > 0, windows)


def test_statistics_of_the_subset_are_those_of_what_each_query_sees():
    """Spec §5.1, ``stats="subset"``: one fit a query, written out query by query."""
    made, x = layer("sparse-bn", window=2, stride=5, stats="subset"), random(1, 23, 12)
    plain = layer("bn")
    plain.load_state_dict(made.state_dict())
    i, j = torch.arange(23)[:, None], torch.arange(23)
    seen = ((i - j).abs() <= 2) | ((j + 1) % 5 == 0)
    alone = [plain(x[:, k : k + 1], x[:, seen[k]]) for k in range(23)]
    close(made(x), torch.cat(alone, 1), 1e-9)


@pytest.mark.parametrize("scale", [1, 4])
def test_what_is_gathered_grows_with_what_is_seen(scale):
    """Less than three times as many keys as the pattern has, at every length; the dense way grows as N²."""
    for tokens in (256, 1024, 4096, 16384):
        windows, pattern = Windows(tokens, scale), SparseKernel().pattern(Windows(tokens))
        found = gathered(pattern, tokens, windows, False, False)
        computed, seen = found.hidden.size, int((~found.hidden).sum())
        assert seen <= computed < 3 * seen
        assert computed < 8 * tokens**1.5


def test_counted_operations_follow_the_pattern():
    def count(name: str, n: int, **options: str) -> int:
        made = build(name, 16, 2, **options)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            made(torch.zeros(1, n, 16))
        return counter.get_total_flops()

    short, long = (count("sparse", n) for n in (256, 1024))
    assert long / short < 8 < 11 < count("sparse", 1024, way="dense") / count("sparse", 256, way="dense")


def test_bad_patterns_are_refused():
    for options in ({"window": -1}, {"stride": 0}):
        with pytest.raises(SizeError, match="must be a whole number"):
            build("sparse", 8, 2, **options)
    with pytest.raises(SizeError, match="not intervals of a sequence"):
        build("sparse-sh", 8, 2, grid=(3, 3))(torch.zeros(1, 9, 8))
