"""One battery for every kind of layer: its record is exact, changes nothing, and can be queried."""

import gc
from functools import partial

import pytest
import torch
from helpers import EXACT, close, state_of
from kinds import KINDS, Kind
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.record import KINDS as TABLE
from dualform.record import kind_of
from dualform.record.training.backward_hooks import ForwardCall

OPTIMISERS = {
    "SGD": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
}
HARSH = {
    kind.__name__: lambda model, kind=kind: kind(model.parameters(), lr=1e-2)
    for kind in (optim.Rprop, optim.Adagrad, optim.Adafactor)
}
"""These move entries with the smallest gradients as far as the others."""

every_kind = pytest.mark.parametrize("name", KINDS)
every_optimiser = pytest.mark.parametrize("optimiser", OPTIMISERS)


def train(kind: Kind, optimiser: str, path=None, steps: int = 6, **options):
    """Two backward passes a step, clipped; recorded where there is a path."""
    model = kind.model()
    optimizer = {**OPTIMISERS, **HARSH}[optimiser](model)
    random = torch.Generator().manual_seed(1)

    def step(s: int, tape=None) -> None:
        for part in range(2):
            x = kind.inputs(random)
            y = torch.randint(3, (kind.examples,), generator=random)
            if tape is not None:
                tape.note(label=y, source=f"s{(s + part) % 3}")
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model))

    states = [state_of(model)]
    if path is None:
        for s in range(steps):
            step(s)
    else:
        with dualform.record(model, optimizer, path, **{"dtype": "float64", "progress": False, **options}) as tape:
            for s in range(steps):
                step(s, tape)
    return model, states, kind.inputs(random)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each kind and optimiser, trained once."""
    kept = {}

    def get(name: str, optimiser: str):
        if (name, optimiser) not in kept:
            path = tmp_path_factory.mktemp("memory")
            kept[name, optimiser] = (path, *train(KINDS[name], optimiser, path))
        return kept[name, optimiser]

    return get


@every_optimiser
@every_kind
def test_the_certificate_holds_and_nothing_is_left_to_the_rest(name, optimiser, runs):
    path, model, _, _ = runs(name, optimiser)
    memory = dualform.open(path)
    assert not memory.certificate.rest and not memory.certificate.marks
    assert set(KINDS[name].layers) <= set(memory.layers)
    assert max(memory.certificate.values()) < 1e-10
    assert max(memory.check(model, full=True, progress=False).values()) < 1e-10


@pytest.mark.parametrize("optimiser", HARSH)
@pytest.mark.parametrize("name", ["attention", "attention, across"])
def test_a_gradient_that_is_zero_but_for_rounding_is_followed_too(name, optimiser, tmp_path):
    """The key bias of attention changes nothing. These rules divide what rounding leaves of its gradient by its size,
    so the sum over the slots has to be rounded as autograd rounds it.
    """
    model, _, _ = train(KINDS[name], optimiser, tmp_path)
    assert dualform.open(tmp_path).check(model, full=True, progress=False).worst < 1e-10


@every_optimiser
@every_kind
def test_recorded_training_is_bare_training_bit_for_bit(name, optimiser, runs):
    _, model, _, _ = runs(name, optimiser)
    bare, _, _ = train(KINDS[name], optimiser)
    for key, tensor in state_of(bare).items():
        assert torch.equal(tensor, state_of(model)[key]), key
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@every_optimiser
@every_kind
def test_the_dual_output_is_the_output_of_the_layer(name, optimiser, runs):
    path, model, _, x = runs(name, optimiser)
    memory = dualform.open(path)
    spot = memory.attend(model, x)
    outputs = {}

    def keep(key: str, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        outputs[key] = output.detach().clone()

    handles = [
        module.register_forward_hook(partial(keep, key))
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Embedding)
    ]
    model(x)
    for handle in handles:
        handle.remove()
    for layer in memory.layers:
        out = spot.output(layer, progress=False)
        if layer in outputs:
            close(out, outputs[layer], 1e-9)
        primal = torch.cat([z.reshape(-1, z.shape[-1]) for z in spot._own_capture.calls[layer].outputs])
        if layer not in outputs:
            close(out.reshape(primal.shape), primal, 1e-9)


@every_optimiser
@every_kind
def test_parts_sum_to_the_whole(name, optimiser, runs):
    path, model, _, x = runs(name, optimiser)
    spot = dualform.open(path).attend(model, x)
    for layer in spot.memory.layers:
        for column in ("label", "source"):
            groups = spot.by(column, layer=layer, progress=False)
            assert groups.residual is not None and groups.residual.abs().max() < 1e-9, (layer, column)


@every_optimiser
@every_kind
def test_every_slot_has_its_place(name, optimiser, runs):
    """Contributions of all slots sum to those of their groups, and every slot knows its visit."""
    path, model, _, x = runs(name, optimiser)
    memory = dualform.open(path)
    spot = memory.attend(model, x)
    for layer in KINDS[name].layers:
        slots = memory.store.slots(memory.store.layer(layer)[0].name)
        hits = spot.top(slots, layer=layer, progress=False, per="slot")
        assert (hits.visits >= 0).all()
        times = spot.timeline(layer=layer, progress=False)
        close(hits.contribution.sum(1), times.values.sum((1, 2)), 1e-9)
        if "tied" not in name:
            close(hits.contribution.sum(1), spot.by("label", layer=layer, progress=False).values.sum(1), 1e-9)
        everything = {(int(v), int(p)) for v, p in zip(hits.visits[0], hits.positions[0], strict=True)}
        assert len(everything) * len(memory.store.layer(layer)[0].modules) >= slots or "across" in name


@every_optimiser
@every_kind
def test_the_memory_at_a_step_is_the_checkpoint_of_that_step(name, optimiser, runs):
    path, _, states, _ = runs(name, optimiser)
    memory = dualform.open(path)
    for step in (0, 1, 4, 6):
        for key, tensor in memory.at(step).weights(progress=False).items():
            close(tensor, states[step][key], 1e-9)


@every_optimiser
@every_kind
def test_masks_and_ledgers_agree(name, optimiser, runs):
    path, model, _, x = runs(name, optimiser)
    memory = dualform.open(path)
    ledger, masked = memory.ledger("source", progress=False), memory.without("source = 's1'")
    for key in ledger.initial:
        total = ledger.total(key)
        close(total, dict(model.named_parameters())[key].detach(), 1e-9)
        close(masked.parameter(key), total - ledger["s1"][key], 1e-9)
    assert masked.predict(model, x, progress=False).shape == model(x).shape


@every_kind
def test_a_step_leaves_no_reference_cycles_for_the_garbage_collector(name, tmp_path):
    kind = KINDS[name]
    model, random = kind.model(), torch.Generator().manual_seed(1)
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    gc.collect()
    gc.disable()
    try:
        with dualform.record(model, optimizer, tmp_path / "m", progress=False):
            for _ in range(3):
                model(kind.inputs(random)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not [call for call in gc.get_objects() if type(call) is ForwardCall]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@every_kind
def test_fewer_digits_stay_close(name, dtype, tmp_path):
    model, _, _ = train(KINDS[name], "SGD", tmp_path, dtype=dtype)
    assert (
        max(dualform.open(tmp_path).check(model, progress=False).values()) < {"float32": 1e-5, "float16": 5e-3}[dtype]
    )


def test_every_kind_of_the_table_is_tried():
    tried = {type(kind_of(part)) for kind in KINDS.values() for part in kind.model().modules() if kind_of(part)}
    assert {type(kind) for kind in TABLE.values()} <= tried
    assert EXACT < 1e-10
