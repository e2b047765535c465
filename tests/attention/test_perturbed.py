"""Perturbed groups: the noise has the moments of what it is subtracted from, and is there when it should be."""

from typing import Any

import pytest
import torch
from helpers import unchecked
from making import close, layer, random
from torch import Tensor

from dualform.attention import load_from
from dualform.attention.perturbed import noise_like
from dualform.errors import SizeError


def made(**options) -> Any:
    return layer("pgqa", 12, 6, groups=2, **options).train()


def plain(like: Any) -> Any:
    return load_from(layer("gqa", 12, 6, groups=2), like)


def test_noise_has_the_moments_of_its_rows_and_one_draw_is_for_all_of_a_batch():
    """Check 12."""
    x, drawn = random(4, 2, 3, 50) * 3 + 1, random(2, 3, 50, seed=1).abs()
    e = noise_like(x, drawn)
    close(e.mean(-1), x.mean(-1), 1e-10)
    close(e.std(-1), x.std(-1), 1e-10)
    assert (x - e).mean(-1).abs().max() < 1e-10
    z = (e - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
    close(z, z[:1].expand_as(z), 1e-10)
    assert noise_like(x, torch.ones_like(drawn)).std(-1).max() < 1e-10  # a row without spread is divided by 1
    assert noise_like(x[..., :1], drawn[..., :1]).isfinite().all()


def test_the_released_noise_is_subtracted_from_outputs_in_evaluation_too():
    """Check 12: spec §5, written out."""
    one, x = made(mode="reference"), random(3, 5, 12)
    outputs = plain(one).head_outputs(x)
    for mode in (True, False):
        one.train(mode)
        torch.manual_seed(7)
        found = one.head_outputs(x)
        torch.manual_seed(7)
        drawn = torch.rand(2, 3, 10, dtype=torch.float64)
        for group in range(2):
            rows = outputs[:, 3 * group : 3 * group + 3].flatten(2)  # b s L
            u = drawn[group].clone()
            for i in range(3):
                u[i, i] = 0
            z = (u - u.mean(-1, keepdim=True)) / u.std(-1, keepdim=True)
            e = z * rows.std(-1, keepdim=True) + rows.mean(-1, keepdim=True)
            mine = found[:, 3 * group : 3 * group + 3].flatten(2)
            close(mine, rows - e, 1e-10)
            assert mine.mean(-1).abs().max() < 1e-6
            ratio = mine.var(-1) / rows.var(-1)
            assert 0.5 < ratio.mean() < 4  # "roughly twice"
        assert (one(x) - one(x)).abs().max() > 1e-3


def test_noise_on_maps_leaves_each_tokens_own_weight_and_what_is_hidden():
    """Row by row, over the keys that a query sees; values that are one at a time show the map itself."""
    one, x, gone = made(centred=False), random(2, 7, 12), torch.zeros(2, 7, dtype=torch.bool)
    gone[1, 5:] = True
    for causal in (False, True):
        weights = one.weights(x, padding=gone, causal=causal)
        torch.manual_seed(3)
        found = one.head_outputs(x, padding=gone, causal=causal)
        torch.manual_seed(3)
        maps = []
        for each in one.expansions(x, padding=gone, causal=causal):
            drawn = torch.randn(each.weights().shape[1:], dtype=torch.float64)
            hidden = torch.zeros(2, 1, 7, 7, dtype=torch.bool) if each.hidden is None else each.hidden
            kept = ~hidden & ~torch.eye(7, dtype=torch.bool)
            e = noise_like(each.weights(), drawn, kept)
            assert not e.masked_select(~kept.expand_as(e)).any()
            several = kept.expand_as(e).sum(-1) > 1
            of = each.weights().masked_fill(~kept, torch.nan)
            close(e.masked_fill(~kept, torch.nan).nanmean(-1)[several], of.nanmean(-1)[several], 1e-10)
            maps.append((each.weights() - e) @ each.values)
        close(found, torch.cat(maps, 1), 1e-10)
        assert (found - plain(one).head_outputs(x, padding=gone, causal=causal)).abs().max() > 1e-3
        close(one.weights(x, padding=gone, causal=causal), weights)


@pytest.mark.parametrize("target", ["map", "output"])
@pytest.mark.parametrize("noise", ["normal", "uniform"])
def test_without_noise_it_is_grouped_query_attention(target, noise):
    """Check 12: with λ = 0, and in evaluation where noise is for training."""
    x = random(2, 5, 12)
    one = made(target=target, noise=noise)
    assert (one(x) - one(x)).abs().max() > 1e-3
    close(one.eval()(x), plain(one)(x))
    none = made(target=target, noise=noise, scale=0.0)
    close(none(x), plain(none)(x))
    always = made(target=target, noise=noise, train_only=False).eval()
    assert (always(x) - always(x)).abs().max() > 1e-3


def test_centred_noise_keeps_the_sum_of_every_line():
    x, drawn, kept = random(3, 2, 4, 6).softmax(-1), random(2, 4, 6, seed=1), random(3, 1, 4, 6, seed=2) > -0.5
    e = noise_like(x, drawn, kept, centred=True)
    assert e.sum(-1).abs().max() < 1e-12 and not e.masked_select(~kept.expand_as(e)).any()
    close(e, noise_like(x, drawn, kept) - (x * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True) * kept)
    one, tokens = made(), random(2, 5, 12)
    with torch.no_grad():  # values that are all the same are given back, whatever the noise
        one.value.weight.zero_()
    close(one(tokens), plain(one)(tokens))


@pytest.mark.parametrize("mode", ["clean", "reference"])
def test_gradients_flow_through_the_noise(mode):
    one, x = made(mode=mode), random(2, 4, 12).requires_grad_()

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return one(x)

    assert torch.autograd.gradcheck(seeded, (x,))
    one(random(1, 1, 12)).sum().backward()  # a row of one weight has no deviation
    assert all(each.grad is None or bool(each.grad.isfinite().all()) for each in one.parameters())


def test_half_precision_stays_finite():
    for mode in ("clean", "reference"):
        one = made(mode=mode).half()
        assert one((10 * random(1, 300, 12)).half()).isfinite().all()


def test_what_is_not_known_is_refused():
    for options in ({"target": "weights"}, {"noise": "cauchy"}, {"mode": "old"}):
        with unchecked(), pytest.raises(SizeError, match="is not known; choose"):
            made(**options)
