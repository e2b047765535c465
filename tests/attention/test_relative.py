"""Relative attention, convolved heads, and both: spec checks 1 to 9, 11 and 13."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import unchecked
from hypothesis import given
from hypothesis import strategies as st
from making import close, layer, named_by_timm, random
from torch import Tensor, nn

from dualform.attention import BatchNormAttention, Cache, ConvolvedAttention, build, load_from
from dualform.attention.linear import LinearKernel
from dualform.attention.positions import TablePositions, shifted, sinusoids
from dualform.attention.relative import RelativeSoftmaxKernel
from dualform.attention.relative_conv import LookingBack
from dualform.attention.sparse import SparseKernel
from dualform.errors import SizeError

FOUR = ["softmax", "mdha", "relative", "relative-conv"]


def made(name: str, width: int = 8, heads: int = 2, seed: int = 0, **options: Any) -> Any:
    """A layer whose parameters are all random, tables and biases too."""
    found = layer(name, width, heads, **options)
    generator = torch.Generator().manual_seed(seed)
    for each in found.parameters():
        nn.init.normal_(each, std=0.5, generator=generator)
    return found


def by_definition(kernel: RelativeSoftmaxKernel, q: Tensor, k: Tensor, n: int, m: int) -> Tensor:
    """Scores over √d, one query, key and head after the other: as published."""
    table = kernel.position
    assert isinstance(table, TablePositions)
    heads, d, reach, rows, numbers = q.shape[1], q.shape[-1], table.reach, table.vectors.weight, table.numbers.weight
    u = kernel.u.weight[0]
    found = torch.zeros(len(q), heads, n, m, dtype=q.dtype)
    for b, h, i, j in itertools.product(range(len(q)), range(heads), range(n), range(m)):
        row, mine = reach + j - (m - n + i), slice(h * d, (h + 1) * d)
        score = (q[b, h, i] + u[mine]) @ k[b, h, j] + q[b, h, i] @ rows[row, mine] + numbers[row, h]
        found[b, h, i, j] = score / math.sqrt(d)
    return found


def convolved(x: Tensor, conv: LookingBack) -> Tensor:
    """Spec §3.2, token by token: (b, n, D)."""
    weight, bias, heads = conv.conv.weight, conv.conv.bias, conv.heads
    found = torch.zeros_like(x).unflatten(-1, (heads, -1))
    y, taps = x.unflatten(-1, (heads, -1)), weight.shape[-1]
    for t, s, h in itertools.product(range(x.shape[1]), range(taps), range(heads)):
        w = weight[:, 0, 0, s] if conv.sharing == "channel" else weight.unflatten(0, (heads, -1))[h, :, 0, s]
        if t - (taps - 1) + s >= 0:
            found[:, t, h] += w * y[:, t - (taps - 1) + s, h]
    if bias is not None:
        found = found + (bias if conv.sharing == "channel" else bias.unflatten(0, (heads, -1)))
    return found.flatten(-2)


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize(("n", "memory"), [(5, 0), (5, 3), (1, 0), (1, 4), (2, 32)])
@pytest.mark.parametrize("name", ["relative", "relative-conv"])
def test_scores_are_the_definition(name, n, memory):
    """With convolutions too, and what is made of the scores."""
    layer_, x = made(name, reach=40), random(2, memory + n, 8)
    q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in layer_.projected(x[:, memory:], x, None, True))
    expected = by_definition(layer_.kernel, q, k, n, memory + n)
    close(layer_.kernel.scores(q, k), expected, 1e-10)
    later = torch.ones(n, memory + n, dtype=torch.bool).triu(1 + memory)
    weights = expected.masked_fill(later, -torch.inf).softmax(-1)
    close(layer_.weights(x[:, memory:], x, causal=True), weights, 1e-10)
    close(layer_.head_outputs(x[:, memory:], x, causal=True), weights @ v, 1e-10)


@pytest.mark.parametrize(("n", "memory"), [(5, 0), (5, 3), (1, 4), (1, 1)])
@pytest.mark.parametrize("name", ["mdha", "relative-conv"])
@pytest.mark.parametrize("context", ["memory", "segment"])
def test_projections_are_what_is_convolved(name, n, memory, context):
    """Written out: projections, then their own convolutions; of queries as it is asked for."""
    layer_, x = made(name, query_context=context), random(2, memory + n, 8)
    start = memory if context == "segment" else 0
    q = convolved(layer_.query(x[:, start:]), layer_.query_conv)[:, -n:]
    k, v = convolved(layer_.key(x), layer_.key_conv), convolved(layer_.value(x), layer_.value_conv)
    q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (q, k, v))
    relative = name == "relative-conv"
    scores = by_definition(layer_.kernel, q, k, n, memory + n) if relative else q @ k.mT / 2
    later = torch.ones(n, memory + n, dtype=torch.bool).triu(1 + memory)
    heads = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    expected = layer_.out(heads.transpose(1, 2).flatten(-2))
    close(layer_(x[:, memory:], x, causal=True), expected, 1e-10)


@pytest.mark.parametrize("name", ["mdha", "relative-conv"])
@pytest.mark.parametrize("causal", [False, True])
def test_padded_tokens_are_zeros_to_convolutions(name, causal):
    """A text that is padded on the left is the shorter text: what is not there has no key, nor the bias of one."""
    layer_, x = made(name, qk_bias=True), random(2, 9, 8)
    gone = torch.zeros(2, 9, dtype=torch.bool)
    gone[:, :4] = True
    close(layer_(x, padding=gone, causal=causal)[:, 4:], layer_(x[:, 4:], causal=causal), 1e-10)


@given(n=st.integers(1, 9), m=st.integers(1, 12))
def test_scores_of_any_lengths_are_the_definition(n, m):
    """Fewer keys than queries too: then the first queries stand before them all."""
    layer_, x, context = made("relative", reach=13), random(2, n, 8), random(2, m, 8, seed=1)
    q, k, _ = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in layer_.projected(x, context, None, False))
    expected = by_definition(layer_.kernel, q, k, n, m)
    close(layer_.kernel.scores(q, k), expected, 1e-10)
    close(layer_.weights(x, context), expected.softmax(-1), 1e-10)


@given(n=st.integers(1, 9), memory=st.integers(-8, 9), reach=st.integers(20, 30))
def test_the_shift_brings_each_offset_to_its_key(n, memory, reach):
    """With the row's own number in every row."""
    m = max(1, memory + n)
    rows = torch.arange(reach - m, reach + n, dtype=torch.float64).repeat(n, 1)
    i, j = torch.arange(n).unsqueeze(1), torch.arange(m)
    expected = (reach + j - (m - n) - i).double()
    found = shifted(rows, m)
    assert torch.equal(found, expected)
    assert found.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    if m >= n:
        seen = j <= (m - n) + i
        assert torch.equal(shifted(rows[:, : m + 1], m)[seen], expected[seen])
    # a column more, the buffer read in rows of n, its last row dropped, and read in rows again
    padded = torch.cat([rows, torch.zeros(n, 1, dtype=torch.float64)], 1).reshape(m + n + 1, n)[:-1]
    assert torch.equal(padded.reshape(n, m + n)[:, n:], expected)


@pytest.mark.parametrize("memory", [0, 3])
def test_sinusoids_are_tables_that_are_given(memory):
    """S = v·W r and R = W r, copied into tables."""
    one, two = made("relative", pos="sinusoid"), made("relative", reach=16)
    theirs = one.kernel.position
    assert theirs.project.bias is None
    with torch.no_grad():
        r = sinusoids(16 - torch.arange(32), 8)
        two.kernel.position.vectors.weight.copy_(theirs.project(r))
        v = theirs.v.weight * theirs.project(r)
        two.kernel.position.numbers.weight.copy_(v.unflatten(-1, (2, 4)).sum(-1))
    two.load_state_dict({name: t for name, t in one.state_dict().items() if "position" not in name}, strict=False)
    x = random(2, 7, 8)
    close(one(x[:, memory:], x, causal=True), two(x[:, memory:], x, causal=True), 1e-10)
    close(one(x, x[:, :4]), two(x, x[:, :4]), 1e-10)


def test_sinusoids_are_sines_then_cosines():
    found = sinusoids(torch.tensor([0, 3]), 4)
    expected = [[0, 0, 1, 1], [math.sin(3), math.sin(0.03), math.cos(3), math.cos(0.03)]]
    close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["relative", "relative-conv"])
@pytest.mark.parametrize("pos", ["table", "sinusoid"])
def test_only_the_distance_counts(name, pos):
    """Of a periodic input the scores repeat along the diagonals, behind the first tokens."""
    layer_, x = made(name, pos=pos), random(1, 4, 8).repeat(1, 4, 1)
    q, k, _ = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in layer_.projected(x, x, None, True))
    scores = layer_.kernel.scores(q, k)[..., 2:, 2:]
    close(scores[..., 4:, 4:], scores[..., :-4, :-4], 1e-10)
    fresh = layer(name, 8, 2)
    q, k, _ = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in fresh.projected(x, x, None, True))
    close(fresh.kernel.scores(q, k), q @ k.mT / 2, 1e-12)


def test_positions_that_are_too_far_are_refused():
    layer_ = layer("relative", reach=6)
    close(layer_(random(1, 6, 12)), layer_(random(1, 6, 12)))
    with pytest.raises(SizeError, match="a sequence of 7 tokens is longer than reach=6"):
        layer_(random(1, 7, 12))
    with pytest.raises(SizeError, match="a sequence of 7 tokens"):
        layer_(random(1, 7, 12), random(1, 2, 12))
    assert layer("relative", pos="sinusoid", reach=6)(random(1, 9, 12)).shape == (1, 9, 12)
    for options in ({"pos": "learned"}, {"reach": 0}):
        with pytest.raises(SizeError), unchecked():
            build("relative", 8, 2, **options)


# ---------------------------------------------------------------- convolutions


@given(n=st.integers(1, 7), kernel=st.integers(1, 4), sharing=st.sampled_from(["channel", "head"]), bias=st.booleans())
def test_a_convolution_is_the_explicit_sum(n, kernel, sharing, bias):
    conv, x = LookingBack(8, 2, kernel, sharing=sharing, bias=bias, init="default").double(), random(2, n, 8)
    close(conv(x), convolved(x, conv), 1e-10)
    assert sum(p.numel() for p in conv.parameters()) == (4 if sharing == "channel" else 8) * (kernel + bias)


@pytest.mark.parametrize("sharing", ["channel", "head"])
def test_an_impulse_is_heard_for_as_long_as_the_kernel_and_wherever_it_is(sharing):
    conv = LookingBack(8, 2, 3, sharing=sharing, bias=True, init="default").double()
    silence = torch.zeros(1, 12, 8, dtype=torch.float64)
    heard = []
    for t in (2, 5):
        impulse = silence.clone()
        impulse[:, t] = random(1, 8)
        difference = conv(impulse) - conv(silence)
        there = difference.abs().amax((0, 2)) > 1e-12
        assert there.nonzero().squeeze(1).tolist() == [t, t + 1, t + 2]
        heard.append(difference)
    close(heard[0][:, :9], heard[1][:, 3:])


def test_kernels_begin_as_it_is_said():
    """The identity is exact; Primer's taps; torch's own range."""
    x = random(2, 6, 8)
    for sharing, bias in itertools.product(("channel", "head"), (True, False)):
        assert torch.equal(LookingBack(8, 2, 3, sharing=sharing, bias=bias, init="identity").double()(x), x)
        primer = LookingBack(8, 2, 3, sharing=sharing, bias=bias, init="primer").conv.weight
        torch.testing.assert_close(
            primer.flatten(0, -2), torch.tensor([0.5 / 3, 0.5 / 3, 0.5]).expand(primer.numel() // 3, 3)
        )
    default = LookingBack(512, 1, 3, sharing="channel", bias=True, init="default").conv
    assert default.bias is not None
    for each in (default.weight, default.bias):
        assert 0.95 * 3**-0.5 < float(each.detach().abs().max()) <= 3**-0.5


@pytest.mark.parametrize(
    ("option", "value"),
    [("kernel", 0), ("sharing", "none"), ("init", "zero"), ("query_context", "x"), ("mode", "fast")],
)
def test_convolutions_that_are_not_known_are_refused(option, value):
    with pytest.raises(SizeError, match=f"{option}={value!r}"), unchecked():
        build("mdha", 8, 2, **{option: value})


def test_a_convolution_that_looks_ahead_would_be_noticed():
    """The test of causality fails for a centred convolution."""
    layer_ = made("relative-conv")
    ahead = nn.Conv2d(4, 4, (1, 3), groups=4, padding=(0, 1)).double()

    class Centred(LookingBack):
        def forward(self, x: Tensor) -> Tensor:
            return ahead(x.unflatten(-1, (2, -1)).permute(0, 3, 2, 1)).permute(0, 3, 2, 1).flatten(-2)

    def leaks() -> bool:
        x = random(1, 9, 8)
        other = x.clone()
        other[:, 5:] += 1
        return bool((layer_(x, causal=True) - layer_(other, causal=True))[:, :5].abs().max() > 1e-12)

    assert not leaks()
    for part in ("query_conv", "key_conv", "value_conv"):
        before = getattr(layer_, part)
        setattr(layer_, part, Centred(8, 2, 3, sharing="channel", bias=True, init="default"))
        assert leaks(), part
        setattr(layer_, part, before)


@pytest.mark.parametrize("weigh", [LinearKernel(), SparseKernel()])
def test_kernels_that_know_no_segments_take_none(weigh):
    layer_, x = ConvolvedAttention(8, 2, weigh=weigh).double(), random(2, 10, 8)
    assert not layer_.segments and layer_(x, causal=True).shape == x.shape
    with pytest.raises(SizeError, match="causal attention is from a sequence to itself"):
        layer_(x[:, 6:], x, causal=True)
    with pytest.raises(SizeError, match="cannot continue from a cache"):
        layer_.step(x[:, :1])


def test_relative_scores_are_not_normalised_in_silence():
    for look in ("forward", "weights"):
        with pytest.raises(SizeError, match="without batch normalisation"):
            getattr(BatchNormAttention(8, 2, kernel=RelativeSoftmaxKernel(8, 2)), look)(random(2, 5, 8).float())


# ---------------------------------------------------------------- one layer is another


def test_what_is_left_out_leaves_the_others():
    """Without convolutions it is relative, without positions MDHA, without both it is plain."""
    x = random(2, 9, 8)
    both = made("relative-conv")
    plain = {name: t for name, t in both.state_dict().items() if name.startswith(("query.", "key.", "value.", "out."))}
    mdha = made("mdha", qk_bias=False)
    mdha.load_state_dict({name: t for name, t in both.state_dict().items() if not name.startswith("kernel.")})
    relative = made("relative")
    relative.load_state_dict({name: t for name, t in both.state_dict().items() if "conv" not in name})
    softmax = made("softmax")
    for part in ("query", "key"):
        nn.init.zeros_(getattr(softmax, part).bias)
    softmax.load_state_dict(plain, strict=False)
    for causal in (False, True):
        identity = layer("relative-conv", 8, 2, init="identity")
        identity.load_state_dict({name: t for name, t in both.state_dict().items() if "conv" not in name}, strict=False)
        close(identity(x, causal=causal), relative(x, causal=causal), 1e-10)
        still = layer("relative-conv", 8, 2)
        still.load_state_dict(
            {name: t for name, t in both.state_dict().items() if not name.startswith("kernel.")}, strict=False
        )
        close(still(x, causal=causal), mdha(x, causal=causal), 1e-10)
        neither = layer("relative-conv", 8, 2, init="identity")
        neither.load_state_dict(plain, strict=False)
        close(neither(x, causal=causal), softmax(x, causal=causal), 1e-10)
    assert (both(x) - relative(x)).abs().max() > 1e-3 and (both(x) - mdha(x)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["mdha", "relative", "relative-conv"])
def test_heads_have_no_order(name):
    """With their weights, positions and columns of the last projection they may change places."""
    one, two, order = made(name, 12, 3, bias=False), made(name, 12, 3, bias=False), [2, 0, 1]
    state = one.state_dict()
    for key, value in state.items():
        parts = value.detach().clone()
        if key.startswith(("query.", "key.", "value.")):
            parts = parts.unflatten(0, (3, 4))[order].flatten(0, 1)
        elif key == "out.weight" or key.endswith(("u.weight", "vectors.weight")):
            parts = parts.unflatten(1, (3, 4))[:, order].flatten(1, 2)
        elif key.endswith("numbers.weight"):
            parts = parts[:, order]
        state[key] = parts
    two.load_state_dict(state)
    x = random(2, 7, 12)
    close(one(x, causal=True), two(x, causal=True), 1e-10)
    close(one.head_outputs(x)[:, order], two.head_outputs(x), 1e-10)


def test_biases_that_a_layer_has_no_place_for_are_not_dropped():
    """A relative layer has none for queries and keys."""
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    load_from(layer("relative", 8, 2), theirs)
    nn.init.normal_(theirs.in_proj_bias)
    with pytest.raises(SizeError, match="bias"):
        load_from(layer("relative", 8, 2), theirs)
    x = random(2, 5, 8)
    close(load_from(layer("relative", 8, 2, qk_bias=True), theirs)(x), theirs(x, x, x)[0], 1e-12)
    assert layer("relative").query.bias is None and layer("relative").value.bias is not None
    assert layer("mdha").key.bias is not None and layer("mdha", bias=False).out.bias is None


@pytest.mark.parametrize("qk_bias", [False, True])
def test_weights_of_timm_get_the_biases_that_a_layer_has(qk_bias):
    """Zeros where timm has none and a layer has one, and none where it has none."""
    plain, x = layer("softmax"), random(2, 5, 12)
    for part in (plain.query, plain.key, plain.value):
        nn.init.zeros_(part.bias)
    state = named_by_timm(plain)
    one = layer("relative", qk_bias=qk_bias)
    found = one.load_state_dict(state, strict=False)
    assert not found.unexpected_keys and all(key.startswith("kernel.") for key in found.missing_keys)
    close(one(x), plain(x))


# ---------------------------------------------------------------- segments


@pytest.mark.parametrize("name", FOUR)
@given(cut=st.integers(1, 9), pos=st.sampled_from(["table", "sinusoid"]))
def test_two_segments_are_one(name, cut, pos):
    """For a layer that remembers all of the past."""
    layer_, x = made(name, **({"pos": pos} if "relative" in name else {})), random(2, 10, 8)
    whole = layer_(x, causal=True)
    close(layer_(x[:, cut:], x, causal=True), whole[:, cut:], 1e-10)
    close(layer_.weights(x[:, cut:], x, causal=True), layer_.weights(x, causal=True)[:, :, cut:], 1e-10)


@pytest.mark.parametrize("name", ["mdha", "relative-conv"])
def test_the_released_code_forgets_the_past_of_queries(name):
    """Convolved over the segment alone, its first queries differ, unless their convolution is the identity."""
    x = random(2, 10, 8)
    for option, value in (("query_context", "segment"), ("mode", "reference")):
        layer_ = made(name, **{option: value})  # type: ignore
        whole, segment = layer_(x, causal=True)[:, 6:], layer_(x[:, 6:], x, causal=True)
        assert (whole - segment)[:, :2].abs().amax((0, 2)).min() > 1e-3
        close(whole[:, 2:], segment[:, 2:], 1e-10)
        layer_.query_conv = LookingBack(8, 2, 3, sharing="channel", bias=True, init="identity").double()
        close(layer_(x[:, 6:], x, causal=True), layer_(x, causal=True)[:, 6:], 1e-10)


@pytest.mark.parametrize("name", FOUR)
def test_padding_of_a_memory_does_not_count(name):
    """Nor does what is padded in the segment itself."""
    layer_, x = made(name), random(2, 10, 8)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[0, :3], padding[1, 7] = True, True
    for filler in (1e3, float("nan")):
        other = x.masked_fill(padding.unsqueeze(-1), filler)
        one, two = (layer_(each[:, 6:], each, padding=padding, causal=True) for each in (x, other))
        close(one[~padding[:, 6:]], two[~padding[:, 6:]])
    close(layer_(x[:, 6:], x, padding=padding, causal=True)[~padding[:, 6:]],
          layer_(x, padding=padding, causal=True)[:, 6:][~padding[:, 6:]], 1e-10)  # fmt: skip


def test_segments_are_for_layers_that_take_them():
    x = random(1, 9, 12)
    with pytest.raises(SizeError, match="a sequence to itself, but there are 4 queries and 9 keys"):
        layer("bn")(x[:, 5:], x, causal=True)
    with pytest.raises(SizeError, match="or from its end, to itself, but there are 9 queries and 4 keys"):
        layer("relative")(x, x[:, 5:], causal=True)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", ["mdha", "relative", "relative-conv"])
@pytest.mark.parametrize("options", [{}, {"pos": "sinusoid"}, {"sharing": "head"}])
def test_gradients_of_all_parameters_are_right(name, options):
    options = {
        key: value
        for key, value in options.items()
        if (key == "pos") == (name == "relative") or name == "relative-conv"
    }
    if "relative" in name:
        options = {"reach": 6} | options
    layer_, x = made(name, 4, 2, **options), random(1, 5, 4)
    names = [key for key, _ in layer_.named_parameters()]

    def output(*parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer_, given, (x[:, 2:], x), {"causal": True})

    assert torch.autograd.gradcheck(output, tuple(layer_.parameters()))


@pytest.mark.parametrize("name", ["relative", "relative-conv"])
def test_rows_of_offsets_that_do_not_occur_are_not_trained(name):
    """Only rows of offsets that occur are; with the future hidden none beyond the query's own."""
    for causal, last in ((False, 4), (True, 0)):
        layer_ = made(name, reach=20)
        layer_(random(2, 5, 8), random(2, 12, 8, seed=1), causal=causal).square().sum().backward()
        for table in (layer_.kernel.position.vectors, layer_.kernel.position.numbers):
            touched = table.weight.grad.abs().sum(1) > 0
            assert touched.nonzero().squeeze(1).tolist() == list(range(20 - 11, 20 + last + 1))


# ---------------------------------------------------------------- step by step


@pytest.mark.parametrize("name", FOUR)
@given(
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    options=st.sampled_from([{}, {"mode": "reference"}, {"kernel": 5}, {"kernel": 1}, {"pos": "sinusoid"}]),
)
def test_going_on_from_a_cache_is_reading_all_of_it(name, steps, options):
    """One token or several at a time."""
    taken = {"mdha": ("mode", "kernel"), "relative": ("pos",), "relative-conv": ("mode", "kernel", "pos")}
    options = {key: value for key, value in options.items() if key in taken.get(name, ())}
    layer_, x = made(name, **options), random(2, sum(steps), 8)
    cache, found = None, []
    for part in x.split(steps, 1):
        y, cache = layer_.step(part, cache)
        found.append(y)
    close(torch.cat(found, 1), layer_(x, causal=True), 1e-10)
    assert isinstance(cache, Cache) and len(cache) == sum(steps)
    before = min(options.get("kernel", 3) - 1, sum(steps)) if "conv" in name or name == "mdha" else 0
    assert cache.bytes == 8 * 2 * 8 * (2 * sum(steps) + 3 * before)


def test_what_has_no_cache_says_so():
    for name, kind in (
        ("bn", "BatchNormAttention"), ("sh", "ScaledHeadAttention"), ("linear", "LinearAttention"),
        ("kdgqa", "KeyDrivenAttention"),
    ):  # fmt: skip
        with pytest.raises(SizeError, match=f"a {kind} cannot continue from a cache: it does not take segments"):
            layer(name).step(random(1, 1, 12))
    _, cache = layer("relative").step(random(1, 1, 12))
    with pytest.raises(SizeError, match="x has a batch of 2, but the cache has one of 1"):
        layer("relative").step(random(2, 1, 12), cache)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (
            ("gqa", {"groups": 2}),
            ("gqa", {"groups": 4}),
            "keys of 2 heads with 3 channels each, but this layer has 4",
        ),
        (("softmax", {}), ("gqa", {}), "keys of 4 heads"),
        (
            ("softmax", {"heads": 2}),
            ("softmax", {}),
            "keys of 2 heads with 6 channels each, but this layer has 4 with 3",
        ),
        (
            ("softmax", {}),
            ("mdha", {}),
            r"earlier inputs of shapes \[\], but this layer needs \[\(2, 12\), \(2, 12\), \(2, 12\)\]",
        ),
        (("mdha", {}), ("softmax", {}), r"earlier inputs of shapes \[\(2, 12\)"),
        (("mdha", {"kernel": 2}), ("mdha", {"kernel": 5}), r"shapes \[\(1, 12\).*this layer needs \[\(3, 12\)"),
    ],
)
def test_a_cache_of_another_layer_is_refused(one, two, words):
    (name, options), (other, others) = one, two
    _, cache = layer(name, **options).step(random(1, 3, 12))
    with pytest.raises(SizeError, match=words):
        layer(other, **others).step(random(1, 1, 12), cache)


def test_tables_know_their_own_reach():
    assert TablePositions(8, 2, 3).vectors.weight.shape == (6, 8) and TablePositions(8, 2, 3).numbers.weight.shape == (
        6,
        2,
    )
