"""The battery that every attention of the table passes."""

import itertools
import subprocess
import sys

import pytest
import torch
from helpers import unchecked
from making import close, layer, ordered, orders, random, steady, values
from torch import nn

from dualform.attention import ATTENTIONS, build
from dualform.errors import SizeError, UnknownLayer

SEQUENCES = [name for name in ATTENTIONS if not name.startswith("conv2d")]


@pytest.fixture(params=SEQUENCES)
def name(request) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["all", "causal"])
def causal(request, name) -> bool:
    if request.param not in orders(name):
        pytest.skip("an allocation of all tokens has no order")
    return request.param


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (9, 1), (5, 7), (8, 3)])
def test_self_and_cross_attention_keep_the_length_of_the_queries(name, n, m):
    made, x, context = layer(name), random(2, n, 12), random(2, m, 12, seed=1)
    assert made(x).shape == made(x, context).shape == (2, n, 12)
    assert made.head_outputs(x, context).shape == (2, 4, n, 3)
    close(made(x), made(x, x))


@pytest.mark.parametrize("n", [1, 5, 13])
def test_the_fast_way_is_the_expansion_written_out(name, causal, n):
    """Lines of weights sum to 1, and with the values of single tokens they give what the heads give."""
    made, x = ordered(name) if causal else layer(name), random(2, n, 12)
    weights, fast = made.weights(x, causal=causal), made.head_outputs(x, causal=causal)
    close(weights.sum(-1), torch.ones(2, 4, n, dtype=torch.float64))
    close(weights @ values(made, x, causal), fast)
    close(torch.cat([each.outputs() for each in made.expansions(x, causal=causal)], 1), fast)
    if causal:
        assert not weights.triu(1).any()
    assert sorted(head for each in made.expansions(x) for head in each.heads) == [0, 1, 2, 3]


def test_what_is_padded_does_not_count(name, causal):
    """Changing padded inputs must not change valid outputs, and a shorter batch gives the same."""
    made, x = steady(name, causal), random(2, 11, 12)
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
    """Changing token t must not alter what comes before it, and a prefix alone gives the same."""
    if True not in orders(name):
        with pytest.raises(SizeError, match="not causal"):
            layer(name)(random(1, 9, 12), causal=True)
        return
    made, x = steady(name, causal=True), random(1, 9, 12)
    whole = made(x, causal=True)
    for t in range(9):
        other = x.clone()
        other[:, t:] = random(1, 9 - t, 12, seed=t + 5) * 3
        close(made(other, causal=True)[:, :t], whole[:, :t])
        close(made(x[:, : t + 1], causal=True)[:, -1], whole[:, t])
    with pytest.raises(SizeError, match="9 queries and 5 keys"):
        made(x, x[:, :5], causal=True)


def test_gradients_are_right_and_reach_everything(name):
    made, x = ordered(name, 4, 2), random(1, 5, 4)
    for causal in orders(name):
        assert torch.autograd.gradcheck(lambda x, c=causal: made(x, causal=c), (x.requires_grad_(),))
    made.zero_grad()
    made(x).square().sum().backward()
    for key, parameter in made.named_parameters():
        if not key.startswith("key") or not key.endswith("bias"):  # a shift of all keys cancels in a softmax
            assert parameter.grad is not None and bool(parameter.grad.any()), key


def test_no_member_adds_a_parameter(name):
    count = sum(p.numel() for p in layer(name).parameters())
    kernels = 3 * 12 if name.startswith("conv1d") else 0
    if "gqa" in name:  # half of the keys and values
        kernels = -2 * 6 * 13
    if name in ("mdha", "relative-conv"):  # three convolutions, with three taps and a bias for each number of a head
        kernels += 3 * 3 * 4
    if name.startswith("relative"):  # a vector and a number for each offset, u, and no bias of queries and keys
        kernels += 1024 * (12 + 4) + 12 - 2 * 12
    assert count == sum(p.numel() for p in nn.MultiheadAttention(12, 4).parameters()) + kernels


def test_it_can_be_saved_and_loaded(name):
    one, two, x = layer(name), build(name, 12, 4).double(), random(2, 5, 12)
    two.load_state_dict(one.state_dict())
    close(one(x), two.train(one.training)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_stays_finite(name, dtype):
    """Constant keys, one token, keys far from zero; gradients too, where the range of numbers allows it."""
    made, half = ordered(name, 8, 2).to(dtype), dtype == torch.float16
    for x in (torch.ones(1, 6, 8), torch.randn(1, 1, 8), torch.randn(1, 6, 8) + (10 if half else 1e3)):
        for causal in orders(name):
            x = x.to(dtype).requires_grad_()
            out = made(x, causal=causal)
            assert out.isfinite().all()
            out.sum().backward()
            assert x.grad is not None and (half or x.grad.isfinite().all())
    assert half or all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_other_precisions_give_the_same_but_for_rounding(name, dtype, bar, causal):
    """Normalised causal ones divide by the variance of the first few keys, so these are left out."""
    made, x = ordered(name, 16, 2), random(2, 40, 16)
    expected = made(x, causal=causal)
    other = ordered(name, 16, 2).to(dtype)(x.to(dtype), causal=causal).double()
    skipped = 4 if causal and "bn" in name else 0
    assert ((other - expected).norm(dim=-1) / expected.norm(dim=-1).mean())[:, skipped:].max() < bar


def test_one_key_gets_all_the_weight(name):
    """Whatever the query is: where all keys are one, and at the first token of what is causal."""
    made, x = ordered(name, 8, 8).float(), 3 * torch.randn(64, 5, 8)
    torch.testing.assert_close(made.weights(x[:, :1]), torch.ones(64, 8, 1, 1))
    if True in orders(name):
        torch.testing.assert_close(made.weights(x, causal=True)[:, :, 0, 0], torch.ones(64, 8))


def test_what_is_padded_may_be_anything(name):
    """NaN too; on the left, in holes, and where nothing else is there: then nothing is attended to."""
    x = random(3, 11, 12)
    padding = torch.zeros(3, 11, dtype=torch.bool)
    padding[0, :5], padding[1, [0, 3, 4, 8]], padding[2] = True, True, True
    made = layer(name)
    for causal in orders(name):
        made = steady(name, causal)
        good = made.head_outputs(x, padding=padding, causal=causal)
        for filler in (1e3, float("nan")):
            bad = made.head_outputs(x.masked_fill(padding.unsqueeze(-1), filler), padding=padding, causal=causal)
            close(bad.transpose(1, 2)[~padding], good.transpose(1, 2)[~padding])
    assert not made.head_outputs(x[2:], random(1, 4, 12), padding=torch.ones(1, 4, dtype=torch.bool)).any()


def test_a_copy_of_the_tokens_is_the_tokens_where_it_is_causal(name):
    """Padding is of the queries too then, to convolutions as well."""
    if True not in orders(name):
        return
    made, x = steady(name, causal=True), random(2, 11, 12)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[0, 3:5], padding[1, 9:] = True, True
    with torch.no_grad():
        for each in made.parameters():
            nn.init.normal_(each, std=0.4)
    expected = made(x, padding=padding, causal=True)
    found = made(x, x.clone(), padding=padding, causal=True)
    close(found[~padding], expected[~padding])


def test_what_is_padded_poisons_no_gradient(name):
    """NaN there changes nothing, also where the tokens are the end of a longer text."""
    for causal, begin in itertools.product(orders(name), (0, 4)):
        made, x = steady(name, causal), random(2, 11, 12)
        if begin and not (causal and made.segments):
            continue
        padding = torch.zeros(2, 11, dtype=torch.bool)
        padding[0, 2:5], padding[1, 9:] = True, True
        x = x.masked_fill(padding.unsqueeze(-1), torch.nan)
        out = made(x[:, begin:], x if begin else None, padding=padding, causal=causal)
        out[~padding[:, begin:]].square().sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in made.parameters() if p.grad is not None), (causal, begin)


def test_dropout_is_for_training(name):
    for causal in orders(name):
        made, x = ordered(name, dropout=0.5).train(), random(2, 6, 12)
        assert not torch.equal(made(x, causal=causal), made(x, causal=causal))
        made.eval()
        close(made(x, causal=causal), made(x, causal=causal))


COMPILE = """
import torch
from dualform.attention import ATTENTIONS, build
for name in ATTENTIONS:
    made = build(name, 12, 4, **({"one_sided": True} if name.startswith("conv1d") else {}))
    x = torch.randn(2, 9, 12)
    for causal in (False, True)[: 1 if name.startswith("conv2d") or name == "kdgqa" else 2]:
        torch.compiler.reset()
        made.train(name not in ("dgqa", "pgqa"))  # passes that count are no part of a graph, and noise differs
        whole = "sparse" not in name  # its pattern is made outside of the graph
        compiled = torch.compile(made, backend="eager", fullgraph=whole)
        torch.testing.assert_close(compiled(x, causal=causal), made(x, causal=causal))
    if name.startswith("relative"):
        for dropout in (0.1, 0.2):  # the second time a compiler takes it for a variable
            made = build(name, 12, 4, dropout=dropout)
            torch.compile(made, backend="eager", fullgraph=True)(x)
"""


@pytest.mark.slow
def test_all_are_compiled_and_all_but_sparse_ones_in_one_graph():
    """In a process of its own: the types that tests check stand in the way."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_sizes_that_do_not_fit_are_refused():
    for name in ATTENTIONS:
        with pytest.raises(SizeError, match="width=10 must be a multiple of heads=4"):
            build(name, 10, 4)
    with pytest.raises(UnknownLayer, match="no attention is called 'none'"):
        build("none", 8, 2)
    for name, option in (
        ("bn", "scales"),
        ("sparse", "windw"),
        ("sh", "beta"),
        ("linear-bn", "kernel"),
        ("conv2d", "axes"),
        ("gqa", "beta"),
        ("dgqa", "normalise"),
    ):
        with pytest.raises(UnknownLayer, match=f"'{name}' has no option '{option}': it has .*'bias'"):
            build(name, 8, 2, **{option: 1})
    with pytest.raises(SizeError, match="scales"):
        build("sh", 8, 2, scales=[1, 2, 3])


WRONG = [
    (torch.zeros(6, 8), None, None, r"x is \(6, 8\), but must be \(batch, tokens, width=8\)"),
    (torch.zeros(2, 6, 7), None, None, r"x is \(2, 6, 7\)"),
    (torch.zeros(2, 0, 8), None, None, r"1 token or more"),
    (torch.zeros(2, 6, 8), torch.zeros(1, 6, 8), None, "x has a batch of 2, but context has one of 1"),
    (
        torch.zeros(2, 6, 8),
        None,
        torch.zeros(2, 1, dtype=torch.bool),
        r"padding is torch.bool of \(2, 1\), but must be bool of \(2, 6\)",
    ),
    (torch.zeros(2, 6, 8), None, torch.zeros(2, 6), "padding is torch.float32"),
]


@pytest.mark.parametrize(("x", "context", "padding", "words"), WRONG)
def test_inputs_that_do_not_fit_are_refused(name, x, context, padding, words):
    made = build(name, 8, 2)
    with pytest.raises(SizeError, match=words), unchecked():
        made(x, context, padding=padding)
