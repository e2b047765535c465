"""Key-driven grouping: who decides, who does not, and what the released code does to a batch."""

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import unchecked
from making import close, layer, random
from torch import Tensor, nn

from dualform import attention
from dualform.attention import KeyDrivenAttention, load_from
from dualform.attention.allocation import head_norms, key_driven
from dualform.attention.masked_attention import split_heads
from dualform.errors import QueryError, SizeError

MODES = ["clean", "reference"]


def made(mode: str = "clean", width: int = 24, heads: int = 12, groups: int = 4, **options) -> Any:
    """A layer whose allocations differ from example to example."""
    found = layer("kdgqa", width, heads, groups=groups, mode=mode, **options)
    nn.init.normal_(found.key.weight)
    return found


def norms(one: KeyDrivenAttention, x: Tensor) -> Tensor:
    return head_norms(split_heads(one.key(x), one.kv_heads))


@pytest.mark.parametrize("mode", MODES)
def test_the_norms_of_the_keys_decide(mode):
    one, x = made(mode), random(5, 6, 24)
    found = norms(one, x)
    expected = key_driven(found if mode == "clean" else found.sum(0, keepdim=True), 12).expand(5, -1)
    assert torch.equal(one.allocate(x), expected)
    assert mode == "reference" or len(expected.unique(dim=0)) > 1


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_change_the_allocation(mode):
    """A factor on all keys, the order of a batch, a batch twice, queries and values."""
    one, x = made(mode), random(5, 6, 24)
    before = one.allocate(x)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(one.allocate(x[order]), before[order])
    assert torch.equal(one.allocate(torch.cat([x, x])), torch.cat([before, before]))
    with torch.no_grad():
        nn.init.normal_(one.query.weight)
        nn.init.normal_(one.value.weight)
        one.key.weight *= 3.7
        one.key.bias *= 3.7
    assert torch.equal(one.allocate(x), before)


def test_permuted_key_heads_permute_the_allocation():
    one, x = made(groups=3), random(40, 6, 24)
    before, found = one.allocate(x), norms(one, x)
    scaled = (found - found.amin(-1, keepdim=True)) / (found.amax(-1, keepdim=True) - found.amin(-1, keepdim=True))
    whole = (12 * scaled / scaled.sum(-1, keepdim=True)).round().sum(-1) == 12
    order = [2, 0, 1]
    with torch.no_grad():
        one.key.weight.copy_(one.key.weight.unflatten(0, (3, 2))[order].flatten(0, 1))
        one.key.bias.copy_(one.key.bias.unflatten(0, (3, 2))[order].flatten())
    assert int(whole.sum()) > 10 and torch.equal(one.allocate(x)[whole], before[whole][:, order])


@pytest.mark.parametrize("name", ["kdgqa", "dgqa"])
def test_keys_of_one_size_make_it_grouped_query_attention(name):
    """The same block and bias in every group; and it returns."""
    one, x = layer(name, 24, 12, groups=4), random(3, 6, 24)
    with torch.no_grad():
        one.key.weight.copy_(one.key.weight[:2].repeat(4, 1))
        one.key.bias.copy_(one.key.bias[:2].repeat(4))
    assert one.allocate(x).tolist() == [[3] * 4] * 3
    plain = load_from(layer("gqa", 24, 12, groups=4), one)
    close(one(x), plain(x))


def test_a_batch_changes_nothing_in_the_clean_mode_and_does_in_the_released_one():
    """An image whose outputs depend on what else is in its batch."""
    x = random(1, 6, 24)
    others = [torch.cat([x, 5 * random(3, 6, 24, seed=seed)]) for seed in range(5)]
    clean, released = (load_from(made(mode), made()) for mode in MODES)
    for batch in others:
        close(clean(batch)[:1], clean(x))
    assert any((released(batch)[:1] - released(x)).abs().max() > 0.01 for batch in others)
    close(released(x), clean(x))  # alone both are the same


def sized(one: Any, sizes: list[list[float]]) -> Tensor:
    """Examples of one token each, on which the keys of the groups have just these norms."""
    with torch.no_grad():
        for part in (one.key.weight, one.key.bias):
            part.zero_()
        for group in range(one.kv_heads):
            one.key.weight[group * one.size, group] = 1.0
    return torch.nn.functional.pad(torch.tensor(sizes, dtype=torch.float64), (0, one.width - one.kv_heads)).unsqueeze(1)


def test_the_released_norms_are_summed_over_the_batch():
    """Spec §3, step 1: norms, not their squares. With ``least`` for each first."""
    one = made("reference")
    x = sized(one, [[9.0, 1, 2, 0], [0, 7, 6, 3]])
    assert one.allocate(x).tolist() == [key_driven(torch.tensor([9.0, 8, 8, 3]), 12).tolist()] * 2
    assert one.allocate(x)[0].tolist() != key_driven(torch.tensor([81.0, 50, 40, 9]).sqrt(), 12).tolist()
    few = made("reference", least=2)
    assert few.allocate(sized(few, [[1.0, 1, 1, 3]])).tolist() == [[2, 2, 2, 6]]


@pytest.mark.parametrize("name", ["kdgqa", "dgqa"])
@pytest.mark.parametrize("mode", MODES)
def test_padded_tokens_have_no_say(name, mode):
    """Though what is not there has a key: the bias."""
    one, x, gone = layer(name, 24, 12, groups=4, mode=mode).train(), random(3, 9, 24), torch.zeros(3, 9).bool()
    gone[:, 4:] = True
    with torch.no_grad():
        nn.init.normal_(one.key.weight)
        one.key.bias.copy_(5 * random(8, seed=2))
    held = copy.deepcopy(one)
    for each, given in ((one, {"x": x, "padding": gone}), (held, {"x": x[:, :4]})):
        torch.manual_seed(0)
        for _ in range(2):
            each(**given)
    assert torch.equal(one.allocate(x, padding=gone), held.allocate(x[:, :4]))
    if name == "dgqa":
        close(one.cache, held.cache)
    else:
        assert not torch.equal(one.allocate(x), held.allocate(x[:, :4]))


def test_what_is_attended_to_decides():
    one, x, context = made(), random(5, 6, 24), random(5, 3, 24, seed=1)
    assert torch.equal(one.allocate(x, context), one.allocate(context))
    assert not torch.equal(one.allocate(x, context), one.allocate(x))


def test_where_the_released_code_does_not_end_there_is_a_sentence():
    one, x = made("reference"), random(3, 6, 24)
    with torch.no_grad():
        one.key.weight.copy_(one.key.weight[:2].repeat(4, 1))
        one.key.bias.copy_(one.key.bias[:2].repeat(4))
    with pytest.raises(
        SizeError, match=r"keys of all 4 groups have the same norm .* does not terminate\. mode='clean'"
    ):
        one(x)
    with pytest.raises(SizeError, match="keys of all 1 groups"):
        made("reference", groups=1)(x)
    close(made(groups=1)(x), load_from(layer("gqa", 24, 12, groups=1), made(groups=1))(x))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_keys_that_are_no_numbers_are_named_in_the_released_mode(wrong):
    x = random(3, 6, 24)
    x[1, 2, 3] = wrong
    with pytest.raises(SizeError, match=r"the norms of the keys are \[.*(nan|inf).*\]: not all of them are finite"):
        made("reference")(x)
    assert made()(x)[0].isfinite().all()


def test_it_is_not_causal():
    with pytest.raises(SizeError, match=r"the future would leak: 'kdgqa' is not causal\. Use 'dgqa'"):
        made()(random(1, 5, 24), causal=True)


def test_each_group_has_its_least():
    one, x = made(least=1), random(50, 6, 24)
    assert int(one.allocate(x).min()) == 1 and int(made().allocate(x).min()) == 0
    with pytest.raises(SizeError, match="least=4 for each of 4 groups needs more than 12 heads: it can be at most 3"):
        made(least=4)
    with unchecked(), pytest.raises(SizeError, match="mode='dirty' is not known; choose 'clean' or 'reference'"):
        layer("kdgqa", mode="dirty")


def test_no_gradient_flows_through_the_allocation():
    """Allocations of its own: heads of keys that nobody has get exactly nothing."""
    one, x = made(groups=2), random(1, 6, 24)
    empty = int(one.allocate(x)[0].argmin())
    assert int(one.allocate(x)[0, empty]) == 0
    one(x).square().sum().backward()
    by_group = one.key.weight.grad.unflatten(0, (2, 2)).abs().amax((1, 2))
    assert by_group[empty] == 0 and by_group[1 - empty] > 0


# ---------------------------------------------------------------- the history of allocations


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain, self.second = made(), layer("gqa", 24, 12), layer("dgqa", 24, 12, groups=4, window=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.plain(self.first(x)))


def test_allocations_are_noted_while_a_loop_runs():
    model = Two().train()
    batches = [random(5, 6, 24, seed=seed) for seed in range(4)]
    with attention.allocations(model) as history:
        for x in batches:
            model(x).sum().backward()
            model.first.weights(x)
            model.eval()
            model(x)
            model.train()
    assert history.layers == ["first", "second"]
    for t, x in enumerate(batches):
        expected = model.first.allocate(x)
        torch.testing.assert_close(history["first"][t], expected.float().mean(0))
        torch.testing.assert_close(history.unused("first")[t], (expected == 0).float().mean(0))
    torch.testing.assert_close(history.shares("first").sum(1), torch.ones(4))
    assert history["second"].shape == (4, 4) and history["second"][0].tolist() == [3] * 4
    for name in history.layers:
        lines = history[name].tolist()
        assert history.changes(name) == sum(a != b for a, b in pairwise(lines))
    assert history.changes("first") > 0
    rows = list(history)
    assert len(rows) == len(history) == 2 * 4 * 4 and rows[5].step == 1 and rows[5].group == 1
    assert rows[5].share == rows[5].heads / 12
    frame = pytest.importorskip("pandas") and history.to_pandas()
    assert list(frame) == ["step", "layer", "group", "heads", "share"] and len(frame) == 32
    assert not model.first.watchers and not model.second.watchers and not model.first.passing
    model(batches[0])
    assert len(history["first"]) == 4


def test_who_is_told_is_no_part_of_a_layer():
    """A model that is watched can be copied and pickled; its copies are not watched."""
    model = Two().train()
    with attention.allocations(model) as history:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in (model, *copies):
            each(random(5, 6, 24))
    assert len(history["first"]) == len(history["second"]) == 1
    assert not any(each.first.watchers for each in copies)


def test_a_model_without_allocations_has_no_history():
    with pytest.raises(QueryError, match="has no layer with allocations, such as 'kdgqa' or 'dgqa'"):
        attention.allocations(layer("gqa")).__enter__()
    with attention.allocations(made()) as history:
        pass
    assert history[""].shape == (0, 0)
    with pytest.raises(QueryError, match="the history has no layer 'x'"):
        history["x"]
