"""Is this model the network of that step? If not, the memory's own weights are asked, never a wrong network."""

import pytest
import torch
from helpers import batches, close, mlp, seeds, sgd, tokens, trained, whole
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import dualform
from dualform.errors import HorizonError, ModelMismatch, QueryError

BUILD = {"mlp": lambda: mlp(5, 6, 3), "whole": whole, "tokens": tokens}


def data(kind: str):
    return batches(5, 4, 5, 3, middle=[3] if kind == "tokens" else [])


@pytest.mark.parametrize("options", [{}, {"keep": "keys"}, {"rules": None}], ids=["slots", "keys", "no rule"])
@pytest.mark.parametrize("kind", BUILD)
def test_a_memory_is_of_the_network_of_its_step_and_of_no_other(kind, options, tmp_path):
    model = BUILD[kind]()
    run = trained(tmp_path, model, sgd(model), data(kind), **options)
    for step, state in enumerate(run.states):
        model.load_state_dict(state)
        assert [run.memory.at(s).is_of(model) for s in range(6)] == [s == step for s in range(6)]


@given(name=st.sampled_from(["0.weight", "0.bias", "2.weight", "2.bias"]), seed=seeds)
def test_one_changed_entry_is_seen_at_both_ends(name, seed, tmp_path_factory):
    model = mlp(40, 30, 3)
    run = trained(tmp_path_factory.mktemp("memory"), model, sgd(model), batches(3, 4, 40, 3))
    for step in (0, 3):
        model.load_state_dict(run.states[step])
        assert run.memory.at(step).is_of(model)
        entries = model.get_parameter(name).data.view(-1)
        entries[seed % len(entries)] += 1e-9
        assert not run.memory.at(step).is_of(model)


def test_running_statistics_are_a_part_of_the_network(tmp_path):
    model = whole()
    run = trained(tmp_path, model, sgd(model), batches(3, 4, 5, 3))
    x = run.inputs[:2]
    model.eval()
    expected = model(x).detach()
    model.train()
    model(torch.randn(4, 5, dtype=torch.float64))
    assert not run.memory.is_of(model)
    close(run.memory.attend(model, x).prediction, expected)


def one_hot_run(path):
    """A step changes the weights of the words it saw alone, so most entries are those of the step before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 2, bias=False)).double()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    words = [(torch.eye(300, dtype=torch.float64)[[3 * s, 3 * s + 1]], torch.tensor([0, 1])) for s in range(8)]
    return trained(path, model, optimizer, words)


def test_a_step_that_looks_like_its_neighbour_is_not_taken_for_it(tmp_path):
    run = one_hot_run(tmp_path)
    x = torch.ones(1, 300, dtype=torch.float64)
    for of, state in enumerate(run.states):
        run.model.load_state_dict(state)
        for step, there in enumerate(run.states):
            assert of == step or not run.memory.at(step).is_of(run.model)
            close(run.memory.at(step).attend(run.model, x).prediction, x @ there["0.weight"].mT)


def test_a_spotlight_stays_with_the_network_it_was_made_for(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path, model, sgd(model), batches(3, 4, 5, 3))
    x = run.inputs[:2]
    spot, expected = run.memory.attend(model, x), model(x).detach()
    close(spot.by("label", layer="2", target=0).total, expected[:, 0])
    model.load_state_dict(run.states[1])
    close(spot.by("label", layer="2", target=1).total, expected[:, 1])
    close(spot.prediction, expected)


def test_a_memory_that_never_closed_is_of_the_network_of_its_last_flush(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for x, y in batches(3, 4, 5, 3):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            tape.flush()
            assert dualform.open(tmp_path).is_of(model)
            assert not dualform.open(tmp_path).at(tape.step - 1).is_of(model)


def test_a_network_in_another_precision_is_another(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path, model, sgd(model), batches(2, 4, 5, 3), keep={"0": "keys"})
    assert run.memory.is_of(model)
    assert not run.memory.is_of(mlp(5, 4, 3).float())
    with pytest.raises(ModelMismatch, match=r"'0\.weight'"):
        run.memory.is_of(mlp(5, 3, 3))


def test_a_rest_that_was_not_looked_at_makes_no_network(tmp_path):
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double()
    run = trained(tmp_path, model, sgd(model), batches(4, 3, 5, 3), snapshot_every=4)
    model.load_state_dict(run.states[2])
    with pytest.raises(HorizonError, match="every 4th step"):
        run.memory.at(2).attend(model, run.inputs[:1])


# ---------------------------------------------------------------- masks where nothing is rebuilt


@pytest.mark.parametrize("options", [{"keep": "keys"}, {"rules": None}], ids=["keys", "no rule"])
def test_a_mask_cannot_change_snapshots_but_weights_can_be_asked_through_it(options, tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path, model, sgd(model), batches(4, 3, 5, 3), **options)
    x, masked = run.inputs[:2], run.memory.without("label = 1")
    for ask in (
        lambda: masked.predict(model, x),
        lambda: masked.weights(),
        lambda: masked.parameter("0.weight"),
        lambda: masked.load_into(model),
    ):
        with pytest.raises(QueryError, match="a mask cannot change the weights of this memory"):
            ask()
    with pytest.raises(QueryError, match="no part of them belongs to a group"):
        run.memory.ledger("label")
    for network in (model, mlp(5, 4, 3, seed=1)):
        spot = masked.attend(network, x)
        close(spot.prediction, model(x))
        everything = run.memory.attend(model, x).by("label", layer="2", score="abs")
        groups = spot.by("label", layer="2", score="abs")
        assert groups.names == everything.names == (0, 1, 2)
        close(groups.values[:, [0, 2]], everything.values[:, [0, 2]])
        assert not groups.values[:, 1].any()
        assert 1 not in spot.top(20, layer="0", score="weight", per="slot").columns["label"].to_pylist()


def test_where_some_layers_keep_slots_a_mask_changes_those(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path, model, sgd(model), batches(4, 3, 5, 3), keep={"2": "keys"})
    masked = run.memory.without("label = 1").weights()
    assert torch.equal(masked["2.weight"], run.states[-1]["2.weight"])
    assert (masked["0.weight"] - run.states[-1]["0.weight"]).norm() > 1e-3
