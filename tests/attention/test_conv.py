"""Attention with a convolution in the primal."""

import pytest
import torch
from making import close, layer, random
from torch import nn

from dualform.errors import SizeError


@pytest.mark.parametrize(
    ("name", "plain"), [("conv1d", "softmax"), ("conv1d+bn", "bn"), ("conv2d", "softmax"), ("conv2d+bn", "bn")]
)
@pytest.mark.parametrize("apply_to", ["qk", "k", "qkv"])
def test_the_delta_kernel_changes_nothing(name, plain, apply_to):
    """Training begins at plain attention."""
    conv, other, x = layer(name, apply_to=apply_to), layer(plain), random(2, 9, 12)
    other.load_state_dict({key: value for key, value in conv.state_dict().items() if "conv" not in key})
    close(conv(x), other(x))
    extra = 3 ** (1 if name.startswith("conv1d") else 2) * 12 * (2 if apply_to == "qkv" else 1)
    assert sum(p.numel() for p in conv.parameters()) == sum(p.numel() for p in other.parameters()) + extra


def test_class_tokens_are_not_convolved():
    """Whatever the kernel is, the first token's query and key are what they were."""
    conv, x = layer("conv2d", class_tokens=1), random(2, 10, 12)
    plain = conv.weights(x)
    nn.init.normal_(conv.conv.weight)
    q, k, _ = conv.projected(x, x, None, False)
    close(q[:, 0], conv.query(x)[:, 0])
    close(k[:, 0], conv.key(x)[:, 0])
    assert (conv.weights(x) - plain).abs().max() > 1e-3


def test_a_pattern_that_moves_takes_its_attention_with_it():
    """Inside the grid, away from its border."""
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
