"""Attention as a support vector expansion: golden values of the specification, and the laws of single members."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import close, layer, random
from torch import Tensor, nn

from dualform.attention import ATTENTIONS, BatchNormAttention, ScaledHeadAttention, SoftmaxAttention, load_from
from dualform.attention.expansion import feature_map
from dualform.attention.linear import through_prefixes, through_state
from dualform.attention.masked_attention import attend
from dualform.attention.norm import key_statistics, normalised_query, prefix_statistics
from dualform.attention.windows import WindowPool, Windows
from dualform.errors import SizeError

Q = torch.tensor([[1, 0], [0, 2], [-1, 1]], dtype=torch.float64)[None, None]
K = torch.tensor([[1, 2], [3, 0], [-1, 1]], dtype=torch.float64)[None, None]
V = torch.tensor([[1], [2], [4]], dtype=torch.float64)[None, None]


def bn(beta: float = 1.0, eps: float = 0.0, use_var: bool = True, causal: bool = False) -> Tensor:
    found = prefix_statistics(K) if causal else key_statistics(K)
    q = normalised_query(Q, found, beta=beta, eps=eps, use_var=use_var)
    return attend(q, K, V, causal=causal)


def sh(pool: WindowPool = "avg", normalise: bool = False) -> Tensor:
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
    """The parameters that each attention adds."""
    work, expected = GOLDEN[name]
    torch.testing.assert_close(work().flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


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
    one, two, x = layer("softmax"), layer("bn", beta=0.0, use_var=False), random(2, 7, 12)
    two.load_state_dict(one.state_dict())
    close(one(x), two(x))


def test_four_forms_of_batch_normalisation_agree():
    """As defined, with the query changed, with a bias for each key, and on the fused kernel with that bias."""
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
    """A common scale and shift of queries and keys changes nothing; a shift of keys alone does."""
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
    plain, scaled, x = layer("softmax"), layer("sh", scales=[1] * 4), random(2, 7, 12)
    state = {name.replace("key.", "key.1.").replace("value.", "value.1."): t for name, t in plain.state_dict().items()}
    scaled.load_state_dict(state)
    close(plain(x), scaled(x))
    close(plain(x, causal=True), scaled(x, causal=True))


@given(n=st.integers(1, 13), scale=st.integers(1, 16))
def test_pooling_first_is_pooling_after_the_projection(n, scale):
    """Bias included; also where the scale does not divide the length, or is larger than it."""
    linear, x = nn.Linear(12, 5).double(), random(2, n, 12, seed=n)
    first, _ = Windows(n, scale).pooled(x)
    after, _ = Windows(n, scale).pooled(linear(x))
    close(linear(first), after)
    assert first.shape[1] == -(-n // scale)
    if scale >= n:
        close(first[:, 0], x.mean(1))


def test_a_head_of_scale_r_is_full_attention_over_repeated_pairs():
    """Where r divides N."""
    q, k, v = random(1, 1, 5, 4), random(1, 12, 4, seed=1), random(1, 12, 4, seed=2)
    pooled = [Windows(12, 3).pooled(each)[0] for each in (k, v)]
    repeated = [each.repeat_interleave(3, 1)[None] for each in pooled]
    close(attend(q, pooled[0][None], pooled[1][None]), attend(q, *repeated))


def test_equal_scales_run_together_and_default_scales_keep_a_whole_head():
    made = ScaledHeadAttention(16, 8)
    assert made.scales == (1, 1, 2, 2, 4, 4, 8, 8) and list(made.key) == ["1", "2", "4", "8"]
    assert all(min(ScaledHeadAttention(h * 2, h).scales) == 1 for h in range(1, 9))


def test_linear_attention_is_attention_with_a_finite_kernel():
    """The state form equals the N × N form, also for every prefix."""
    n = 150  # more than a chunk of the prefix form
    q, k, v = random(2, 3, n, 4), random(2, 3, n, 4, seed=1), random(2, 3, n, 5, seed=2)
    q, k = feature_map(q), feature_map(k)
    weights = q @ k.mT
    close(through_state(q, k, v), weights / weights.sum(-1, keepdim=True) @ v, 1e-13)
    lower = weights.tril()
    close(through_prefixes(q, k, v), lower / lower.sum(-1, keepdim=True) @ v, 1e-13)


@pytest.mark.parametrize("name", ["sh", "bn+sh", "linear-sh", "linear-bn+sh", "sparse-sh", "sparse-bn+sh"])
@pytest.mark.parametrize("pool", ["avg", "stride"])
def test_layers_that_pool_first_equal_those_that_project_first(name, pool):
    """For whole layers; with padding too."""
    first, after, x = layer(name, pool=pool), layer(name, pool=pool, prepool=False), random(2, 11, 12)
    after.load_state_dict(first.state_dict())
    padding = torch.arange(11) >= torch.tensor([[11], [6]])
    for there in (None, padding):
        close(first(x, padding=there), after(x, padding=there), 1e-10)


# ---------------------------------------------------------------- windows of pictures


def test_class_tokens_are_not_pooled():
    """Spec §4.3: the first token is a key of its own."""
    x = random(2, 10, 12)
    windows = Windows(10, 4, class_tokens=1)
    pooled, _ = windows.pooled(x)
    close(pooled[:, 0], x[:, 0])
    close(pooled[:, 1], x[:, 1:5].mean(1))
    close(pooled[:, 3], x[:, 9])
    assert windows.first.tolist() == [0, 1, 5, 9] and windows.last.tolist() == [0, 4, 8, 9]
    with pytest.raises(SizeError, match="not causal"):
        layer("sh", class_tokens=1)(x, causal=True)


@pytest.mark.parametrize(("scale", "block"), [(2, (1, 2)), (4, (2, 2)), (8, (2, 4)), (9, (3, 3)), (5, (1, 5))])
def test_a_grid_is_pooled_in_blocks(scale, block):
    """Spec §4.3: r_x × r_y = r; blocks that are cut off at the border are the means of what is left."""
    x = random(2, 1 + 6 * 7, 12)
    pooled, _ = Windows(43, scale, class_tokens=1, grid=(6, 7)).pooled(x)
    grid, (height, width) = x[:, 1:].unflatten(1, (6, 7)), block
    means = [
        grid[:, i : i + height, j : j + width].mean((1, 2)) for i in range(0, 6, height) for j in range(0, 7, width)
    ]
    close(pooled, torch.stack([x[:, 0], *means], 1))
    with pytest.raises(SizeError, match=r"42 tokens .* do not form a grid of 5 × 7"):
        Windows(43, scale, class_tokens=1, grid=(5, 7))


def test_heads_that_pool_a_grid_are_expansions_over_its_blocks():
    made, x = layer("bn+sh", class_tokens=1, grid=(4, 5)), random(2, 21, 12)
    tokens = torch.cat([each(x) for each in made.value.values()], -1).unflatten(-1, (4, 3)).transpose(1, 2)
    close(made.weights(x) @ tokens, made.head_outputs(x))


# ---------------------------------------------------------------- weights of other layers


@pytest.mark.parametrize("scales", [[1, 2, 4, 8], [8, 1, 4, 2], [1, 1, 1, 1], [2, 1, 2, 1]])
def test_checkpoints_are_interchangeable(scales):
    """Spec §4.1: a layer with scales takes the state dict of one without; any layer takes another's weights."""
    plain, scaled, x = layer("softmax"), layer("sh", scales=scales), random(2, 9, 12)
    for each in plain.parameters():
        nn.init.normal_(each)
    state = plain.state_dict()
    scaled.load_state_dict(state)
    assert list(state) == list(plain.state_dict())
    heads, expected = scaled.head_outputs(x), plain.head_outputs(x)
    for head, scale in enumerate(scales):
        alone = layer("sh", scales=[scale] * 4)
        alone.load_state_dict(plain.state_dict())
        close(heads[:, head], alone.head_outputs(x)[:, head])
        if scale == 1:
            close(heads[:, head], expected[:, head])
    close(load_from(layer("softmax"), scaled)(x), plain(x))
    close(load_from(layer("sh", scales=scales[::-1]), scaled).head_outputs(x)[:, 0], scaled_head(plain, scales[-1], x))
    close(scaled.weights(x)[:, 0] @ plain.value(x).unflatten(-1, (4, 3))[:, :, 0], heads[:, 0])


def scaled_head(plain: nn.Module, scale: int, x: Tensor) -> Tensor:
    """The first head, had it this scale."""
    return load_from(layer("sh", scales=[scale] * 4), plain).head_outputs(x)[:, 0]


def test_weights_that_cannot_be_taken_are_refused_and_nothing_is_changed():
    made = layer("softmax", bias=False)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    theirs = nn.MultiheadAttention(12, 4).double()
    nn.init.normal_(theirs.in_proj_bias)
    with pytest.raises(SizeError, match="build it with bias=True"):
        load_from(made, theirs)
    for other in (nn.MultiheadAttention(12, 4, add_bias_kv=True), nn.MultiheadAttention(12, 4, kdim=6, vdim=6)):
        with pytest.raises(SizeError, match=r"no layer of dualform\.attention does that"):
            load_from(made, other)
    with pytest.raises(SizeError, match="no attention layer"):
        load_from(made, nn.Linear(3, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_layers_can_be_saved_copied_and_printed(tmp_path):
    for name in ATTENTIONS:
        made, x = layer(name), random(1, 9, 12)
        torch.save(made.state_dict(), tmp_path / "layer.pt")
        again = layer(name)
        nn.init.zeros_(again.out.weight)
        again.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
        close(again(x), made(x))
        close(copy.deepcopy(made)(x), made(x))
        assert "12, 4, kernel=" in repr(made) and ("scales=[1, 2, 4, 8]" in repr(made)) == name.endswith("sh")
