"""The battery that every attention of the table passes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import close, layer, random, steady, values
from torch import nn

from dualform.attention import ATTENTIONS, build
from dualform.errors import QueryError, SizeError

SEQUENCES = [name for name in ATTENTIONS if not name.startswith("conv2d")]


@pytest.fixture(params=SEQUENCES)
def name(request) -> str:
    return request.param


@given(n=st.integers(1, 9), m=st.integers(1, 9), seed=st.integers(0, 99))
def test_self_and_cross_attention_keep_the_length_of_the_queries(n, m, seed):
    for name in SEQUENCES:
        made, x, context = layer(name), random(2, n, 12, seed=seed), random(2, m, 12, seed=seed + 1)
        assert made(x).shape == made(x, context).shape == (2, n, 12)
        assert made.head_outputs(x, context).shape == (2, 4, n, 3)
        close(made(x), made(x, x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 5, 13])
def test_the_fast_way_is_the_expansion_written_out(name, causal, n):
    """Lines of weights sum to 1, and with the values of single tokens they give what the heads give."""
    made, x = layer(name), random(2, n, 12)
    weights, fast = made.weights(x, causal=causal), made.head_outputs(x, causal=causal)
    close(weights.sum(-1), torch.ones(2, 4, n, dtype=torch.float64))
    close(weights @ values(made, x, causal), fast)
    close(torch.cat([each.outputs() for each in made.expansions(x, causal=causal)], 1), fast)
    if causal:
        assert not weights.triu(1).any()
    assert sorted(head for each in made.expansions(x) for head in each.heads) == [0, 1, 2, 3]


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_padded_does_not_count(name, causal):
    """B8: changing padded inputs must not change valid outputs, and a shorter batch gives the same."""
    made, x = steady(name), random(2, 11, 12)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[0, 7:], padding[1, 10:] = True, True
    other = torch.where(padding.unsqueeze(-1), random(2, 11, 12, seed=9) * 5, x)
    a, b = made(x, padding=padding, causal=causal), made(other, padding=padding, causal=causal)
    close(a[~padding], b[~padding])
    written_out = made.weights(x, padding=padding, causal=causal) @ values(made, x, causal, padding)
    fast = made.head_outputs(x, padding=padding, causal=causal)
    close(written_out.transpose(1, 2)[~padding], fast.transpose(1, 2)[~padding])
    close(a[:1, :7], made(x[:1, :7], causal=causal))


def test_one_by_one_is_batched_and_the_order_of_a_batch_does_not_matter(name):
    made, x = layer(name), random(4, 6, 12)
    close(made(x), torch.cat([made(each) for each in x.split(1)]))
    close(made(x[[2, 0, 3, 1]]), made(x)[[2, 0, 3, 1]])


def test_the_future_does_not_leak(name):
    """B9: changing token t must not alter what comes before it, and a prefix alone gives the same."""
    made, x = steady(name), random(1, 9, 12)
    whole = made(x, causal=True)
    for t in range(9):
        other = x.clone()
        other[:, t:] = random(1, 9 - t, 12, seed=t + 5) * 3
        close(made(other, causal=True)[:, :t], whole[:, :t])
        close(made(x[:, : t + 1], causal=True)[:, -1], whole[:, t])
    with pytest.raises(SizeError, match="9 queries and 5 keys"):
        made(x, x[:, :5], causal=True)


def test_gradients_are_right_and_reach_everything(name):
    """B5."""
    made, x = layer(name, 4, 2), random(1, 5, 4)
    for causal in (False, True):
        assert torch.autograd.gradcheck(lambda x, c=causal: made(x, causal=c), (x.requires_grad_(),))
    made.zero_grad()
    made(x).square().sum().backward()
    for key, parameter in made.named_parameters():
        if not key.startswith("key") or not key.endswith("bias"):  # a shift of all keys cancels in a softmax
            assert parameter.grad is not None and bool(parameter.grad.any()), key


def test_no_member_adds_a_parameter(name):
    """B11."""
    count = sum(p.numel() for p in layer(name).parameters())
    kernels = 3 * 12 if name.startswith("conv1d") else 0
    assert count == sum(p.numel() for p in nn.MultiheadAttention(12, 4).parameters()) + kernels


def test_it_can_be_saved_and_loaded(name):
    one, two, x = layer(name), build(name, 12, 4).double(), random(2, 5, 12)
    two.load_state_dict(one.state_dict())
    close(one(x), two(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_stays_finite(name, dtype):
    """B12: constant keys, one token, keys far from zero."""
    made = build(name, 8, 2).to(dtype)
    for x in (torch.ones(1, 6, 8), torch.randn(1, 1, 8), torch.randn(1, 6, 8) + 1e3):
        for causal in (False, True):
            out = made(x.to(dtype).requires_grad_(), causal=causal)
            out.sum().backward()
            assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_dropout_is_for_training(name):
    made, x = layer(name, dropout=0.5), random(2, 6, 12)
    assert not torch.equal(made(x), made(x))
    made.eval()
    close(made(x), made(x))


def test_sizes_that_do_not_fit_are_refused():
    for name in ATTENTIONS:
        with pytest.raises(SizeError, match="width=10 must be a multiple of heads=4"):
            build(name, 10, 4)
    with pytest.raises(QueryError, match="no attention is called 'none'"):
        build("none", 8, 2)
    with pytest.raises(SizeError, match="scales"):
        build("sh", 8, 2, scales=[1, 2, 3])
