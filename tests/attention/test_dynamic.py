"""Dynamic grouping: when the allocation changes, what is held, what is saved, and what the released code does."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import unchecked
from making import close, layer, random
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualform.attention import load_from
from dualform.attention.allocation import head_norms, proportional, repaired_at_random
from dualform.attention.masked_attention import split_heads
from dualform.errors import SizeError

KINDS = ["diff", "ema"]


def made(kind: str = "ema", mode: str = "clean", window: int = 3, **options) -> Any:
    found = layer("dgqa", 24, 12, groups=4, kind=kind, mode=mode, window=window, **options).train()
    scales = torch.tensor([0.3, 3.0, 1.0, 0.2], dtype=torch.float64)
    nn.init.normal_(found.key.weight)
    with torch.no_grad():
        found.key.weight.mul_(scales.repeat_interleave(2).unsqueeze(1))
    return found


def norms(one: Any, x: Tensor) -> Tensor:
    return head_norms(split_heads(one.key(x), one.kv_heads))


def forced(one: Any, sizes: list[float]) -> Tensor:
    """An input of one token on which the keys of the groups have just these norms."""
    with torch.no_grad():
        for part in (one.key.weight, one.key.bias):
            part.zero_()
        one.key.bias[::2] = torch.tensor(sizes, dtype=torch.float64)
    return random(1, 1, 24)


# ---------------------------------------------------------------- clean


@pytest.mark.parametrize("kind", KINDS)
def test_the_allocation_changes_once_in_a_window_and_is_held_between(kind):
    """Though keys change at every pass. An update is in use from the next pass on."""
    one, used, cache = made(kind), [], torch.zeros(4, dtype=torch.float64)
    expected, waiting = torch.full((4,), 3), torch.full((4,), 3)
    for t in range(10):
        x = (1 + t % 4) * random(3, 5, 24, seed=t)
        expected = waiting
        if t % 3 == 0:
            n = norms(one, x).mean(0)
            w = (n - cache).abs() if kind == "diff" else n if t == 0 else 0.9 * n + 0.1 * cache
            cache, waiting = n if kind == "diff" else w, proportional(w, 12)
        one(x)
        assert torch.equal(one.allocation, expected) and int(one.passes) == t + 1
        close(one.cache, cache, 1e-10)
        used.append(tuple(one.allocation.tolist()))
    assert used[0] == (3,) * 4 and used[1] != used[0] and used[1] == used[2] == used[3]


def test_looking_is_no_pass_and_evaluation_holds():
    one, x = made(), random(3, 5, 24)
    one(x)
    before = {name: each.clone() for name, each in one.state_dict().items()}
    for look in (one.weights, one.expansions, one.allocate):
        look(x)
    one.eval()
    for _ in range(3):
        one(5 * random(3, 5, 24, seed=4))
    assert all(torch.equal(each, before[name]) for name, each in one.state_dict().items())


def test_evaluation_is_the_same_in_any_order_and_after_loading():
    """Clean: bit for bit; allocation and cache are saved."""
    one = made()
    for t in range(5):
        one(random(3, 5, 24, seed=t))
    one.eval()
    batches = [random(3, 5, 24, seed=100 + i) for i in range(4)]
    first = [one(x) for x in batches]
    again = {i: one(batches[i]) for i in (2, 0, 3, 1)}
    assert all(torch.equal(first[i], again[i]) for i in range(4))
    other = layer("dgqa", 24, 12, groups=4, window=3)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.allocation, one.allocation) and torch.equal(other.cache, one.cache)
    assert one.allocation.tolist() != [3] * 4
    assert all(torch.equal(other(x), found) for x, found in zip(batches, first, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_state_dict_as_if_nothing_had_happened(kind):
    """At any pass: also where an update waits for the next one."""
    for stop in range(1, 5):
        one, other = made(kind), layer("dgqa", 24, 12, groups=4, kind=kind, window=3).train()
        for t in range(8):
            x = (1 + t % 4) * random(3, 5, 24, seed=t)
            if t == stop:
                other.load_state_dict(one.state_dict())
            found = one(x)
            assert t < stop or torch.equal(other(x), found)
        assert len({one.allocation, other.allocation}) == 2 and torch.equal(one.cache, other.cache)


def test_a_layer_with_as_many_groups_takes_over_what_is_held():
    """Between two of one mode all of it: training goes on as if nothing had happened."""
    one = made(window=2)
    for t in range(3):
        one(random(3, 5, 24, seed=t))
    other = load_from(layer("dgqa", 24, 12, groups=4, window=2), one).train()
    assert one.allocation.tolist() != [3] * 4
    for t in range(3, 7):
        x = random(3, 5, 24, seed=t)
        assert torch.equal(other(x), one(x))
    assert all(torch.equal(each, one.state_dict()[name]) for name, each in other.state_dict().items())
    used = layer("dgqa", 24, 12, groups=4, mode="reference", window=2).train()
    used(random(3, 5, 24, seed=9))
    released = load_from(used, one)
    assert torch.equal(released.allocation, one.allocation) and not released.cache.any() and not int(released.passes)


def test_what_the_released_mode_holds_is_held_by_a_clean_layer_too():
    """Until an update of its own."""
    one, x = made(mode="reference"), random(3, 5, 24)
    one(x)
    again = load_from(layer("dgqa", 24, 12, groups=4, mode="reference"), one)
    assert torch.equal(again.cache, one.cache) and int(again.passes) == 1 and one.cache.any()
    clean = load_from(layer("dgqa", 24, 12, groups=4), one).train()
    assert one.allocation.tolist() != [3] * 4
    for _ in range(2):
        assert torch.equal(clean.allocation, one.allocation)
        clean.passes.fill_(1)  # no update is due
        clean(x)


def test_weights_of_other_layers_begin_anew_whatever_was_held():
    """As their state dicts do."""
    one, plain, x = made(window=1), layer("gqa", 24, 12, groups=4), random(3, 5, 24)
    for _ in range(2):
        one(x)
    assert one.allocation.tolist() != [3] * 4
    close(load_from(one, plain).eval()(x), plain(x))
    assert one.waiting.tolist() == [3] * 4 and not one.cache.any() and not int(one.passes)


def test_what_is_held_can_be_written_out():
    """For each head its own; and where there are fewer groups than that, these are pooled."""
    one, x = made().eval(), random(2, 5, 24)
    one.allocation.copy_(torch.tensor([5, 0, 1, 6]))
    whole = load_from(layer("softmax", 24, 12), one)
    close(whole(x), one(x))
    for name in ("gqa", "dgqa", "pgqa"):
        close(load_from(layer(name, 24, 12, groups=12), one)(x), one(x))
    for name, groups in (("gqa", 6), ("gqa", 4), ("kdgqa", 4), ("dgqa", 3), ("dgqa", 6)):
        found, expected = (load_from(layer(name, 24, 12, groups=groups), each) for each in (one, whole))
        close(found(x), expected(x))
    one.allocation.copy_(torch.tensor([4, 0, 2, 6]))
    close(load_from(layer("gqa", 24, 12, groups=6), one)(x), one(x))


def test_nothing_to_go_by_is_no_error():
    """The same batch twice changes nothing: then the norms themselves count. Without keys the allocation stays."""
    one, found = made("diff", window=1), []
    for sizes in ([4.0, 4, 4, 4], [4.0, 4, 4, 8], [4.0, 4, 4, 8]):
        one(forced(one, sizes))
        found.append(one.waiting.tolist())
    assert found == [[3, 3, 3, 3], [0, 0, 0, 12], [3, 2, 2, 5]]
    empty = made(window=1)
    zero = forced(empty, [0.0] * 4)
    for nothing in (zero, torch.full_like(zero, torch.nan), zero[:0]):
        empty(nothing)
        assert empty.waiting.tolist() == [3] * 4 and not empty.cache.any()
    empty(forced(empty, [1.0, 5.0, 2.0, 4.0]))
    close(empty.cache, torch.tensor([1.0, 5, 2, 4], dtype=torch.float64))  # the first norms there were


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_a_batch_is_no_change(dtype):
    """Sums in another order differ by rounding, which is nothing to go by."""
    for seed in range(60):
        one, x = made("diff", window=1).to(dtype), random(16, 50, 24, seed=seed).to(dtype)
        one(x)
        one(x[torch.randperm(16, generator=torch.Generator().manual_seed(seed))])
        assert torch.equal(one.waiting, proportional(norms(one, x).mean(0), 12))


def test_the_future_does_not_leak_in_training_either():
    """An update waits for the next pass, so what a pass gives does not come of its own later tokens."""
    x = random(1, 9, 24)
    other = x.clone()
    other[:, 5:] = 30 * random(1, 4, 24, seed=3)
    one, two = (made(window=1) for _ in range(2))
    close(one(x, causal=True)[:, :5], two(other, causal=True)[:, :5])
    assert not torch.equal(one.waiting, two.waiting) or not torch.equal(one.cache, two.cache)
    with pytest.raises(SizeError, match="mode='reference' takes effect at once, so the future would leak"):
        made(mode="reference")(x, causal=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_counts_a_pass_once_and_computes_the_same_again(kind, reentrant):
    one, two = made(kind, window=1), made(kind, window=1)
    for t in range(4):
        x = ((1 + t) * random(2, 5, 24, seed=t)).requires_grad_()
        one(x).square().sum().backward()
        again = checkpoint(two, x, use_reentrant=reentrant)
        assert isinstance(again, Tensor)
        again.square().sum().backward()
    assert int(one.passes) == int(two.passes) == 4 and torch.equal(one.allocation, two.allocation)
    for name, each in one.named_parameters():
        torch.testing.assert_close(each.grad, two.get_parameter(name).grad, msg=name)


AGAIN = """
import torch
from torch.utils.checkpoint import checkpoint
from dualform.attention import allocations, build
one = build("dgqa", 24, 12, groups=4, window=1)
compiled = torch.compile(one, backend="eager")
with allocations(one) as history:
    for _ in range(3):
        x = torch.randn(2, 5, 24, requires_grad=True)
        checkpoint(compiled, x, use_reentrant=False).sum().backward()
assert int(one.passes) == len(history[""]) == 3, (int(one.passes), len(history[""]))
"""


@pytest.mark.slow
def test_checkpointing_counts_a_pass_once_where_it_is_compiled_too():
    """In a process of its own: the types that tests check stand in the way."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", AGAIN], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("mode", ["clean", "reference"])
@pytest.mark.parametrize("way", ["assign", "to_empty"])
def test_a_checkpoint_without_allocations_begins_anew_also_on_no_device(mode, way):
    plain, x = layer("gqa", 24, 12, groups=4), random(2, 5, 24)
    with torch.device("meta"):
        one = layer("dgqa", 24, 12, groups=4, mode=mode)
    if way == "to_empty":
        one.to_empty(device="cpu")
        for each in (one.allocation, one.waiting, one.cache, one.passes):
            each.fill_(77)
    one.load_state_dict(plain.state_dict(), assign=way == "assign")
    assert one.allocation.tolist() == one.waiting.tolist() == [3] * 4
    assert not one.cache.any() and not int(one.passes) and one.cache.device.type == "cpu"
    if mode == "clean":
        close(one(x), plain(x))
    one.train()(x)
    assert int(one.passes) == 1


def test_what_a_checkpoint_does_not_speak_of_is_left_alone():
    one = made()
    for t in range(2):
        one(random(3, 5, 24, seed=t))
    before = one.allocation.clone()
    one.load_state_dict({"out.bias": torch.zeros(24)}, strict=False)
    assert torch.equal(one.allocation, before) and int(one.passes) == 2
    with pytest.raises(RuntimeError, match=r"Missing key.*cache"):
        one.load_state_dict({"out.bias": torch.zeros(24)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_are_kept_in_float32_at_least(dtype):
    """Else what they are rounded by would be taken for a change: the same batch twice changes nothing."""
    one, x = made("diff", window=1).to(dtype), random(3, 5, 24).to(dtype)
    assert one.cache.dtype == torch.float32 and one.key.weight.dtype == dtype
    for _ in range(3):
        one(x)
    assert torch.equal(one.waiting, proportional(norms(one, x).mean(0), 12))
    before = one.cache.clone()
    assert torch.equal(one.to(dtype).cache, before) and made().cache.dtype == torch.float64
    assert torch.equal(one.double().cache, before.double())


# ---------------------------------------------------------------- as released


def test_at_first_both_kinds_are_proportional_to_the_norms():
    """Diff with no cache, and ema with β = 1; and norms that are near each other are shared evenly."""
    for kind, beta in (("diff", 0.9), ("ema", 1.0)):
        for mode in ("clean", "reference"):
            one = made(kind, mode, window=1, beta=beta)
            x = forced(one, [1.0, 5.0, 2.0, 4.0])
            one(x)
            found = one.waiting if mode == "clean" else one.allocation
            assert found.tolist() == [1, 5, 2, 4]
            assert torch.equal(found, proportional(norms(one, x)[0], 12))
    six = layer("dgqa", 24, 12, groups=6, mode="reference").train()
    six(forced(six, [100.0, 110, 120, 130, 90, 95]))
    assert six.allocation.tolist() == [2] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_the_released_cache_shrinks_to_norms_over_the_window(kind):
    """For constant norms c = n (1 − W^−k)/(W − 1) after k updates; updates at 0, W, 2W, … of an epoch."""
    one = made(kind, "reference", window=5)
    x = forced(one, [1.0, 5.0, 2.0, 4.0])
    n = norms(one, x)[0].detach()
    for step in range(16):
        one(x)
        close(one.cache, n * (1 - 5.0 ** -(step // 5 + 1)) / 4, 1e-10)
    before = one.cache.clone()
    one.begin_epoch()
    one(x)
    close(one.cache, (before + n) / 5, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_released_code_updates_at_every_window_of_an_epoch_and_holds_between(kind):
    """Though keys change at every pass, and with a cache that is not like the norms."""
    one, cache = made(kind, "reference"), torch.zeros(4, dtype=torch.float64)
    held, used = torch.full((4,), 3), set()
    for t in range(10):
        sizes = [float(1 + (t * k) % 7) for k in (1, 2, 3, 5)]
        x = forced(one, sizes)
        torch.manual_seed(t)
        one(x)
        if t % 3 == 0:
            n = torch.tensor(sizes, dtype=torch.float64)
            torch.manual_seed(t)
            held = repaired_at_random((cache - n).abs() if kind == "diff" else 0.9 * n + 0.1 * cache, 12)
            cache = (cache + n) / 3
        assert torch.equal(one.allocation, held) and int(one.passes) == t + 1
        close(one.cache, cache, 1e-10)
        used.add(tuple(held.tolist()))
    assert len(used) > 2
    one.eval()(forced(one, [3.0, 1.0, 1.0, 2.0]))
    assert int(one.passes) == 10  # evaluation is no step of an epoch


def test_released_norms_are_summed_over_the_batch_and_repaired_at_random():
    one, x = made("ema", "reference", window=1), random(3, 5, 24)
    one(x)
    n = norms(one, x).sum(0)
    torch.testing.assert_close(one.cache, n)
    found, odd = set(), forced(one, [1.0, 1.5, 1.5, 1.5])
    for seed in range(20):
        torch.manual_seed(seed)
        one.cache.zero_()
        one(odd)
        torch.manual_seed(seed)
        assert torch.equal(one.allocation, repaired_at_random(0.9 * norms(one, odd)[0], 12))
        found.add(tuple(one.allocation.tolist()))
    assert all(sum(each) == 12 for each in found)


def test_released_evaluation_changes_what_it_evaluates_with():
    """Reference: the cache is changed, results depend on the order, and a repeated batch is caught."""
    one = made("diff", "reference")
    x, y = random(3, 5, 24), 4 * random(3, 5, 24, seed=1)
    one(x)
    one.eval()
    before = one.cache.clone()
    one(y)
    torch.testing.assert_close(one.cache, norms(one, y).sum(0))
    assert not torch.equal(one.cache, before)
    with pytest.raises(
        SizeError, match=r"\[0\.0, 0\.0, 0\.0, 0\.0\] over their sum, 0.*two batches in a row with the same keys"
    ):
        one(y)
    outputs = []
    for order in ((x, y), (y, x)):
        torch.manual_seed(0)
        one.cache.zero_()
        outputs.append({id(each): one(each) for each in order})
    assert any((outputs[0][id(z)] - outputs[1][id(z)]).abs().max() > 1e-3 for z in (x, y))
    assert set(one.state_dict()) == {*made().state_dict()} - {"allocation", "waiting", "passes"}


def test_the_clean_mode_counts_on_over_epochs():
    one = made()
    one(random(3, 5, 24))
    one.begin_epoch()
    assert int(one.passes) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "sum"}, "kind='sum' is not known; choose 'diff' or 'ema'"),
        ({"window": 0}, "window=0 must be a whole number, 1 or more"),
        ({"beta": 1.5}, r"beta=1.5 must lie in \[0, 1\]"),
        ({"mode": "old"}, "mode='old' is not known"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with unchecked(), pytest.raises(SizeError, match=words):
        layer("dgqa", 24, 12, **options)


TOGETHER = """
import os
import sys
import torch
from torch import distributed, nn
from dualform.attention import build
rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
layer = build("dgqa", 24, 12, groups=4, window=1, kind="diff")
nn.init.normal_(layer.key.weight)
model = nn.parallel.DistributedDataParallel(layer)
torch.manual_seed(1 + rank)
used = []
for _ in range(4):
    model(torch.randn(3, 5, 24) * torch.linspace(0, 3, 24) ** (1 + 3 * rank)).sum().backward()
    model.zero_grad()
    used.append(layer.allocation.clone())
mine = torch.stack(used)
both = [torch.zeros_like(mine) for _ in range(2)]
distributed.all_gather(both, mine)
assert torch.equal(*both), both
assert len(mine.unique(dim=0)) > 1, mine
distributed.barrier()  # or one process ends while the other still talks to it
os._exit(0)  # gloo's threads now and then abort a process that ends as usual
"""


@pytest.mark.slow
def test_processes_that_train_together_use_one_allocation(tmp_path):
    """Each sees other examples; what is in use is that of the first process."""
    runs = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", TOGETHER, str(rank), str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
