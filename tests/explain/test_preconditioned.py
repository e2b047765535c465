"""Preconditioned optimisers, asked: single slots, groups, time and masks are exact, and each is where it should be."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batches, close, mlp, state_of, trained, whole
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, optim
from torch.nn import functional as F

import dualform
from dualform.engine import rerun_from_slots
from dualform.errors import ResumeError, UnsupportedOptimizer
from dualform.record.state import state_checkpoints as stations
from dualform.rules import Rule, Transition
from dualform.types import Order

OPTIMISERS: dict[str, Any] = {
    "Adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2, betas=(0.9, 0.9)),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True, weight_decay=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
}
every_optimiser = pytest.mark.parametrize("name", OPTIMISERS)


def run_of(name: str, path: Path, steps: int = 8, complete: bool = False, **options: Any):
    model = whole(dropout=0.0) if complete else mlp(5, 6, 3)
    return trained(path, model, OPTIMISERS[name](model.parameters()), batches(steps, 4, 5, 3), **options)


@every_optimiser
@pytest.mark.parametrize("complete", [False, True], ids=["mlp", "whole"])
def test_all_parts_of_the_weights_are_exact(name, complete, tmp_path):
    run = run_of(name, tmp_path, complete=complete)
    memory = run.memory
    assert max(memory.certificate.values()) < 1e-10
    assert max(memory.check(run.model, full=True, progress=False).values()) < 1e-10
    for step in (0, 1, 5):
        for key, tensor in memory.at(step).weights(progress=False).items():
            close(tensor, run.states[step][key], 1e-10)
    ledger = memory.ledger("label", progress=False)
    for key, parameter in run.model.named_parameters():
        if key in ledger.initial:
            close(ledger.total(key), parameter.detach(), 1e-10)


@every_optimiser
def test_the_contribution_of_a_slot_is_what_its_gradient_put_into_the_weights(name, tmp_path):
    """Slot by slot: the weights without one visit, beside what the sweep says of it."""
    run = run_of(name, tmp_path, steps=4)
    memory, x = run.memory, run.data[0][0][:2]
    layer = memory.layers[-1]
    spot = memory.attend(run.model, x, target=1)
    slots = memory.store.slots(layer)
    hits = spot.top(slots, layer=layer, progress=False, per="slot")
    queries = spot._own_capture.calls[layer].inputs[0]
    whole_weight = memory.parameter(f"{layer}.weight")
    for visit in (0, 5, slots - 1):
        mask = np.arange(slots) == visit
        less = whole_weight - memory.without(mask).parameter(f"{layer}.weight")
        said = hits.contribution[hits.visits == visit]
        close(said, queries @ less[1], 1e-10)


@every_optimiser
def test_every_order_of_slots_is_that_of_the_full_list(name, tmp_path):
    run = run_of(name, tmp_path, steps=4)
    spot = run.memory.attend(run.model, run.data[0][0])
    layer = run.memory.layers[0]
    everything = spot.top(100, layer=layer, progress=False, per="slot")
    count = everything.contribution.shape[1]
    assert count == 16
    values = torch.empty_like(everything.contribution).scatter_(1, everything.slots, everything.contribution)
    orders: dict[Order, Tensor] = {"largest": values, "smallest": -values, "magnitude": values.abs()}
    for order, key in orders.items():
        found = spot.top(3, layer=layer, order=order, progress=False, per="slot")
        close(found.contribution, values.gather(1, found.slots))
        close(key.gather(1, found.slots), key.topk(3, dim=1).values)
    assert not spot.top(3, layer=layer, score="abs", progress=False, per="slot").weight.isnan().any()


@given(seed=st.integers(0, 2**32 - 1), lr=st.floats(1e-4, 0.05), decay=st.floats(0, 0.3), beta=st.floats(0, 0.95))
def test_the_parts_of_adam_sum_to_the_whole_for_any_settings(seed, lr, decay, beta, tmp_path_factory):
    model = mlp(4, 5, 3, seed=seed)
    optimizer = optim.Adam(model.parameters(), lr=lr, weight_decay=decay, betas=(beta, 0.99), amsgrad=bool(seed % 2))
    run = trained(tmp_path_factory.mktemp("m"), model, optimizer, batches(5, 3, 4, 3, seed=seed))
    x = run.data[0][0]
    spot = run.memory.attend(model, x)
    for layer in run.memory.layers:
        one = [spot.by(column, layer=layer, progress=False) for column in ("label", "source", "index")]
        several = spot.ask(
            layer, per="slot", top=2, by=["label", "source", "index"], progress=False
        ).groups  # through the sweep
        for groups in one:
            assert groups.residual is not None and groups.residual.abs().max() < 1e-9
            close(groups.values, several[groups.column].values, 1e-9)


def test_a_fallen_coefficient_is_seen(tmp_path):
    """The negative control: without its preconditioner Adam explains nothing."""
    run = run_of("AdamW", tmp_path, steps=20)
    store = run.memory.store
    name = "0.weight"
    assert run.memory.check(run.model, full=True, progress=False)[name] < 1e-10
    plain = Rule("AdamW", store.rules["AdamW"].transition, buffer="exp_avg")  # P is left out
    store.rules["AdamW"] = plain
    parts = rerun_from_slots(store, [name], run.memory.view)[name]
    now = dict(run.model.named_parameters())[name].detach()
    off = (parts.weight.sum(0) - now).norm() / (now - store.initial(name)).norm()
    assert off > 0.5


# ---------------------------------------------------------------- stations


def test_stations_do_not_change_an_answer(tmp_path, monkeypatch):
    """Whether the optimiser's state is found on disk or made again from the slots."""
    found, data = [], batches(9, 4, 5, 3)
    for share in (0, 1 << 40):
        monkeypatch.setattr(stations, "SHARE", share)
        path = tmp_path / str(share)
        model = mlp(5, 6, 3)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
            for step, (x, y) in enumerate(data):
                tape.note(label=y)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 3 == 2:
                    tape.flush()
        memory = dualform.open(path)
        kept = [s for s in memory.store.kept_steps if memory.store.kept_at("0.weight#exp_avg_sq", s) is not None]
        assert kept == ([3, 6, 9] if share == 0 else [])
        spot = memory.attend(model, data[0][0])
        found.append([spot.top(5, layer="0", progress=False, per="slot").contribution, memory.parameter("0.weight")])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-12)


def test_a_sweep_in_several_rounds_is_a_sweep_in_one(tmp_path, monkeypatch):
    run = run_of("AdamW", tmp_path, steps=9)
    spot = run.memory.attend(run.model, run.data[0][0])
    whole_sweep = spot.timeline(layer="0", stretches=9, progress=False).values
    monkeypatch.setattr(sys.modules["dualform.engine.preconditioned.backward_factors"], "PRECONDITIONER_BYTES", 1000)
    close(spot.timeline(layer="0", stretches=9, progress=False).values, whole_sweep, 1e-12)


# ---------------------------------------------------------------- crash and resume


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adafactor"])
def test_a_resumed_memory_is_an_undisturbed_one(name, tmp_path):
    data = batches(9, 4, 5, 3)

    def steps(model, optimizer, tape, begin, end):
        for x, y in data[begin:end]:
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def start():
        model = mlp(5, 6, 3)
        return model, OPTIMISERS[name](model.parameters())

    model, optimizer = start()
    with dualform.record(model, optimizer, tmp_path / "whole", dtype="float64", progress=False) as tape:
        steps(model, optimizer, tape, 0, 9)
    model, optimizer = start()
    with dualform.record(model, optimizer, tmp_path / "m", dtype="float64", progress=False) as tape:
        steps(model, optimizer, tape, 0, 5)
        tape.flush()
        torch.save([state_of(model), optimizer.state_dict()], tmp_path / "last.pt")
        steps(model, optimizer, tape, 5, 7)
    model, optimizer = start()
    saved = torch.load(tmp_path / "last.pt")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with dualform.record(model, optimizer, tmp_path / "m", dtype="float64", progress=False, resume=5) as tape:
        steps(model, optimizer, tape, 5, 9)
    again, undisturbed = (dualform.open(tmp_path / part) for part in ("m", "whole"))
    assert max(again.certificate.values()) < 1e-10
    for key in ("0.weight", "2.bias"):
        close(again.parameter(key), undisturbed.parameter(key), 1e-12)
    fresh, optimizer = start()
    fresh.load_state_dict(saved[0])  # its optimiser has forgotten
    tape = dualform.record(fresh, optimizer, tmp_path / "m", dtype="float64", progress=False, resume=5)
    with pytest.raises(ResumeError, match=r"its state of '0\.weight' differs"), tape:
        pass


# ---------------------------------------------------------------- taught


class Yogi(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple = (0.9, 0.99), eps: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            inner, outer = group["betas"]
            for p in group["params"]:
                state, g = self.state[p], p.grad
                m, v = (
                    state.setdefault(key, torch.full_like(p, start))
                    for key, start in (("exp_avg", 0.0), ("exp_avg_sq", 1e-6))
                )
                m.mul_(inner).add_(g, alpha=1 - inner)
                v.sub_((1 - outer) * (v - g * g).sign() * g * g)
                p.sub_(m / (v.sqrt() + group["eps"]), alpha=group["lr"])


def yogi(s):
    beta = s["betas1"]
    return Transition(mm=beta, mg=1 - beta, wp=-s["lr"], pm=beta, pg=1 - beta)


def yogi_p(s, shared, seen):
    g2 = seen.gradient**2
    v = shared.get("exp_avg_sq", torch.full_like(g2, 1e-6))
    v = shared["exp_avg_sq"] = v - (1 - s["betas2"]) * (v - g2).sign() * g2
    return 1 / (v.sqrt() + s["eps"])


YOGI = Rule("Yogi", yogi, buffer="exp_avg", shared=("exp_avg_sq",), precondition=yogi_p)


def test_an_optimiser_with_a_preconditioner_can_be_taught(tmp_path):
    model = mlp(5, 6, 3)
    run = trained(tmp_path, model, Yogi(model.parameters()), batches(6, 4, 5, 3), rules={Yogi: YOGI})
    memory = dualform.open(tmp_path, rules=[YOGI])
    assert max(memory.certificate.values()) < 1e-10
    assert max(memory.check(model, full=True, progress=False).values()) < 1e-10
    residual = memory.attend(model, run.data[0][0]).by("label", layer="0", progress=False).residual
    assert residual is not None and residual.abs().max() < 1e-9


def test_a_taught_preconditioner_is_asked_for_by_its_name(tmp_path):
    model = mlp(5, 6, 3)
    trained(tmp_path, model, Yogi(model.parameters()), batches(3, 4, 5, 3), rules={Yogi: YOGI})
    memory = dualform.open(tmp_path)
    assert max(memory.certificate.values()) < 1e-10  # written while recording
    with pytest.raises(UnsupportedOptimizer, match=r"rule 'Yogi'.*dualform\.open\(path, rules="):
        memory.parameter("0.weight")
