"""Fast == naive: what a spotlight answers, against the full matrix of scores."""

import itertools

import numpy as np
import pytest
import torch
from helpers import (
    Naive,
    Run,
    assert_whole,
    batches,
    clip,
    close,
    mlp,
    naive_scores,
    rows_of,
    setups,
    sgd,
    tokens,
    trained,
    watched,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dualform
from dualform.errors import DualformWarning, QueryError
from dualform.explain import SlotHits
from dualform.types import Order, Score

SCORES: tuple[Score, ...] = ("weight", "abs", "contribution")
ORDERS: tuple[Order, ...] = ("largest", "smallest", "magnitude")


@pytest.fixture(scope="module", params=["mlp", "whole", "tokens"])
def run(request, tmp_path_factory) -> Run:
    if request.param == "tokens":
        model, data = tokens(), batches(6, 4, 5, 3, middle=[3])
    else:
        model, data = (whole() if request.param == "whole" else mlp(5, 6, 4, 3)), batches(6, 4, 5, 3)
    path = tmp_path_factory.mktemp(request.param)
    return trained(path, model, sgd(model), data, before_step=clip(model, 0.3))


def queries(run: Run, count: int = 3) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randn(count, *run.inputs.shape[1:], generator=random, dtype=torch.float64)


def views(memory: dualform.Memory):
    """(memory, horizon, visible) for some views of it."""
    label = np.array(memory.store.visits["label"].to_pylist())
    yield memory, memory.step, None
    yield memory.at(3), 3, None
    yield memory.only("label = 1"), memory.step, label == 1
    yield memory.at(4).without("label = 2"), 4, label != 2


def full_matrix(run: Run, memory, layer, x, horizon, visible, *, target=None, position=None):
    """The scores of all slots for the queries of the network that this view stands for."""
    naive = Naive(run.path)
    info, _ = memory.store.layer(layer)
    final = run.states[-1]
    try:
        memory.load_into(run.model)
        inputs, _, directions = watched(run.model, x, target)[layer]
    finally:
        run.model.load_state_dict(final)
    rows, us = rows_of(inputs, len(x)), rows_of(directions, len(x))
    if position is not None:
        rows, us = rows[:, [position]], us[:, [position]]
    return naive_scores(naive, info.name, info.weights[0], rows, us, horizon, visible), naive.slots(info.name)


def assert_hits_are(hits, score, order, matrix, slots, visits) -> None:
    key = {"largest": matrix[score], "smallest": -matrix[score], "magnitude": matrix[score].abs()}[order]
    _n, k = hits.slots.shape
    expected = key.nan_to_num(-torch.inf).sort(dim=1, descending=True, stable=True).values[:, :k]
    close(key.gather(1, hits.slots), expected)  # equal to rounding: near ties may change places
    close(hits.weight, matrix["weight"].gather(1, hits.slots))
    close(hits.contribution, matrix["contribution"].gather(1, hits.slots))
    flat = hits.slots.flatten().numpy()
    assert hits.steps.flatten().tolist() == slots.step[flat].tolist()
    assert hits.positions.flatten().tolist() == slots.position[flat].tolist()
    assert hits.visits.flatten().tolist() == slots.visit[flat].tolist()
    for name in visits.column_names:
        assert hits.columns[name].to_pylist() == visits[name].take(slots.visit[flat]).to_pylist()


def test_top_slots_groups_and_timelines_are_those_of_the_full_matrix(run):
    x = queries(run)
    visits = run.memory.store.visits
    column = {name: np.array(visits[name].to_pylist()) for name in ("label", "source", "index")}
    for memory, horizon, visible in views(run.memory):
        spot = memory.attend(run.model, x)
        for layer in memory.layers:
            matrix, slots = full_matrix(run, memory, layer, x, horizon, visible)
            shown = int((~matrix["weight"][0].isnan()).sum())
            for score in SCORES:
                for k, order, name in zip((1, 7, 1000), ORDERS, column, strict=True):
                    answer = spot.ask(layer, per="slot", top=k, by=(name,), score=score, order=order)
                    assert isinstance(answer.hits, SlotHits)
                    assert answer.hits.slots.shape == (3, min(k, shown))
                    assert_hits_are(answer.hits, score, order, matrix, slots, visits)
                    groups = answer.groups[name]
                    assert list(groups.names) == sorted(set(column[name]))
                    assert_groups_are(groups.names, groups.values, column[name][slots.visit], matrix[score])


def test_the_top_slots_of_each_group_are_those_of_the_full_matrix(run):
    x, visits = queries(run), run.memory.store.visits
    label = np.array(visits["label"].to_pylist())
    for memory, horizon, visible in views(run.memory):
        spot = memory.attend(run.model, x)
        for layer, score, order in zip(memory.layers, SCORES, ORDERS, strict=False):
            matrix, slots = full_matrix(run, memory, layer, x, horizon, visible)
            found = spot.top_by("label", 5, layer=layer, score=score, order=order, per="slot")
            assert list(found) == sorted(set(label))
            for name, hits in found.items():
                other = torch.from_numpy(label[slots.visit] != name)
                mine = {each: scores.masked_fill(other, torch.nan) for each, scores in matrix.items()}
                assert hits.slots.shape == (3, min(5, int((~mine["weight"][0].isnan()).sum())))
                assert_hits_are(hits, score, order, mine, slots, visits)


def test_every_place_can_be_a_group(run):
    x, memory = queries(run), run.memory
    spot = memory.attend(run.model, x)
    for layer in memory.layers:
        matrix, slots = full_matrix(run, memory, layer, x, memory.step, None)
        index = np.array(memory.store.visits["index"].to_pylist())[slots.visit]
        for score in ("abs", "weight"):
            found = spot.by("index", layer=layer, score=score, places=True)
            assert len(found.names) == len(set(index)) * (1 + slots.position.max())
            for i, (name, position) in enumerate(found.names):
                mine = torch.from_numpy((index == name) & (slots.position == position))
                close(found.values[:, i], matrix[score][:, mine].sum(1))
    with pytest.raises(QueryError, match="for weights α"):
        spot.by("index", layer=memory.layers[0], places=True)


def test_sizes_are_the_norms_of_the_visits_parts_of_the_weights(run):
    for memory, *_ in views(run.memory):
        ledger = memory.ledger("visit")
        for layer in memory.layers:
            info, _ = memory.store.layer(layer)
            sizes = memory.sizes(layer)
            assert sizes.shape == (len(memory.store.visits),)
            norms = torch.stack([ledger[visit][info.weights[0]].norm() for visit in range(len(sizes))])
            assert bool((norms <= sizes * (1 + 1e-9) + 1e-12).all())
            if memory.store.slots(info.name) == len(sizes):  # one slot a visit
                close(sizes, norms)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 6, 3, groups=2), lambda: nn.LSTM(5, 4)])
def test_sizes_are_the_norms_over_all_parts_and_pieces_of_a_map(make, tmp_path):
    torch.manual_seed(0)
    layer = make().double()
    shape = (1, 4, 3, 3) if isinstance(layer, nn.Conv2d) else (1, 1, 5)  # one slot a visit
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(layer, optimizer, tmp_path / "memory", dtype="float64", progress=False):
        for _ in range(5):
            out = layer(torch.randn(shape, dtype=torch.float64))
            (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "memory")
    name, ledger = memory.layers[0], memory.ledger("visit")
    weights = memory.store.layer(name)[0].weights
    for visit, size in enumerate(memory.sizes(name).tolist()):
        parts = [ledger[visit][weight].square().sum() for weight in weights]
        assert size == pytest.approx(float(sum(parts)) ** 0.5)


@pytest.mark.parametrize("column", [None, "label", "index"])
def test_timelines_are_those_of_the_full_matrix(run, column):
    x = queries(run)
    visits = run.memory.store.visits
    of_visit = np.full(len(visits), "all") if column is None else np.array(visits[column].to_pylist())
    for memory, horizon, visible in views(run.memory):
        spot = memory.attend(run.model, x)
        layer = memory.layers[0]
        matrix, slots = full_matrix(run, memory, layer, x, horizon, visible)
        for score, stretches in zip(SCORES, (1, 4, 50), strict=True):
            timeline = spot.timeline(column, layer=layer, score=score, stretches=stretches)
            edges = timeline.edges.tolist()
            assert edges[0] == 0 and edges[-1] == horizon and edges == sorted(set(edges))
            assert len(edges) - 1 == min(stretches, horizon)
            assert list(timeline.names) == sorted(set(of_visit))
            for s, (after, upto) in enumerate(itertools.pairwise(edges)):
                inside = torch.from_numpy((slots.step > after) & (slots.step <= upto))
                part = matrix[score].masked_fill(~inside, torch.nan)
                assert_groups_are(timeline.names, timeline.values[:, :, s], of_visit[slots.visit], part)


def assert_groups_are(names, values, of_slot, scores) -> None:
    for i, name in enumerate(names):
        close(values[:, i], scores[:, torch.from_numpy(of_slot == name)].nansum(1))


@given(setup=setups(), k=st.integers(1, 9), data=st.data())
def test_answers_are_those_of_the_full_matrix_for_any_network(setup, k, data, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    x = setup.queries()
    horizon = data.draw(st.integers(1, len(setup.sizes)))
    layer = data.draw(st.sampled_from(run.memory.layers))
    memory = run.memory.at(horizon)
    spot = memory.attend(run.model, x)
    matrix, slots = full_matrix(run, memory, layer, x, horizon, None)
    score, order = data.draw(st.sampled_from(SCORES)), data.draw(st.sampled_from(ORDERS))
    answer = spot.ask(layer, per="slot", top=k, by=("label", "step"), timeline=3, score=score, order=order)
    assert_hits_are(answer.hits, score, order, matrix, slots, memory.store.visits)
    labels = np.array(memory.store.visits["label"].to_pylist())[slots.visit]
    for i, name in enumerate(answer.groups["label"].names):
        close(answer.groups["label"].values[:, i], matrix[score][:, torch.from_numpy(labels == name)].nansum(1))
    close(answer.groups["step"].values[:, :horizon].sum(1), matrix[score].nansum(1))
    close(answer.timeline.values.sum((1, 2)), matrix[score].nansum(1))


def test_one_pass_gives_the_same_answers_as_many(run):
    spot = run.memory.attend(run.model, queries(run))
    layer = run.memory.layers[0]
    answer = spot.ask(layer, per="slot", top=4, by=("label", "source"), timeline=3, timeline_by="label")
    assert answer.hits is not None and answer.timeline is not None
    assert torch.equal(answer.hits.slots, spot.top(4, layer=layer, per="slot").slots)
    close(answer.groups["source"].values, spot.by("source", layer=layer).values)  # alone they need no scan
    assert torch.equal(answer.timeline.values, spot.timeline("label", layer=layer, stretches=3).values)


def test_batched_queries_are_answered_as_one_by_one(run):
    x = queries(run, 4)
    spot = run.memory.attend(run.model, x)
    for layer in run.memory.layers:
        for i in range(4):
            alone = run.memory.attend(run.model, x[i : i + 1])
            close(
                spot.top(24, layer=layer, per="slot")[i].contribution,
                alone.top(24, layer=layer, per="slot").contribution,
            )
            close(spot.by("label", layer=layer).values[i : i + 1], alone.by("label", layer=layer).values)
            close(spot.timeline(layer=layer).values[i : i + 1], alone.timeline(layer=layer).values)


# ---------------------------------------------------------------- several rows an example


@pytest.fixture(scope="module")
def sequence(tmp_path_factory) -> Run:
    model = tokens()
    return trained(tmp_path_factory.mktemp("sequence"), model, sgd(model), batches(5, 4, 5, 3, middle=[3]))


@pytest.mark.parametrize("position", [0, 1, 2, -1, -3])
def test_one_position_of_a_sequence_can_be_asked(sequence, position):
    x, memory = queries(sequence), sequence.memory
    spot = memory.attend(sequence.model, x)
    matrix, slots = full_matrix(sequence, memory, "each", x, memory.step, None, position=position)
    for score in SCORES:
        hits = spot.top(5, layer="each", score=score, position=position, per="slot")
        assert_hits_are(hits, score, "largest", matrix, slots, memory.store.visits)
    groups = spot.by("label", layer="each", position=position)
    assert_whole(groups)
    close(groups.values.sum(1), matrix["contribution"].sum(1))
    close(spot.timeline(layer="each", position=position).values.sum((1, 2)), matrix["contribution"].sum(1))


def test_the_positions_of_a_sequence_sum_to_the_whole(sequence):
    spot = sequence.memory.attend(sequence.model, queries(sequence))
    for score in SCORES:
        whole_sum = spot.by("label", layer="each", score=score).values
        parts = [spot.by("label", layer="each", score=score, position=p).values for p in range(3)]
        close(torch.stack(parts).sum(0), whole_sum)


@pytest.mark.parametrize("position", [3, -4])
def test_a_position_outside_the_sequence_is_refused(sequence, position):
    with pytest.raises(QueryError, match=f"position {position} is not among the 3 rows"):
        sequence.memory.attend(sequence.model, queries(sequence)).top(1, layer="each", position=position, per="slot")


def test_the_calls_of_a_layer_are_rows_of_an_example(tmp_path):
    model = whole()
    run = trained(tmp_path, model, sgd(model), batches(3, 4, 5, 3))
    x = queries(run)
    spot = run.memory.attend(model, x)
    parts = [spot.by("label", layer="twice", position=p) for p in (0, 1)]
    close(parts[0].values + parts[1].values, spot.by("label", layer="twice").values)
    for part in parts:
        assert_whole(part)


def test_time_first_queries_have_one_line_an_example(tmp_path):
    model = tokens(time_first=True)
    optimizer = sgd(model)
    random = torch.Generator().manual_seed(0)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False, batch_dim={"each": 1}) as tape:
        for _ in range(3):
            tape.note(label=torch.arange(3))
            model(torch.randn(4, 3, 5, generator=random, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x = torch.randn(4, 2, 5, generator=random, dtype=torch.float64)  # four tokens of two examples
    spot = dualform.open(tmp_path).attend(model, x)
    close(spot.output("out"), model(x))
    assert spot.by("label", layer="out").values.shape == (2, 3)
    assert spot.by("label", layer="each").values.shape == (2, 3)


def test_unknown_visits_of_a_shared_bias_are_a_group_of_their_own(tmp_path):
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(5, 3), torch.nn.Linear(4, 3)
            self.b.bias = self.a.bias

        def forward(self, x, tokens):
            return self.a(x) + self.b(tokens).mean(0)

    torch.manual_seed(0)
    model = Shared().double()
    optimizer = sgd(model)
    x, words = torch.randn(2, 5, dtype=torch.float64), torch.randn(7, 2, 4, dtype=torch.float64)
    with pytest.warns(DualformWarning, match="'b'"), dualform.record(
        model, optimizer, tmp_path, dtype="float64", progress=False, batch_dim={"b": 0}
    ) as tape:  # fmt: skip
        for _ in range(3):
            tape.note(label=torch.arange(2))
            model(x, words).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    groups = memory.attend(model, (x, words), target=0).by("label", layer="a")
    assert_whole(groups)
    assert groups.names == (0, 1, None) and groups.bias is not None
    ledger = memory.ledger("label")
    close(groups.bias[0], torch.stack([ledger[name]["a.bias"][0] for name in groups.names]))


# ---------------------------------------------------------------- lower precision


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_answers_of_a_smaller_memory_are_those_of_its_own_full_matrix(dtype, tmp_path):
    """The naive reader sees the same rounded slots; sums are computed in float32."""
    model = mlp(5, 6, 3)
    run = trained(tmp_path, model, sgd(model), batches(6, 5, 5, 3), dtype=dtype)
    x = queries(run)
    spot = run.memory.attend(model, x)
    for layer in ("0", "2"):
        matrix, slots = full_matrix_of_model(run, layer, x)
        for score in SCORES:
            hits = spot.top(6, layer=layer, score=score, per="slot")
            close(matrix[score].gather(1, hits.slots), matrix[score].topk(6, dim=1).values, 1e-5)
            close(hits.weight, matrix["weight"].gather(1, hits.slots), 1e-5)
            close(hits.contribution, matrix["contribution"].gather(1, hits.slots), 1e-5)
            labels = torch.tensor(run.memory.visits["label"].to_pylist())[torch.from_numpy(slots.visit)]
            groups = spot.by("label", layer=layer, score=score)
            for i, name in enumerate(groups.names):
                close(groups.values[:, i], matrix[score][:, labels == name].sum(1), 1e-5)
        assert_whole(spot.by("label", layer=layer), {"float32": 1e-5, "float16": 1e-2}[dtype])
        close(spot.output(layer), watched(model, x)[layer][1][0], {"float32": 1e-5, "float16": 1e-2}[dtype])


def full_matrix_of_model(run: Run, layer: str, x: torch.Tensor):
    naive = Naive(run.path)
    inputs, _, directions = watched(run.model, x)[layer]
    scores = naive_scores(
        naive, layer, f"{layer}.weight", rows_of(inputs, len(x)), rows_of(directions, len(x)), run.memory.step
    )
    return scores, naive.slots(layer)
