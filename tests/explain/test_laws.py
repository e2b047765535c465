"""The promises of a memory: dual == primal, parts sum to the whole, prefix and horizon == checkpoint."""

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from helpers import (
    EXACT,
    Naive,
    Run,
    assert_whole,
    batches,
    clip,
    close,
    mlp,
    seeds,
    setups,
    sgd,
    tokens,
    trained,
    watched,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st

import dualform
from dualform.explain.weights import weights_from_ledger


def build(kind: str, path) -> Run:
    """Three runs that use everything: a plain network, a whole model, one that sees tokens."""
    if kind == "tokens":
        model, data = tokens(), batches(7, 4, 5, 3, middle=[3])
    else:
        model, data = (whole() if kind == "whole" else mlp(5, 6, 4, 3, bias=(True, False, True))), batches(7, 4, 5, 3)
    optimizer = sgd(model, nesterov=True)
    return trained(path, model, optimizer, data, before_step=clip(model, 0.3))


@pytest.fixture(scope="module", params=["mlp", "whole", "tokens"])
def run(request, tmp_path_factory) -> Run:
    return build(request.param, tmp_path_factory.mktemp(request.param))


def queries(run: Run) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randn(3, *run.inputs.shape[1:], generator=random, dtype=torch.float64)


# ---------------------------------------------------------------- dual == primal


def check_dual_is_primal(run: Run, x: torch.Tensor) -> None:
    memory = run.memory
    run.model.eval()
    spot = memory.attend(run.model, x)
    seen = watched(run.model, x)
    for layer in memory.layers:
        outputs = seen[layer][1]
        expected = outputs[0] if len(outputs) == 1 else torch.stack(outputs)
        close(spot.output(layer), expected)
    close(memory.predict(run.model, x), run.model(x))
    close(spot.prediction, run.model(x))


@given(setup=setups())
def test_the_dual_output_is_the_output_of_every_layer_and_of_the_network(setup, tmp_path_factory):
    check_dual_is_primal(setup.run(tmp_path_factory.mktemp("memory")), setup.queries())


def test_the_dual_output_is_the_output_on_every_kind_of_model(run):
    check_dual_is_primal(run, queries(run))


def test_the_network_of_every_step_answers_as_it_did_then(run):
    x = queries(run)
    model = run.model
    final = run.states[-1]
    for step, state in enumerate(run.states):
        model.load_state_dict(state)
        model.eval()
        expected = model(x)
        model.load_state_dict(final)
        memory = run.memory.at(step)
        close(memory.predict(model, x), expected)
        spot = memory.attend(model, x)
        close(spot.prediction, expected)
        layer = memory.layers[-1]
        if layer != "right":
            close(spot.output(layer), expected)


def test_weights_can_be_loaded_into_another_model(run, tmp_path):
    other = build({"Whole": "whole", "Tokens": "tokens"}.get(type(run.model).__name__, "mlp"), tmp_path / "other").model
    for parameter in other.parameters():
        parameter.data.fill_(7.0)
    for step in (0, 3, 7):
        run.memory.at(step).load_into(other)
        for name, tensor in other.state_dict().items():
            close(tensor, run.states[step][name]) if tensor.is_floating_point() else torch.equal(
                tensor, run.states[step][name]
            )


# ---------------------------------------------------------------- checkpoints


def check_prefixes(run: Run) -> None:
    memory = run.memory
    for step, state in enumerate(run.states):
        weights = memory.at(step).weights()
        assert set(weights) == {name for name in state if name != "right.weight"}  # a tied weight has one name
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                close(tensor, state[name])
            else:
                assert torch.equal(tensor, state[name])
        assert memory.at(step).certificate.worst <= EXACT or step == 0
        close(
            memory.at(step).parameter(memory.store.manifest.layers[0].weights[0]),
            state[memory.store.manifest.layers[0].weights[0]],
        )


@given(setup=setups())
def test_the_memory_at_a_step_is_the_checkpoint_of_that_step(setup, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    for step, state in enumerate(run.states):
        for name, tensor in run.memory.at(step).weights().items():
            close(tensor, state[name])


def test_the_memory_at_a_step_is_the_checkpoint_on_every_kind_of_model(run):
    check_prefixes(run)


def test_a_prefix_is_not_a_mask(run):
    """Masking later slots with the coefficients of the end leaves the tail of momentum and decay: no checkpoint."""
    masked = run.memory.only("step <= 4").weights()
    name = run.memory.store.manifest.layers[0].weights[0]
    assert (masked[name] - run.states[4][name]).norm() > 1e-3 * run.states[4][name].norm()
    close(run.memory.at(4).weights()[name], run.states[4][name])


def test_a_certificate_of_another_step_is_checked_then(run):
    for step in range(1, 8):
        certificate = run.memory.at(step).certificate
        assert certificate.step == step
        assert certificate.worst <= EXACT
        assert set(certificate) == set(run.memory.certificate)


def test_a_model_that_is_not_the_memorys_own_is_seen(run):
    memory, last = run.memory, run.states[-1]
    assert memory.check(run.model).worst <= EXACT
    try:
        run.model.load_state_dict(run.states[-2])
        assert memory.check(run.model).worst > 1e-3
        assert memory.check(run.model, full=True).worst > 1e-3
        assert memory.at(6).check(run.model).worst <= EXACT
    finally:
        run.model.load_state_dict(last)


def test_random_probes_and_the_full_sum_agree(run):
    assert run.memory.check(run.model).worst <= EXACT
    assert run.memory.check(run.model, full=True).worst <= EXACT
    assert run.memory.check().worst <= EXACT


# ---------------------------------------------------------------- additivity


def assert_parts_sum(run: Run, memory, parts) -> None:
    """initial + Σ (only(part) − initial) == the weights."""
    naive = Naive(run.path)
    weights = memory.weights()
    for name in memory.certificate:
        start = naive.initial(name, memory.step)
        total = start + sum(part.weights()[name] - start for part in parts)
        close(total, weights[name])


@given(setup=setups(), count=st.integers(1, 4), data=st.data())
def test_any_partition_of_the_visits_sums_to_the_weights(setup, count, data, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    group = np.random.default_rng(setup.seed).integers(count, size=sum(setup.sizes))
    horizon = data.draw(st.integers(1, len(setup.sizes)))
    memory = run.memory.at(horizon)
    steps = np.array(run.memory.visits["step"].to_pylist())
    masks = [group == g for g in range(count) if (group[steps <= horizon] == g).any()]
    assert_parts_sum(run, memory, [memory.only(mask) for mask in masks])
    mask = masks[0]
    if not mask[steps <= horizon].all():
        assert_parts_sum(run, memory, [memory.only(mask), memory.without(mask)])


@pytest.mark.parametrize(("column", "horizon"), [("label", 7), ("step", 4), ("source", 4), ("row", 7)])
def test_every_column_is_a_partition(run, column, horizon):
    memory = run.memory.at(horizon)
    values = sorted(set(memory.visits[column].to_pylist()))
    assert_parts_sum(run, memory, [memory.only(pc.field(column) == value) for value in values])


@pytest.mark.parametrize(("column", "horizon"), [("label", 7), ("label", 4), ("step", 4), ("index", 7)])
def test_the_ledger_sums_to_the_weights_and_its_parts_are_those_of_the_masks(run, column, horizon):
    memory = run.memory.at(horizon)
    ledger = memory.ledger(column)
    weights = memory.weights()
    naive = Naive(run.path)
    shown = set(memory.visits[column].to_pylist())
    assert set(ledger) >= shown
    for name in memory.certificate:
        close(ledger.total(name), weights[name])
        close(ledger.initial[name], naive.initial(name, horizon))
    for value in sorted(shown)[:4]:
        only = memory.only(pc.field(column) == value).weights()
        for name in memory.certificate:
            close(ledger.initial[name] + ledger[value][name], only[name])
    for value in set(ledger) - shown:
        assert not any(part.any() for part in ledger[value].values())


@pytest.mark.parametrize(("column", "target"), [("label", None), ("step", (0, 2)), ("index", 1)], ids=str)
def test_the_groups_of_a_query_sum_to_the_layers_own_part(run, column, target):
    x = queries(run)
    for memory in (run.memory, run.memory.at(3), run.memory.without("label = 1")):
        spot = memory.attend(run.model, x, target=target)
        for layer in memory.layers:
            groups = spot.by(column, layer=layer)
            assert_whole(groups)
            assert groups.values.shape == (3, len(groups.names))


def test_the_total_of_the_last_layer_is_the_logit(run):
    x = queries(run)
    run.model.eval()
    spot = run.memory.attend(run.model, x)
    close(spot.by("label", layer=run.memory.layers[-1]).total, run.model(x).max(1).values)
    close(spot.by("label", layer=run.memory.layers[-1], target=2).total, run.model(x)[:, 2])


def test_a_timeline_sums_to_the_groups(run):
    spot = run.memory.attend(run.model, queries(run))
    for layer in run.memory.layers:
        for score in ("weight", "abs", "contribution"):
            groups = spot.by("label", layer=layer, score=score)
            for stretches in (3, 50):
                timeline = spot.timeline("label", layer=layer, score=score, stretches=stretches)
                assert timeline.names == groups.names
                close(timeline.values.sum(2), groups.values)


@given(setup=setups(), column=st.sampled_from(["label", "step", "index", "source"]), seed=seeds)
def test_contributions_sum_to_the_layers_output_for_any_network(setup, column, seed, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    x = setup.queries()
    horizon = 1 + seed % len(setup.sizes)
    for memory in (run.memory, run.memory.at(horizon)):
        spot = memory.attend(run.model, x)
        for layer in memory.layers:
            assert_whole(spot.by(column, layer=layer))


# ---------------------------------------------------------------- against naive


@given(setup=setups(), data=st.data())
def test_masked_weights_are_the_sum_over_the_visible_slots_one_by_one(setup, data, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    naive = Naive(run.path)
    visible = np.random.default_rng(setup.seed).random(sum(setup.sizes)) < 0.5
    visible[0] = True  # of step 1, so that every horizon shows something
    horizon = data.draw(st.integers(1, len(setup.sizes)))
    memory = run.memory.at(horizon).only(visible)
    for name, tensor in memory.weights().items():
        close(tensor, naive.parameter(name, horizon, visible))
        close(memory.parameter(name), naive.parameter(name, horizon, visible))


@given(setup=setups(), data=st.data())
def test_a_mask_gives_the_same_weights_by_what_it_shows_by_what_it_hides_and_through_a_ledger(
    setup, data, tmp_path_factory
):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    horizon = data.draw(st.integers(1, len(setup.sizes)))
    memory = dualform.open(run.path).at(horizon)
    column = data.draw(st.sampled_from(["label", "step", "index", "source"]))
    hidden = data.draw(st.sampled_from(sorted(set(memory.visits[column].to_pylist()))))
    visible = np.array([value != hidden for value in memory.store.visits[column].to_pylist()])
    shown = memory.without(~visible).weights()
    asked = dualform.open(run.path).at(horizon)
    asked.weights()
    less = asked.without(~visible).weights()
    booked = dualform.open(run.path).at(horizon)
    booked.ledger(column)
    assert weights_from_ledger(booked.store, replace(booked.view, visible=visible)) is not None
    through = booked.without(~visible).weights()
    for name, tensor in shown.items():
        close(less[name], tensor)
        close(through[name], tensor)


def test_masks_of_a_whole_model_leave_the_rest_as_it_was(run):
    memory = run.memory.without("label = 0")
    for name, tensor in memory.weights().items():
        if name in memory.certificate.rest:
            assert torch.equal(tensor, run.states[-1][name])


def test_masks_add_up(run):
    memory = run.memory
    both = memory.without("label = 0").without("source = 'odd'")
    same = memory.only("label != 0 and source != 'odd'")
    assert both.visits.equals(same.visits)
    for name, tensor in both.weights().items():
        assert torch.equal(tensor, same.weights()[name])
    assert memory.only("label = 1").at(3).visits.equals(memory.at(3).only("label = 1").visits)


# ---------------------------------------------------------------- steps at which only the rest moved


def test_the_queries_of_a_step_are_those_of_its_own_network(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}], lr=0.5
    )
    run = trained(tmp_path, model, optimizer, batches(4, 3, 5, 3))
    x = queries(run)
    then = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).double()
    then.load_state_dict(run.states[2])
    close(run.memory.at(2).predict(model, x), then(x))
    close(run.memory.at(2).attend(model, x).prediction, then(x))


def test_the_queries_of_a_step_are_those_of_its_own_network_where_keys_alone_are_kept(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path, model, sgd(model), batches(4, 3, 5, 3), keep="keys")
    x = queries(run)
    then = mlp(5, 4, 3)
    then.load_state_dict(run.states[2])
    close(run.memory.at(2).predict(model, x), then(x))
    close(run.memory.at(2).attend(model, x).prediction, then(x))


def test_a_model_with_other_weights_is_asked_with_those_of_the_memory(run):
    x = queries(run)
    last = run.states[-1]
    run.model.eval()
    expected = run.model(x).detach()
    try:
        for parameter in run.model.parameters():
            parameter.data.add_(1.0)
        close(run.memory.attend(run.model, x).prediction, expected)
        close(run.memory.predict(run.model, x), expected)
    finally:
        run.model.load_state_dict(last)


def test_asking_at_the_very_beginning_shows_the_first_weights(run):
    memory = run.memory.at(0)
    spot = memory.attend(run.model, queries(run))
    for layer in memory.layers:
        groups = spot.by("label", layer=layer)
        assert not groups.values.any()
        assert_whole(groups)
        assert spot.top(3, layer=layer, per="slot").slots.shape == (3, 0)
