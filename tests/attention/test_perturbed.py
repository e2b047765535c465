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
    """Written out, head by head."""
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


@pytest.mark.parametrize("target", ["map", "output"])
@pytest.mark.parametrize("noise", ["normal", "uniform"])
@pytest.mark.parametrize("mode", ["clean", "reference"])
def test_noise_counts_as_often_as_its_scale_says(target, noise, mode):
    """Outputs are linear in λ, and λ = 0 is grouped-query attention."""
    x, found = random(2, 5, 12), []
    for scale in (0.0, 0.5, 1.0):
        torch.manual_seed(1)
        found.append(made(target=target, noise=noise, mode=mode, scale=scale).head_outputs(x))
    close(found[1], (found[0] + found[2]) / 2, 1e-10)
    close(found[0], plain(made()).head_outputs(x))
    assert (found[2] - found[0]).abs().max() > 1e-3


@pytest.mark.parametrize("noise", ["normal", "uniform"])
def test_rows_of_maps_are_disturbed_by_what_is_drawn_for_the_keys_that_are_seen(noise):
    """Line by line: standardised over these keys alone, with the deviation (unbiased) of their weights."""
    one, x, gone = made(noise=noise), random(2, 7, 12), torch.zeros(2, 7, dtype=torch.bool)
    gone[1, 5:] = True
    weights, (values,) = one.weights(x, padding=gone), (each.values for each in one.expansions(x, padding=gone))
    torch.manual_seed(3)
    found = one.head_outputs(x, padding=gone)
    torch.manual_seed(3)
    drawn = (torch.randn if noise == "normal" else torch.rand)(6, 7, 7, dtype=torch.float64)
    for b, head, i in ((b, head, i) for b in range(2) for head in range(6) for i in range(7)):
        seen = [j for j in range(7) if j != i and not gone[b, j]]
        line, w, u = weights[b, head, i].clone(), weights[b, head, i, seen], drawn[head, i, seen]
        line[seen] -= (u - u.mean()) / u.std() * w.std()
        close(found[b, head, i], line @ values[b, head], 1e-10)


@pytest.mark.parametrize("mode", ["clean", "reference"])
def test_an_empty_batch_is_disturbed_too(mode):
    assert made(mode=mode)(torch.zeros(0, 5, 12, dtype=torch.float64)).shape == (0, 5, 12)


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
    """With λ = 0, and in evaluation where noise is for training."""
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


def test_outputs_are_disturbed_by_all_tokens_so_this_is_not_causal():
    """Without noise it is."""
    x = random(2, 5, 12)
    for one in (made(target="output"), made(mode="reference"), made(mode="reference").eval()):
        with pytest.raises(SizeError, match=r"the future would leak: target='output' is not causal.*target='map'"):
            one(x, causal=True)
    close(made(target="output").eval()(x, causal=True), plain(made())(x, causal=True))


def test_the_future_does_not_leak_into_disturbed_maps():
    one, x = made(), random(2, 6, 12)
    other = torch.cat([x[:, :3], random(2, 3, 12, seed=5)], 1)
    found = []
    for each in (x, other):
        torch.manual_seed(0)
        found.append(one(each, causal=True)[:, :3])
    close(*found)


def test_a_step_is_without_noise_and_says_so():
    x = random(2, 1, 12)
    for one in (made(), made(train_only=False).eval(), made(mode="reference").eval()):
        with pytest.raises(SizeError, match=r"a step has no noise, but this layer has, .*train_only=True"):
            one.step(x)
    one = made().eval()
    close(one.step(x)[0], one(x, causal=True))
    still = made(scale=0.0)
    close(still.step(x)[0], still(x, causal=True))


def test_half_precision_has_as_much_noise():
    """Variances of weights are below what float16 holds."""
    one, x = made().float(), random(2, 200, 12).float()
    torch.manual_seed(0)
    expected = one(x)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.float16):
        found = one(x)
    quiet = plain(one.double())(x.double()).float()
    assert ((found - quiet).norm() / (expected - quiet).norm() - 1).abs() < 0.1


@pytest.mark.parametrize("mode", ["clean", "reference"])
def test_padded_queries_have_no_say_in_the_noise_on_outputs(mode):
    one, x, gone = made(mode=mode, target="output"), random(2, 5, 12), torch.zeros(2, 5, dtype=torch.bool)
    gone[0, 3:], gone[1, 0] = True, True
    outputs = plain(one).head_outputs(x, padding=gone)
    torch.manual_seed(7)
    found = one.head_outputs(x, padding=gone)
    torch.manual_seed(7)
    drawn = (torch.randn if mode == "clean" else torch.rand)(2, 3, 10, dtype=torch.float64)
    if mode == "reference":
        for i in range(3):
            drawn[:, i, i] = 0
    for b, head in ((b, head) for b in range(2) for head in range(6)):
        there = ~gone[b]
        row, u = outputs[b, head][there].flatten(), drawn[head // 3, head % 3].unflatten(0, (5, 2))[there].flatten()
        e = (u - u.mean()) / u.std() * row.std() + (row.mean() if mode == "reference" else 0.0)
        close(found[b, head][there].flatten(), row - e, 1e-10)
        close(found[b, head][~there], outputs[b, head][~there], 1e-10)


def test_a_tokens_own_weight_is_left_where_it_follows_on_a_memory():
    """Its own key is at the end, and a copy of the tokens is the tokens."""
    one, x = made(), random(2, 7, 12)

    def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
        found = []
        for given in (first, second):
            torch.manual_seed(0)
            found.append(one(*given, causal=True))
        close(*found)

    same((x,), (x, x.clone()))
    with torch.no_grad():  # values that are all one number, but for that of token 5, show the weight of token 5
        one.value.weight.zero_()
        one.value.bias.zero_()
    values = one.value.forward
    one.value.forward = lambda c: values(c) + (torch.arange(c.shape[1]) == 5).double()[:, None]
    close(one.head_outputs(x[:, 4:], x, causal=True)[:, :, 1], plain_weight(one, x, 5), 1e-10)


def plain_weight(one: Any, x: Tensor, token: int) -> Tensor:
    """What each head of a token gives to the token itself, without noise."""
    return one.weights(x, causal=True)[:, :, token, token, None].expand(-1, -1, one.size)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_noise_is_of_a_size_that_makes_sense(scale):
    with pytest.raises(SizeError, match=r"scale=.* must be a finite number, 0 or more"):
        made(scale=scale)
