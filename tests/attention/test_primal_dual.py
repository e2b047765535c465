"""Attention as a support vector expansion: golden values of the specification, and the laws of each member."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dualform.attention import (
    ATTENTIONS,
    BatchNormAttention,
    ScaledHeadAttention,
    SoftmaxAttention,
    build,
    load_from,
)
from dualform.attention.core import attend
from dualform.attention.expansion import feature_map
from dualform.attention.linear import through_prefixes, through_state
from dualform.attention.norm import key_statistics, normalised_query, prefix_statistics
from dualform.attention.windows import Pool, Windows
from dualform.errors import QueryError, SizeError

Q = torch.tensor([[1, 0], [0, 2], [-1, 1]], dtype=torch.float64)[None, None]
K = torch.tensor([[1, 2], [3, 0], [-1, 1]], dtype=torch.float64)[None, None]
V = torch.tensor([[1], [2], [4]], dtype=torch.float64)[None, None]


def bn(beta: float = 1.0, eps: float = 0.0, use_var: bool = True, causal: bool = False) -> Tensor:
    found = prefix_statistics(K) if causal else key_statistics(K)
    q = normalised_query(Q, found, beta=beta, eps=eps, use_var=use_var)
    return attend(q, K, V, causal=causal)


def sh(pool: Pool = "avg", normalise: bool = False) -> Tensor:
    k, v = (Windows(3, 2, pool).pooled(each)[0] for each in (K, V))
    q = normalised_query(Q, key_statistics(k), eps=1e-5) if normalise else Q
    return attend(q, k, v)


GOLDEN = {
    "softmax": (lambda: attend(Q, K, V), (1.90408302, 1.60546947, 2.98996160)),
    "linear": (lambda: through_state(feature_map(Q), feature_map(K), V), (1.91841898, 2.07123143, 2.10701758)),
    "BN": (lambda: bn(), (2.39054697, 2.10658664, 3.12800789)),
    "BN, eps": (lambda: bn(eps=1e-5), (2.39054940, 2.10659584, 3.12800516)),
    "BN, beta 0.5": (lambda: bn(beta=0.5), (2.26483915, 1.63864241, 2.65339250)),
    "BN, centred": (lambda: bn(use_var=False), (2.42796157, 2.98996160, 3.82655341)),
    "SH, avg": (lambda: sh(), (1.76760450, 2.75, 3.73239550)),
    "SH, stride": (lambda: sh("stride"), (1.58671095, 1.58671095, 3.00928465)),
    "BN+SH": (lambda: sh(normalise=True), (2.46071091, 3.03928909, 3.51107173)),
    "causal softmax": (lambda: attend(Q, K, V, causal=True), (1, 1.05580722, 2.98996160)),
    "causal BN": (lambda: bn(eps=1e-5, causal=True), (1, 1.01416663, 3.12800516)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    """B1: the table of spec §7.1."""
    work, expected = GOLDEN[name]
    torch.testing.assert_close(work().flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(name: str, width: int = 12, heads: int = 4, **options) -> Any:
    torch.manual_seed(0)
    return build(name, width, heads, **options).double()


def steady(name: str) -> Any:
    """The same, with a pattern that does not follow the length of the sequence."""
    return layer(name, **({"window": 2, "stride": 3} if "sparse" in name else {}))


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# ---------------------------------------------------------------- the battery: all members of the table


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


def values(made: Any, x: Tensor, causal: bool = False, padding: Tensor | None = None) -> Tensor:
    """The values of all tokens, unpooled, head by head; zero where a token is not there."""
    if isinstance(made, ScaledHeadAttention):
        found = torch.cat([each(x) for each in made.value.values()], -1)
    else:
        found = made.projected(x, x, padding, causal, True)[2]
    found = found if padding is None else found.masked_fill(padding.unsqueeze(-1), 0.0)
    return found.unflatten(-1, (made.heads, -1)).transpose(1, 2)


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


# ---------------------------------------------------------------- single members


def test_softmax_is_that_of_torch():
    theirs, x = nn.MultiheadAttention(12, 4, batch_first=True).double(), random(2, 7, 12)
    nn.init.normal_(theirs.in_proj_bias)
    expected, weights = theirs(x, x, x, average_attn_weights=False)
    made = load_from(layer("softmax"), theirs)
    assert isinstance(made, SoftmaxAttention)
    close(made(x), expected)
    close(made.weights(x), weights)
    close(load_from(layer("bn", beta=0.0, use_var=False), theirs)(x), expected)
    close(load_from(layer("sh", scales=[1] * 4), theirs)(x), expected)
    close(load_from(layer("conv1d"), theirs)(x), expected)
    mixed = load_from(layer("sh", scales=[1, 1, 2, 4]), theirs).head_outputs(x)
    close(mixed[:, :2], made.head_outputs(x)[:, :2])
    with pytest.raises(SizeError, match="width 12 with 4 heads"):
        load_from(made, nn.MultiheadAttention(12, 3))


def test_batch_normalisation_without_mean_and_variance_is_softmax():
    """B2."""
    one, two, x = layer("softmax"), layer("bn", beta=0.0, use_var=False), random(2, 7, 12)
    two.load_state_dict(one.state_dict())
    close(one(x), two(x))


def test_four_forms_of_batch_normalisation_agree():
    """B3: as defined, with the query changed, with a bias for each key, and on the fused kernel with that bias."""
    q, k, v = random(2, 3, 5, 4), random(2, 3, 7, 4, seed=1), random(2, 3, 7, 4, seed=2)
    for beta in (1.0, 0.3):
        mean, variance = key_statistics(k)
        inverse = (variance + 1e-5).rsqrt()
        logits = ((q - beta * mean) * inverse) @ ((k - beta * mean) * inverse).mT / math.sqrt(4)
        defined = logits.softmax(-1) @ v
        changed = attend(normalised_query(q, (mean, variance), beta=beta), k, v)
        bias = -beta * (mean * inverse**2) @ k.mT / math.sqrt(4)
        biased = ((q * inverse**2) @ k.mT / math.sqrt(4) + bias).softmax(-1) @ v
        fused = nn.functional.scaled_dot_product_attention(q * inverse**2, k, v, attn_mask=bias.expand(2, 3, 5, 7))
        for other in (changed, biased, fused):
            close(other, defined)


def test_invariances_of_batch_normalisation():
    """B4: a common scale and shift of queries and keys changes nothing; a shift of keys alone does."""
    q, k, v = random(1, 2, 5, 4), random(1, 2, 7, 4, seed=1), random(1, 2, 7, 4, seed=2)
    scale, shift = random(4, seed=3), random(4, seed=4)

    def normalised(q: Tensor, k: Tensor) -> Tensor:
        return attend(normalised_query(q, key_statistics(k), eps=0.0), k, v)

    close(normalised(scale * q + shift, scale * k + shift), normalised(q, k), 1e-10)
    assert (normalised(q, k + shift) - normalised(q, k)).abs().max() > 1e-3
    close(attend(q, k + shift, v), attend(q, k, v))
    assert (attend(q + shift, k + shift, v) - attend(q, k, v)).abs().max() > 1e-3
    order = torch.randperm(7)
    close(attend(normalised_query(q, key_statistics(k[:, :, order])), k[:, :, order], v[:, :, order]),
          attend(normalised_query(q, key_statistics(k)), k, v))  # fmt: skip


def test_statistics_of_prefixes_are_those_of_each_prefix():
    k = random(2, 3, 8, 4) + 1e3
    mean, variance = prefix_statistics(k)
    for i in range(8):
        m, v = key_statistics(k[:, :, : i + 1])
        close(mean[:, :, i : i + 1], m, 1e-9)
        close(variance[:, :, i : i + 1], v, 1e-9)


def test_learnable_beta_is_one_number_a_head():
    made = BatchNormAttention(12, 4, learnable_beta=True).double()
    made(random(1, 5, 12)).sum().backward()
    assert made.norm is not None and made.norm.beta.shape == (4, 1, 1) and made.norm.beta.grad is not None


def test_heads_of_scale_one_are_softmax_attention():
    """B6."""
    plain, scaled, x = layer("softmax"), layer("sh", scales=[1] * 4), random(2, 7, 12)
    state = {name.replace("key.", "key.1.").replace("value.", "value.1."): t for name, t in plain.state_dict().items()}
    scaled.load_state_dict(state)
    close(plain(x), scaled(x))
    close(plain(x, causal=True), scaled(x, causal=True))


@given(n=st.integers(1, 13), scale=st.integers(1, 16))
def test_pooling_first_is_pooling_after_the_projection(n, scale):
    """B7: bias included; also where the scale does not divide the length, or is larger than it."""
    linear, x = nn.Linear(12, 5).double(), random(2, n, 12, seed=n)
    first, _ = Windows(n, scale).pooled(x)
    after, _ = Windows(n, scale).pooled(linear(x))
    close(linear(first), after)
    assert first.shape[1] == -(-n // scale)
    if scale >= n:
        close(first[:, 0], x.mean(1))


def test_a_head_of_scale_r_is_full_attention_over_repeated_pairs():
    """B6, where r divides N."""
    q, k, v = random(1, 1, 5, 4), random(1, 12, 4, seed=1), random(1, 12, 4, seed=2)
    pooled = [Windows(12, 3).pooled(each)[0] for each in (k, v)]
    repeated = [each.repeat_interleave(3, 1)[None] for each in pooled]
    close(attend(q, pooled[0][None], pooled[1][None]), attend(q, *repeated))


def test_equal_scales_run_together_and_default_scales_keep_a_whole_head():
    made = ScaledHeadAttention(16, 8)
    assert made.scales == (1, 1, 2, 2, 4, 4, 8, 8) and list(made.key) == ["1", "2", "4", "8"]
    assert all(min(ScaledHeadAttention(h * 2, h).scales) == 1 for h in range(1, 9))


def test_linear_attention_is_attention_with_a_finite_kernel():
    """A7: the state form equals the N × N form, also for every prefix."""
    n = 150  # more than a chunk of the prefix form
    q, k, v = random(2, 3, n, 4), random(2, 3, n, 4, seed=1), random(2, 3, n, 5, seed=2)
    q, k = feature_map(q), feature_map(k)
    weights = q @ k.mT
    close(through_state(q, k, v), weights / weights.sum(-1, keepdim=True) @ v, 1e-13)
    lower = weights.tril()
    close(through_prefixes(q, k, v), lower / lower.sum(-1, keepdim=True) @ v, 1e-13)


# ---------------------------------------------------------------- convolutions


@pytest.mark.parametrize(
    ("name", "plain"), [("conv1d", "softmax"), ("conv1d+bn", "bn"), ("conv2d", "softmax"), ("conv2d+bn", "bn")]
)
@pytest.mark.parametrize("apply_to", ["qk", "k", "qkv"])
def test_the_delta_kernel_changes_nothing(name, plain, apply_to):
    """B10: training begins at plain attention."""
    conv, other, x = layer(name, apply_to=apply_to), layer(plain), random(2, 9, 12)
    other.load_state_dict({key: value for key, value in conv.state_dict().items() if "conv" not in key})
    close(conv(x), other(x))
    extra = 3 ** (1 if name.startswith("conv1d") else 2) * 12 * (2 if apply_to == "qkv" else 1)
    assert sum(p.numel() for p in conv.parameters()) == sum(p.numel() for p in other.parameters()) + extra


def test_class_tokens_are_not_convolved():
    """B10: whatever the kernel is, the first token's query and key are what they were."""
    conv, x = layer("conv2d", class_tokens=1), random(2, 10, 12)
    plain = conv.weights(x)
    nn.init.normal_(conv.conv.weight)
    q, k, _ = conv.projected(x, x, None, False, True)
    close(q[:, 0], conv.query(x)[:, 0])
    close(k[:, 0], conv.key(x)[:, 0])
    assert (conv.weights(x) - plain).abs().max() > 1e-3


def test_a_pattern_that_moves_takes_its_attention_with_it():
    """B10: inside the grid, away from its border."""
    conv = layer("conv2d", bias=False)
    nn.init.normal_(conv.conv.weight, generator=torch.Generator().manual_seed(1))
    grid = torch.zeros(1, 8, 8, 12, dtype=torch.float64)
    grid[:, 2:4, 2:4] = random(1, 2, 2, 12)
    moved = grid.roll((2, 1), (1, 2))
    out, again = (conv(each.flatten(1, 2)).unflatten(1, (8, 8)) for each in (grid, moved))
    close(again[:, 3:8, 2:8], out.roll((2, 1), (1, 2))[:, 3:8, 2:8])


def test_conv2d_takes_grids_alone():
    conv = layer("conv2d")
    assert conv(random(2, 16, 12)).shape == (2, 16, 12)
    assert layer("conv2d", grid=(2, 4))(random(2, 8, 12)).shape == (2, 8, 12)
    with pytest.raises(SizeError, match=r"8 tokens .* no grid of 2 × 2"):
        conv(random(2, 8, 12))
    with pytest.raises(SizeError, match="not causal"):
        conv(random(2, 9, 12), causal=True)
    with pytest.raises(SizeError, match="kernel=4 must be odd"):
        layer("conv2d", kernel=4)
    x = random(1, 9, 4).requires_grad_()
    assert torch.autograd.gradcheck(layer("conv2d+bn", 4, 2), (x,))
