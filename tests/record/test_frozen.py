"""Frozen weights are not copied into a memory: it keeps their fingerprints, and is whole given the model."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import assert_clean, batches, state_of
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, FrozenWeights, ModelMismatch, ResumeError

DATA = batches(8, 4, 5, 3)
WIDE = 200


def frozen_base(seed: int = 0) -> nn.Sequential:
    """Large frozen layers and a small head that is trained; 1.3 MB of weights, all but 5 kB of them frozen."""
    torch.manual_seed(seed)
    base = [nn.Linear(5, WIDE), nn.Tanh(), *(nn.Linear(WIDE, WIDE) for _ in range(4)), nn.LayerNorm(WIDE)]
    model = nn.Sequential(*base, nn.Linear(WIDE, 3)).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("7."))
    return model


def train(model, optimizer, path, data=DATA, events=None, **options) -> list[dict[str, torch.Tensor]]:
    states = [state_of(model)]
    with dualform.record(model, optimizer, path, dtype="float64", progress=False, **options) as tape:
        for step, (x, y) in enumerate(data, start=1):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(state_of(model))
            (events or {}).get(step, lambda tape: None)(tape)
    return states


@pytest.fixture
def run(tmp_path):
    model = frozen_base()
    states = train(model, head(model), tmp_path)
    return dualform.open(tmp_path), model, states


def head(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.get_submodule("7").parameters(), lr=0.1, momentum=0.9)


def test_large_frozen_weights_take_no_space(run):
    memory, model, _ = run
    size = sum(file.stat().st_size for file in memory.path.rglob("*") if file.is_file())
    assert size < 0.15 * sum(p.numel() * 8 for p in model.parameters())
    assert set(memory.store.manifest.frozen) == {f"{i}.weight" for i in (2, 3, 4, 5)}
    assert_clean(memory)


def test_given_the_model_the_memory_is_whole(run):
    memory, model, states = run
    x = DATA[0][0]
    assert memory.is_of(model)
    for step in (0, 3, 8):
        other = frozen_base()
        other.load_state_dict(states[step])
        torch.testing.assert_close(memory.at(step).predict(model, x, progress=False), other(x))
        weights = memory.at(step).weights(model, progress=False)
        assert weights.keys() == states[step].keys()
        for name, tensor in states[step].items():
            torch.testing.assert_close(weights[name], tensor)
        loaded = memory.at(step).load_into(frozen_base(), progress=False)
        torch.testing.assert_close(loaded(x), other(x))
    torch.testing.assert_close(memory.attend(model, x).output("7"), model(x))


def test_without_the_model_it_is_said_what_is_missing(run):
    memory, _, _ = run
    for ask in (memory.weights, lambda: memory.parameter("2.weight")):
        with pytest.raises(FrozenWeights, match=r"'2\.weight'.*memory\.weights\(model\)"):
            ask()
    assert "7.weight" in memory.held_weights(progress=False)


def test_another_base_is_refused(run):
    memory, _, _ = run
    other = frozen_base(seed=1)
    assert not memory.is_of(other)
    for ask in (memory.predict, memory.attend):
        with pytest.raises(ModelMismatch, match=r"the frozen weight '2\.weight'"):
            ask(other, DATA[0][0])
    with pytest.raises(ModelMismatch, match="frozen weight"):
        memory.load_into(other)


def test_small_frozen_weights_are_kept(tmp_path):
    model = nn.Sequential(nn.Linear(5, 20), nn.Linear(20, 3)).double()
    model[0].requires_grad_(False)
    train(model, optim.SGD(model[1].parameters(), lr=0.1), tmp_path)
    memory = dualform.open(tmp_path)
    assert not memory.store.manifest.frozen
    torch.testing.assert_close(memory.weights(progress=False)["0.weight"], model.get_parameter("0.weight").detach())


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("optimiser", [optim.SGD, optim.AdamW])
def test_what_joins_the_optimiser_later_is_recorded_from_then_on(optimiser, at, tmp_path):
    bare, model = frozen_base(), frozen_base()
    all_states = []
    for net, path in ((bare, None), (model, tmp_path)):
        optimizer = optimiser(net.get_submodule("7").parameters(), lr=1e-2)

        def unfreeze(tape, net=net, optimizer=optimizer):
            net[3].requires_grad_(True)
            net[6].requires_grad_(True)
            optimizer.add_param_group({"params": [*net[3].parameters(), *net[6].parameters()]})

        all_states.append(loop(net, optimizer, path, {at: unfreeze}))
    first, states = all_states
    for a, b in zip(first, states, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert set(memory.layers) == {"3", "7"}
    assert memory.check(model, full=True, progress=False).worst < 1e-11
    assert memory.certificate.worst < 1e-11 and "3.weight" in memory.certificate
    for step in (0, 4, 5, 8):
        weights = memory.at(step).weights(model, progress=False)
        for name, tensor in states[step].items():
            torch.testing.assert_close(weights[name], tensor)
    assert (
        memory.visits.num_rows == 32 and memory.visits["label"].to_pylist() == torch.cat([y for _, y in DATA]).tolist()
    )
    hits = memory.attend(model, DATA[0][0][:1]).top(32, layer="3", score="abs", per="slot")
    assert {hit.step for hit in hits[0]} == set(range(at + 1, 9))


def loop(model, optimizer, path, events):
    """Train, and record where there is a path; what happens at step s happens between its note and its forward pass."""
    states = [state_of(model)]
    recording = (
        nullcontext() if path is None else dualform.record(model, optimizer, path, dtype="float64", progress=False)
    )
    with recording as tape:
        for step, (x, y) in enumerate(DATA):
            if tape is not None:
                tape.note(label=y)
            events.get(step, lambda tape: None)(tape)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(state_of(model))
    return states


def test_a_frozen_weight_that_joins_with_others_and_cannot_be_recorded_is_kept_as_it_was_at_first(tmp_path):
    """It is a part of the rest then: the layers to record were named."""
    model = frozen_base()
    optimizer = head(model)

    def unfreeze(tape):
        model[3].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[3].parameters())})

    states = train(model, optimizer, tmp_path, events={4: unfreeze}, layers=["7"])
    assert not torch.equal(states[8]["3.weight"], states[0]["3.weight"])
    memory = dualform.open(tmp_path)
    for step in (0, 4, 5, 8):
        weights = memory.at(step).weights(model, progress=False)
        for name, tensor in states[step].items():
            torch.testing.assert_close(weights[name], tensor)


def test_a_frozen_weight_that_is_edited_is_marked_and_kept_from_then_on(tmp_path):
    model = frozen_base()

    def edit(tape):
        with torch.no_grad():
            model.get_parameter("3.weight").mul_(2)

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", DualformWarning)
        states = train(model, head(model), tmp_path, events={4: edit})
    memory = dualform.open(tmp_path)
    assert [(mark.kind, mark.name) for mark in memory.certificate.marks] == [("frozen-changed", "3.weight")]
    torch.testing.assert_close(memory.weights(model, progress=False)["3.weight"], states[8]["3.weight"])
    with pytest.raises(ModelMismatch, match=r"the frozen weight '3\.weight'"):
        memory.at(2).predict(model, DATA[0][0])


def test_a_recording_is_resumed_with_its_own_frozen_weights_alone(tmp_path):
    model = frozen_base()
    optimizer = head(model)
    train(model, optimizer, tmp_path, DATA[:4])
    other = frozen_base()
    other.load_state_dict(model.state_dict())
    other.get_parameter("3.weight").data[7, 7] += 1e-9
    foreign = head(other)
    foreign.load_state_dict(optimizer.state_dict())
    with pytest.raises(ResumeError, match=r"'3\.weight' differs"):
        train(other, foreign, tmp_path, DATA[4:], resume=4)
    train(model, optimizer, tmp_path, DATA[4:], resume=4)
    memory = dualform.open(tmp_path)
    assert memory.step == 8 and memory.is_of(model)
    assert memory.check(model, full=True, progress=False).worst < 1e-12
