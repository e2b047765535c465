"""Lower precision costs digits, not truth: float32, half precision, autocast, loss scaling."""

import pytest
import torch
from helpers import Whole, assert_clean, assert_rebuilt, batches, mlp, setups, sgd, trained, whole
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import NonFiniteGradient
from dualform.types import DType

BARS = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3}
"""What each way to keep slots costs a network that is trained in float64."""


@pytest.mark.parametrize("dtype", BARS)
@given(setup=setups(), whole_model=st.booleans())
def test_a_float64_network_may_be_remembered_with_fewer_digits(dtype, setup, whole_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    if whole_model:
        model = whole(setup.seed)
        run = trained(path, model, optim.SGD(model.parameters(), **setup.settings), batches(4, 4, 5, 3), dtype=dtype)
    else:
        run = setup.run(path, dtype=dtype)
    memory = run.memory
    assert_clean(memory)
    assert memory.store.manifest.dtype == dtype
    certificate = memory.check(run.model, full=True)
    for name, error in certificate.items():
        # a parameter that moved by cancelling slots is known to the digits of the slots, not of their sum
        size = slot_size(memory, name)
        off = error * (run.model.get_parameter(name).detach() - run.states[0][name]).norm().item()
        assert off <= BARS[dtype] * size + 1e-13, f"{name}: {off:.1e} of {size:.1e}"


def slot_size(memory: dualform.Memory, name: str) -> float:
    """How much the slots move a parameter, added up without their signs; and what is left of the beginning."""
    total = memory.store.initial(name).double().norm().item() * 1e-3
    for layer in memory.store.manifest.layers:
        _steps, transitions, scale, _ = memory.store.schedule(name)
        if name in layer.parameters:
            most = float(abs(transitions[:, 4]).max() * abs(scale).max()) * 20  # momentum gathers up to 1 / (1 − μ)
            for block in memory.store.blocks(layer.name, errors=True):
                assert block.errors is not None
                e = block.errors.double() * (1 if block.error_scale is None else block.error_scale.unsqueeze(1))
                k = block.keys.double() * (1 if block.key_scale is None else block.key_scale.unsqueeze(1))
                total += most * float((e.norm(dim=1) * (k.norm(dim=1) if name in layer.weights else 1)).sum())
    return total


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", [lambda: mlp(5, 8, 3), whole], ids=["mlp", "whole model"])
def test_a_float32_network_is_rebuilt_within_the_bar(make, dtype, tmp_path):
    """spec/dual-form.md §5.2: 2e-5 of the change for float32 training; float16 keeps 11 bits of every number."""
    model = make().float()
    optimizer = sgd(model)
    data = [(x.float(), y) for x, y in batches(20, 8, 5, 3)]
    run = trained(tmp_path, model, optimizer, data, dtype=dtype)
    assert_clean(run.memory)
    assert run.memory.check(model, full=True).worst <= {"float32": 2e-5, "float16": 2e-3}[dtype]
    model.eval()
    x = torch.randn(50, 5)
    torch.testing.assert_close(
        run.memory.predict(model, x), model(x), rtol=0, atol={"float32": 1e-4, "float16": 1e-2}[dtype]
    )


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [lambda: mlp(5, 16, 3), lambda: Whole(dropout=0.1)], ids=["mlp", "whole model"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_training_under_autocast_is_rebuilt_within_a_hundredth(make, lower, dtype, tmp_path):
    """Weight gradients are themselves rounded to 8 (or 11) bits: spec/optimisers.md §3."""
    torch.manual_seed(0)
    model = make().float()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype=dtype, progress=False) as tape:
        for x, y in batches(20, 8, 5, 3):
            tape.note(label=y)
            with torch.autocast("cpu", lower):
                loss = F.cross_entropy(model(x.float()), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert memory.check(model, full=True).worst <= 1e-2


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5)], ids=str)
def test_keys_under_autocast_are_what_the_layer_multiplies(shape, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3))
    x = torch.randn(shape)
    with dualform.record(model, sgd(model), tmp_path, dtype="float32", progress=False) as tape:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        tape.optimizers[0].step()
    keys = torch.cat([block.keys for block in dualform.open(tmp_path).store.blocks("0", errors=False)])
    assert torch.equal(keys, x.reshape(-1, 5).bfloat16().float())


# ---------------------------------------------------------------- loss scaling


def scaled_run(
    path,
    *,
    fused: bool,
    bad: tuple[int, ...] = (),
    set_to_none: bool = True,
    clipped: bool = False,
    model=None,
    dtype: DType = "float64",
):
    """Train with a loss scaler; the loss of the ``bad`` batches is infinite, so their steps are skipped."""
    model = model or mlp(5, 4, 3).float()
    # torch (2.13) leaves the momentum of a fused optimiser uninitialised where its very first step is skipped
    momentum = 0.0 if fused and 0 in bad else 0.9
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=momentum, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    with dualform.record(model, optimizer, path, dtype=dtype, progress=False) as tape:
        for i, (x, y) in enumerate(batches(8, 4, 5, 3)):
            tape.note(index=i, label=y)
            loss = F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
            scaler.scale(loss * torch.inf if i in bad else loss).backward()
            if clipped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
    return dualform.open(path), model


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("clipped", [False, True], ids=["not clipped", "clipped"])
def test_a_loss_scale_is_taken_out_again(fused, clipped, tmp_path):
    memory, model = scaled_run(tmp_path, fused=fused, clipped=clipped)
    assert memory.step == 8
    assert_clean(memory)
    assert memory.check(model, full=True).worst <= 2e-6  # the rounding of float32 training


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("bad", [(0,), (2, 3), (1, 7)], ids=str)
def test_steps_that_the_loss_scaler_skips_are_not_remembered(bad, fused, set_to_none, tmp_path):
    memory, model = scaled_run(tmp_path, fused=fused, bad=bad, set_to_none=set_to_none)
    assert memory.step == 8 - len(bad)
    assert_clean(memory)
    assert memory.check(model, full=True).worst <= 2e-6
    assert sorted(set(memory.visits["index"].to_pylist())) == [i for i in range(8) if i not in bad]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_loss_scaling_is_exact_in_float64(fused, tmp_path):
    memory, model = scaled_run(tmp_path, fused=fused, model=mlp(5, 4, 3))
    assert_clean(memory)
    assert_rebuilt(memory, model)


def test_a_scaled_whole_model_with_skipped_steps_is_remembered(tmp_path):
    memory, model = scaled_run(tmp_path, fused=False, bad=(1, 5), model=whole().float())
    assert_clean(memory)
    assert memory.check(model, full=True).worst <= 2e-5
    for name, buffer in model.named_buffers():
        assert torch.equal(memory.weights()[name], buffer)


@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_a_step_with_a_gradient_that_is_not_finite_is_not_taken(value, tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    before = {}
    with (
        pytest.raises(NonFiniteGradient, match="step 3"),
        dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False),
    ):
        for i, (x, y) in enumerate(batches(4, 3, 5, 3)):
            (F.cross_entropy(model(x), y) * (value if i == 2 else 1)).backward()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    memory = dualform.open(tmp_path)
    assert memory.step == 2
    assert_rebuilt(memory, model)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_very_small_and_very_large_rows_are_remembered(dtype, tmp_path):
    """Errors of 1e-20 and inputs of 1e6 are far outside float16 by themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    optimizer = optim.SGD(model.parameters(), lr=1e14)
    with dualform.record(model, optimizer, tmp_path, dtype=dtype, progress=False):
        for _ in range(4):
            x = torch.randn(6, 4, dtype=torch.float64) * 1e6
            (model(x).tanh().sum() * 1e-20 + (model(x) * 1e-20).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert memory.check(model, full=True).worst <= {"float16": 1e-2, "float32": 1e-5, "float64": 1e-12}[dtype]


LOWER = {"bfloat16": torch.bfloat16, "float16": torch.float16, "none": None}


def under_autocast(path, lower, optimiser: str, precision: torch.dtype, steps: int = 40, **options):
    """Training with autocast to a lower precision, and a loss scaler where that is float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)).to(precision)
    optimizer = optim.SGD(model.parameters(), lr=0.1) if optimiser == "SGD" else optim.AdamW(model.parameters())
    random = torch.Generator().manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", enabled=lower is torch.float16, init_scale=2.0**10)
    with dualform.record(model, optimizer, path, progress=False, **options) as tape:
        for _ in range(steps):
            x, y = torch.randn(16, 20, generator=random).to(precision), torch.randint(10, (16,), generator=random)
            tape.note(source="web")
            with torch.autocast("cpu", dtype=lower or torch.bfloat16, enabled=lower is not None):
                output = model(x)
            scaler.scale(F.cross_entropy(output if lower is None else output.float(), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return dualform.open(path), model


@pytest.mark.parametrize("optimiser", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("lower", "precision"),
    [(lower, torch.float32) for lower in LOWER] + [("none", torch.float64)],  # autocast leaves float64 as it is
    ids=str,
)
def test_the_certificate_stands_at_the_floor_that_is_printed_beside_it(lower, optimiser, precision, tmp_path):
    memory, model = under_autocast(tmp_path, LOWER[lower], optimiser, precision, dtype="float64")
    assert_clean(memory)
    for certificate in (memory.certificate, memory.check(model, full=True, progress=False)):
        for name, error in certificate.items():
            least = 0.0 if lower == "none" else 0.05 * certificate.floor[name]  # in float64 steps are run again exactly
            assert least <= error < 4 * certificate.floor[name], f"{name}\n{certificate}"


@pytest.mark.parametrize("keep", ["slots", "ledger"])
@pytest.mark.parametrize("lower", LOWER)
def test_the_floor_is_the_same_now_and_as_it_was_written(lower, keep, tmp_path):
    by = "source" if keep == "ledger" else None
    memory, model = under_autocast(tmp_path, LOWER[lower], "AdamW", torch.float32, dtype="float32", keep=keep, by=by)
    written, now = memory.certificate, memory.check(model, full=True, progress=False)
    assert written.floor.keys() == now.floor.keys()
    for name, floor in written.floor.items():
        assert floor == pytest.approx(now.floor[name], rel=1e-4)
    assert memory.at(memory.step).certificate.floor == written.floor


def test_a_decay_that_multiplies_float32_weights_is_rounded_as_the_optimiser_rounds_it(tmp_path):
    """1 − 1e-5 in float32 is off by 1e-8, in the same direction at every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    data = [(x.float(), y) for x, y in batches(300, 6, 6, 3)]
    run = trained(tmp_path, model, optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2), data, dtype="float64")
    certificate = run.memory.check(model, full=True, progress=False)
    for name in ("0.weight", "2.weight"):
        assert certificate[name] < 2 * certificate.floor[name], str(certificate)
