"""Grouped heads: against the specification written out, against multi-head attention, and their weights pooled."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import close, layer, named_by_timm, random
from torch import Tensor, nn

from dualform.attention import GroupedQueryAttention, build, load_from
from dualform.attention.allocation import key_driven, owners, repeat_for_query_heads
from dualform.attention.masked_attention import split_heads
from dualform.errors import SizeError

NAMES = ["gqa", "kdgqa", "dgqa", "pgqa"]


def held(made: Any, allocation: list[int]) -> Any:
    """A layer that always has this allocation."""
    made.decided = lambda k, padding, causal: torch.tensor([allocation])
    return made


def written_out(
    made: GroupedQueryAttention, x: Tensor, context: Tensor, allocation: list[int], gone: Tensor, causal: bool
) -> Tensor:
    """Head by head and query by query."""
    out = torch.zeros(len(x), made.heads, x.shape[1], made.size, dtype=x.dtype)
    d = made.size
    group_of = [g for g, count in enumerate(allocation) for _ in range(count)]
    for b in range(len(x)):
        for head, g in enumerate(group_of):
            q = x[b] @ made.query.weight[head * d : (head + 1) * d].T + made.query.bias[head * d : (head + 1) * d]
            k, v = (
                context[b] @ part.weight[g * d : (g + 1) * d].T + part.bias[g * d : (g + 1) * d]
                for part in (made.key, made.value)
            )
            for i in range(x.shape[1]):
                seen = [j for j in range(context.shape[1]) if not gone[b, j] and (not causal or j <= i)]
                if seen:
                    out[b, head, i] = (k[seen] @ q[i] / math.sqrt(d)).softmax(0) @ v[seen]
    return out


@st.composite
def allocations(draw, heads: int, groups: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, heads), min_size=groups - 1, max_size=groups - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, heads], strict=True)]


@given(
    allocation=allocations(6, 3), kind=st.sampled_from(["self", "cross", "causal"]), n=st.integers(1, 7),
    m=st.integers(1, 7), share=st.sampled_from([0.0, 0.4]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_allocation_is_the_specification_written_out(allocation, kind, n, m, share, seed):
    """Groups without heads, padding and order included; the fast way, and the expansions."""
    made = held(layer("kdgqa", 12, 6, groups=3), allocation)
    x = random(2, n, 12, seed=seed)
    context = random(2, m, 12, seed=seed + 1) if kind == "cross" else x
    gone = torch.rand(context.shape[:2], generator=torch.Generator().manual_seed(seed)) < share
    given: dict[str, Any] = {"padding": gone, "causal": kind == "causal"}
    found = made.head_outputs(x, context if kind == "cross" else None, **given)
    blanked = context.masked_fill(gone.unsqueeze(-1), 0.0)
    expected = written_out(made, x if kind == "cross" else blanked, blanked, allocation, gone, kind == "causal")
    close(found, expected, 1e-10)
    expansions = made.expansions(x, context if kind == "cross" else None, **given)
    close(made.in_order([each.outputs() for each in expansions]), expected, 1e-10)


def test_one_group_a_head_is_multi_head_attention():
    """Against torch itself."""
    theirs, x = nn.MultiheadAttention(12, 4, batch_first=True).double(), random(2, 7, 12)
    nn.init.normal_(theirs.in_proj_bias)
    expected, weights = theirs(x, x, x, average_attn_weights=False)
    made = load_from(layer("gqa", groups=4), theirs)
    close(made(x), expected)
    close(made.weights(x), weights)
    plain = load_from(layer("softmax"), theirs)
    close(made(x, causal=True), plain(x, causal=True))


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (6, 3), (6, 2)])
def test_groups_are_heads_with_repeated_keys(heads, groups):
    """With G = 1, multi-query attention, keys and values are broadcast."""
    made, x = layer("gqa", 12, heads, groups=groups), random(2, 7, 12)
    q = split_heads(made.query(x), heads)
    k, v = (split_heads(each(x), groups).repeat_interleave(heads // groups, 1) for each in (made.key, made.value))
    expected = (q @ k.mT / math.sqrt(made.size)).softmax(-1) @ v
    close(made.head_outputs(x), expected)
    if groups == 1:
        k, v = (split_heads(each(x), 1) for each in (made.key, made.value))
        close((q @ k.mT / math.sqrt(made.size)).softmax(-1) @ v, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_multi_head_layer_with_the_same_keys_in_every_group_is_the_same_function(name):
    """Also the way back: a grouped layer as multi-head attention."""
    made, x = layer(name, 12, 6, groups=3), random(2, 7, 12)
    with torch.no_grad():  # keys of one size, so that all share evenly
        for part in (made.key, made.value):
            part.weight.copy_(part.weight[:2].repeat(3, 1))
            part.bias.copy_(part.bias[:2].repeat(3))
    whole = load_from(layer("softmax", 12, 6), made)
    close(whole(x), made(x))
    close(load_from(layer(name, 12, 6, groups=3), whole)(x), made(x))


@pytest.mark.parametrize("name", ["kdgqa", "dgqa"])
def test_gradients_with_a_constant_allocation_are_right(name):
    made = held(layer(name, 6, 3, groups=3), [2, 0, 1])
    x = random(2, 4, 6).requires_grad_()
    inputs = (x, *made.parameters())

    def of(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip((name for name, _ in made.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(made, named, (x,))

    assert torch.autograd.gradcheck(of, inputs)


@pytest.mark.parametrize("name", ["kdgqa", "dgqa"])
def test_a_group_without_heads_gets_no_gradient_at_all(name):
    made = held(layer(name, 12, 6, groups=3), [4, 0, 2])
    made(random(2, 5, 12)).square().sum().backward()
    for part in (made.key, made.value):
        by_group = part.weight.grad.unflatten(0, (3, 2)).abs().amax((1, 2))
        assert by_group[1] == 0 and bool((by_group[[0, 2]] > 0).all())
        assert not part.bias.grad.unflatten(0, (3, 2))[1].any()
        assert bool(part.weight.grad.isfinite().all())


@given(seed=st.integers(0, 99))
def test_examples_may_have_allocations_of_their_own(seed):
    each, norms = random(5, 4, 3, 2, seed=seed), random(5, 4, seed=seed + 1).abs()
    allocation = key_driven(norms, 8)
    found = repeat_for_query_heads(each, allocation, 8)
    for b in range(5):
        assert torch.equal(found[b], each[b][owners(allocation, 8)[b]])
        assert torch.equal(found[b : b + 1], repeat_for_query_heads(each[b : b + 1], allocation[b : b + 1], 8))


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("width", "heads", "groups", "whole", "fewer"),
    [(384, 6, 3, 591_360, 443_520), (768, 12, 6, 2_362_368, 1_771_776), (1024, 16, 8, 4_198_400, 3_148_800)],
)
def test_parameters_are_as_many_as_in_the_specification(width, heads, groups, whole, fewer):
    with torch.device("meta"):
        for name in NAMES:
            for options, count in (({"groups": heads}, whole), ({"groups": groups}, fewer), ({}, fewer)):
                assert sum(p.numel() for p in build(name, width, heads, **options).parameters()) == count


def test_groups_that_do_not_fit_are_refused():
    """Trap 6."""
    for name in NAMES:
        with pytest.raises(
            SizeError, match=r"heads=8 must be a multiple of groups=3; divisors of 8 are \[1, 2, 4, 8\]"
        ):
            build(name, 16, 8, groups=3)
        with pytest.raises(SizeError, match="groups=0 must be a whole number, 1 or more"):
            build(name, 16, 8, groups=0)
    assert [build("gqa", 2 * h, h).kv_heads for h in (1, 2, 3, 4, 6, 8, 9, 12)] == [1, 1, 1, 2, 3, 4, 3, 6]


# ---------------------------------------------------------------- weights of other layers


def pooled(weight: Tensor, heads: int, groups: int) -> Tensor:
    """The mean of the d × D blocks of each run, one by one."""
    blocks = weight.chunk(heads)
    run = heads // groups
    return torch.cat([torch.stack(list(blocks[g * run : (g + 1) * run])).mean(0) for g in range(groups)])


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("way", ["load_from", "state dict"])
@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_of_a_run_become_their_mean(name, way, groups):
    """With G = H bit for bit, and a view that is not heads first on the output axis fails."""
    whole, made = layer("softmax", 12, 6), layer(name, 12, 6, groups=groups)
    if way == "load_from":
        load_from(made, whole)
    else:
        made.load_state_dict(whole.state_dict())
    for part in ("query", "key", "value", "out"):
        ours, theirs = made.get_submodule(part), whole.get_submodule(part)
        for kind in ("weight", "bias"):
            expected = getattr(theirs, kind)
            expected = expected if part in ("query", "out") else pooled(expected, 6, groups)
            assert torch.equal(getattr(ours, kind), expected)
    if groups == 6 and name in ("gqa", "dgqa", "pgqa"):
        x = random(2, 5, 12)
        close(made(x), whole(x))
    if 1 < groups < 6:
        wrong = whole.key.weight.unflatten(1, (6, -1)).unflatten(1, (groups, -1)).mean(2).flatten(1)
        assert wrong.shape == (12, 2 * groups) and (wrong.mT - made.key.weight).abs().max() > 1e-3


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_heads_that_are_the_same_in_each_run_stay_the_same_function(groups):
    """For any G: also from one number of groups to another."""
    whole, x = layer("softmax", 12, 6), random(2, 5, 12)
    with torch.no_grad():
        for part in (whole.key, whole.value):
            for rows in (part.weight, part.bias):
                runs = rows.unflatten(0, (groups, 6 // groups, 2))
                runs.copy_(runs[:, :1].expand_as(runs).clone())
    made = load_from(layer("gqa", 12, 6, groups=groups), whole)
    close(made(x), whole(x))
    for more in (n for n in (1, 2, 3, 6) if n % groups == 0):
        close(load_from(layer("gqa", 12, 6, groups=more), made)(x), whole(x))
    between = load_from(layer("gqa", 12, 6, groups=3), load_from(layer("gqa", 12, 6, groups=2), whole))
    expected = pooled(pooled(whole.key.weight, 6, 2).unflatten(0, (2, 2)).repeat_interleave(3, 0).flatten(0, 1), 6, 3)
    close(between.key.weight, expected)


@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "linear", "sparse", "conv1d", *NAMES])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_of_timm_is_loaded_by_its_names(name, bias):
    """A fused qkv weight with rows q | k | v, and proj; without a bias of qkv ours becomes zero."""
    plain = layer("softmax")
    if not bias:
        for part in (plain.query, plain.key, plain.value):
            nn.init.zeros_(part.bias)
    state = named_by_timm(plain)
    if bias:
        state["qkv.bias"] = torch.cat([plain.query.bias, plain.key.bias, plain.value.bias])
    before, made = dict(state), layer(name)
    with torch.no_grad():
        for each in made.parameters():
            each.add_(1.0)
    missing = made.load_state_dict(state, strict=name != "conv1d")
    assert not missing.unexpected_keys and missing.missing_keys in ([], ["conv.weight"])
    assert state.keys() == before.keys()
    expected = load_from(layer(name), plain)
    for part in ("query", "key", "value", "out"):
        for one, two in zip(
            made.get_submodule(part).parameters(), expected.get_submodule(part).parameters(), strict=True
        ):
            assert torch.equal(one, two)


# ---------------------------------------------------------------- one token after the other


@pytest.mark.parametrize("name", ["gqa", "dgqa", "pgqa"])
@pytest.mark.parametrize("sizes", [[1] * 7, [3, 1, 3], [7]])
def test_token_by_token_it_is_causal_attention(name, sizes):
    """And the cache has the groups alone: a third of what multi-head attention keeps."""
    made, x = layer(name, 12, 6, groups=2), random(2, 7, 12)
    if name == "dgqa":
        made.allocation.copy_(torch.tensor([1, 5]))
    found, cache = [], None
    for part in x.split(sizes, 1):
        y, cache = made.step(part, cache)
        found.append(y)
    close(torch.cat(found, 1), made(x, causal=True))
    assert cache is not None and len(cache) == 7 and cache.bytes == 2 * 2 * 2 * 7 * 2 * 8
    with pytest.raises(SizeError, match="x has a batch of 1, but the cache has one of 2"):
        made.step(x[:1], cache)


def test_key_driven_groups_cannot_go_on_from_a_cache():
    with pytest.raises(SizeError, match="a KeyDrivenAttention cannot continue from a cache"):
        layer("kdgqa").step(random(2, 1, 12))
