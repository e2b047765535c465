"""Every slot knows its example: the visits have the noted columns, and slots the right visit and position."""

import numpy as np
import pytest
import torch
from helpers import Naive, assert_clean, assert_rebuilt, batches, close, mlp, seeds, sgd, tokens, whole
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.errors import DualformError, DualformWarning, NoteError


def recorded(path, model, loop, **options):
    """Record ``loop(tape, step)``, where ``step(loss)`` goes backward and steps."""
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, **{"dtype": "float64", "progress": False, **options}) as tape:

        def step(loss):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        loop(tape, step)
    return dualform.open(path)


def assert_keys_are_those_of_their_examples(memory, layer: str, inputs: torch.Tensor) -> None:
    """``inputs`` (example, position, d): what was noted as ``index`` names the example of each slot."""
    slots = Naive(memory.path).slots(layer)
    index = np.array(memory.store.visits["index"].to_pylist())
    assert len(slots.visit) and (slots.visit >= 0).all()
    assert torch.equal(slots.keys, inputs[index[slots.visit], slots.position])
    calls, ids = memory.store.calls(layer), np.arange(len(slots.visit))
    assert np.array_equal(calls.visits_of(ids), slots.visit)
    assert np.array_equal(calls.positions_of(ids), slots.position)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), shuffled=st.booleans(), seed=seeds)
def test_the_key_of_a_slot_is_the_input_of_its_example(sizes, shuffled, seed, tmp_path_factory):
    model = mlp(4, 3, 2, seed=seed)
    inputs = torch.randn(sum(sizes), 4, dtype=torch.float64)
    order = torch.randperm(len(inputs)) if shuffled else torch.arange(len(inputs))

    def loop(tape, step):
        for index in order.split(sizes):
            tape.note(index=index)
            step(model(inputs[index]).square().mean())

    memory = recorded(tmp_path_factory.mktemp("memory"), model, loop)
    assert_keys_are_those_of_their_examples(memory, "0", inputs.unsqueeze(1))
    assert memory.visits["index"].to_pylist() == order.tolist()
    assert memory.visits["step"].to_pylist() == [s for s, size in enumerate(sizes, 1) for _ in range(size)]
    assert memory.visits["row"].to_pylist() == [row for size in sizes for row in range(size)]
    assert memory.visits["visit"].to_pylist() == list(range(len(inputs)))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    middle=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    dim=st.integers(0, 2),
    seed=seeds,
)
def test_the_key_of_a_slot_is_the_token_at_its_position(sizes, middle, dim, seed, tmp_path_factory):
    """Batch first, time first, or in the middle: ``batch_dim`` says which axis counts the examples."""
    dim = min(dim, len(middle))
    model = mlp(4, 3, seed=seed)
    inputs = torch.randn(sum(sizes), *middle, 4, dtype=torch.float64)

    def loop(tape, step):
        for index in torch.arange(len(inputs)).split(sizes):
            tape.note(index=index)
            step(model(inputs[index].movedim(0, dim)).square().mean())

    memory = recorded(tmp_path_factory.mktemp("memory"), model, loop, batch_dim=dim)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert_keys_are_those_of_their_examples(memory, "0", inputs.flatten(1, -2))


def test_layers_may_count_examples_along_different_axes(tmp_path):
    model = tokens(time_first=True)  # "each" sees (n, b, d), "out" sees (b, d)
    inputs = torch.randn(6, 4, 5, dtype=torch.float64)

    def loop(tape, step):
        for index in torch.arange(6).split([3, 2, 1]):
            tape.note(index=index)
            step(model(inputs[index].movedim(0, 1)).square().mean())

    memory = recorded(tmp_path, model, loop, batch_dim={"each": 1})
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert_keys_are_those_of_their_examples(memory, "each", inputs)
    assert (memory.store.calls("out").visit >= 0).all()


def test_an_axis_that_is_not_the_first_is_found(tmp_path):
    model = tokens(time_first=True)
    inputs = torch.randn(6, 4, 5, dtype=torch.float64)

    def loop(tape, step):
        for index in torch.arange(6).split(3):
            tape.note(index=index)
            step(model(inputs[index].movedim(0, 1)).square().mean())

    memory = recorded(tmp_path, model, loop)
    assert_clean(memory)
    assert_keys_are_those_of_their_examples(memory, "each", inputs)


class Sorted(nn.Module):
    """Tokens (b n d) in the order of their values: whose row is whose changes from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort()
        return self.out(self.each(rows[order])[order.argsort()].unflatten(0, x.shape[:2]).relu().mean(1))


def test_slots_whose_example_is_not_known_have_unknown_visits_and_it_says_so(tmp_path):
    model = Sorted().double()

    def loop(tape, step):
        for _ in range(2):
            tape.note(index=torch.arange(3))
            step(model(torch.randn(3, 4, 5, dtype=torch.float64)).square().mean())

    with pytest.warns(DualformWarning, match="'each' .*selected or ordered.*batch_dim"):
        memory = recorded(tmp_path, model, loop)
    assert_rebuilt(memory, model)
    (mark,) = memory.certificate.marks
    assert (mark.kind, mark.name, mark.times) == ("unknown-visits", "each", 2)
    assert (memory.store.calls("each").visit < 0).all()
    assert (memory.store.calls("out").visit >= 0).all()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    hits = memory.attend(model, x).top(2, layer="each", score="weight", per="slot")
    assert hits.columns["index"].null_count == hits.slots.numel()
    groups = memory.attend(model, x).by("index", layer="each")
    assert groups.names == (0, 1, 2, None)
    assert not groups.values[:, :3].any() and groups.values[:, 3].any()
    ledger = memory.ledger("index")
    assert set(ledger) == {0, 1, 2, None}
    close(ledger.total("each.weight"), model.each.weight)


def test_negative_batch_dims_count_from_the_end_or_are_refused(tmp_path):
    model = mlp(4, 3)
    inputs = torch.randn(5, 2, 4, dtype=torch.float64)

    def loop(tape, step):
        tape.note(index=torch.arange(5))
        step(model(inputs.movedim(0, 1)).square().mean())

    try:
        memory = recorded(tmp_path, model, loop, batch_dim=-1)
    except DualformError:
        return
    assert_keys_are_those_of_their_examples(memory, "0", inputs)


def test_all_calls_and_layers_of_a_batch_share_its_visits(tmp_path):
    model = whole()
    data = batches(3, 4, 5, 3)

    def loop(tape, step):
        for i, (x, y) in enumerate(data):
            tape.note(index=torch.arange(4) + 4 * i, label=y)
            step(F.cross_entropy(model(x), y))

    memory = recorded(tmp_path, model, loop)
    assert_keys_are_those_of_their_examples(memory, "inp", torch.cat([x for x, _ in data]).unsqueeze(1))
    naive = Naive(tmp_path)
    for layer, calls in (("inp", 1), ("twice", 2), ("left", 2), ("out", 1)):
        visits = naive.slots(layer).visit.reshape(3, calls, 4)
        assert (visits == np.arange(12).reshape(3, 1, 4)).all()
    assert {call["module"] for call in naive.calls if call["layer"] == "left"} == {"left", "right"}
    assert [call["call"] for call in naive.calls if call["layer"] == "twice" and call["step"] == 2] in ([0, 1], [1, 0])


COLUMNS = {
    "an int": (3, [3, 3, 3]),
    "a float": (0.5, [0.5, 0.5, 0.5]),
    "a bool": (True, [True] * 3),
    "a string": ("web", ["web"] * 3),
    "a numpy number": (np.int32(4), [4, 4, 4]),
    "a tensor of no axes": (torch.tensor(1.5), [1.5] * 3),
    "a list of ints": ([3, 1, 2], [3, 1, 2]),
    "a tuple of floats": ((0.1, 0.2, 0.3), [0.1, 0.2, 0.3]),
    "strings": (["a", "bcd", ""], ["a", "bcd", ""]),
    "strings of every script": (["ü", "漢字", "🙂"], ["ü", "漢字", "🙂"]),
    "a numpy array": (np.array([1, 2, 3], np.uint8), [1, 2, 3]),
    "an int tensor": (torch.tensor([3, 2, 1], dtype=torch.int32), [3, 2, 1]),
    "a float tensor": (torch.tensor([0.5, 2.0, 1.0]), [0.5, 2.0, 1.0]),
    "a bfloat16 tensor": (torch.tensor([0.5, 2.0, 1.0], dtype=torch.bfloat16), [0.5, 2.0, 1.0]),
    "a bool tensor": (torch.tensor([True, False, True]), [True, False, True]),
    "a tensor with a gradient": (torch.tensor([0.5, 2.0, 1.0], requires_grad=True), [0.5, 2.0, 1.0]),
    "large ints": ([2**40, -(2**40), 0], [2**40, -(2**40), 0]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_what_is_noted_is_what_the_visits_hold(kind, tmp_path):
    value, expected = COLUMNS[kind]
    model = mlp(4, 3, 2)

    def loop(tape, step):
        for _ in range(2):
            tape.note(column=value)
            step(model(torch.randn(3, 4, dtype=torch.float64)).square().mean())

    memory = recorded(tmp_path, model, loop)
    assert memory.visits.column_names == ["visit", "step", "row", "column"]
    assert memory.visits["column"].to_pylist() == expected * 2
    spot = memory.attend(model, torch.randn(2, 4, dtype=torch.float64))
    assert set(spot.by("column", layer="0").names) == set(expected)


def test_notes_of_one_batch_are_merged(tmp_path):
    model = mlp(4, 3, 2)

    def loop(tape, step):
        for i in range(3):
            tape.note(index=torch.arange(2) + 2 * i)
            tape.note(label=["x", "y"])
            loss = model(torch.randn(2, 4, dtype=torch.float64)).square().mean()
            tape.note(source="late")  # after the forward pass
            step(loss)

    visits = recorded(tmp_path, model, loop).visits
    assert visits["index"].to_pylist() == list(range(6))
    assert visits["label"].to_pylist() == ["x", "y"] * 3
    assert visits["source"].to_pylist() == ["late"] * 6


def test_a_note_may_come_after_the_forward_pass(tmp_path):
    model = mlp(4, 3, 2)
    inputs = torch.randn(6, 4, dtype=torch.float64)

    def loop(tape, step):
        for index in torch.tensor([5, 0, 3, 1, 4, 2]).split(2):
            loss = model(inputs[index]).square().mean()
            tape.note(index=index)
            step(loss)

    memory = recorded(tmp_path, model, loop)
    assert_keys_are_those_of_their_examples(memory, "0", inputs.unsqueeze(1))


def test_without_notes_there_are_visits_all_the_same(tmp_path):
    model = mlp(4, 3, 2)

    def loop(tape, step):
        for size in (3, 1, 2):
            step(model(torch.randn(size, 4, dtype=torch.float64)).square().mean())

    memory = recorded(tmp_path, model, loop)
    assert memory.visits["step"].to_pylist() == [1, 1, 1, 2, 3, 3]
    assert memory.visits["row"].to_pylist() == [0, 1, 2, 0, 0, 1]


def test_every_batch_of_an_accumulated_step_has_its_own_visits(tmp_path):
    model = mlp(4, 3, 2)
    optimizer = sgd(model)
    inputs = torch.randn(12, 4, dtype=torch.float64)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for i, index in enumerate(torch.randperm(12).split(2)):
            tape.note(index=index)
            model(inputs[index]).square().mean().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert_keys_are_those_of_their_examples(memory, "0", inputs.unsqueeze(1))
    assert memory.visits["step"].to_pylist() == [1] * 6 + [2] * 6


def test_an_evaluation_does_not_take_the_note_of_the_batch(tmp_path):
    model = mlp(4, 3, 2)
    inputs = torch.randn(6, 4, dtype=torch.float64)

    def loop(tape, step):
        for index in torch.arange(6).split(2):
            tape.note(index=index)
            model(torch.randn(5, 4, dtype=torch.float64))  # gradients are on, but nobody goes backward
            step(model(inputs[index]).square().mean())
            model(torch.randn(5, 4, dtype=torch.float64))
            with torch.no_grad():
                model(torch.randn(7, 4, dtype=torch.float64))

    memory = recorded(tmp_path, model, loop)
    assert_clean(memory)
    assert_keys_are_those_of_their_examples(memory, "0", inputs.unsqueeze(1))


def test_buffers_that_are_used_again_do_not_change_what_was_noted(tmp_path):
    model = mlp(4, 3, 2)
    label, array, names = torch.zeros(2, dtype=torch.int64), np.zeros(2), ["", ""]

    def loop(tape, step):
        for i in range(3):
            label[:], array[:], names[:] = torch.tensor([i, 10 + i]), [i / 2, i], [f"a{i}", f"b{i}"]
            tape.note(label=label, array=array, names=names)
            label.fill_(-1)
            array.fill(-1)
            names[:] = ["?", "?"]
            step(model(torch.randn(2, 4, dtype=torch.float64)).square().mean())

    visits = recorded(tmp_path, model, loop).visits
    assert visits["label"].to_pylist() == [0, 10, 1, 11, 2, 12]
    assert visits["array"].to_pylist() == [0, 0, 0.5, 1, 1, 2]
    assert visits["names"].to_pylist() == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ([{"label": [1, 2, 3]}], None),
        ([{"label": [1, 2]}], "'label'|unknown|examples"),
        ([{"label": [1, 2, 3], "index": [1, 2]}], "'index' has 2 values"),
        ([{"step": 3}], "'step'"),
        ([{"label": 1}, {"label": "one"}], "'label' holds string"),
        ([{"label": 1}, {"label": 1, "other": 2}], "other"),
        ([{"label": 1, "other": 2}, {"label": 1}], "other"),
        ([{"label": [[1], [2], [3]]}], "'label'"),
        ([{"label": None}], "'label'"),
    ],
    ids=str,
)
def test_notes_that_do_not_fit_are_refused_with_their_column(notes, words, tmp_path):
    model = mlp(4, 3, 2)

    def loop(tape, step):
        for columns in notes:
            tape.note(**columns)
            step(model(torch.randn(3, 4, dtype=torch.float64)).square().mean())

    if words is None:
        recorded(tmp_path, model, loop)
        return
    with pytest.raises((NoteError, DualformWarning), match=words):
        recorded(tmp_path, model, loop)


def test_visits_stand_in_the_order_of_training_across_shards(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2)).double()
    inputs = torch.randn(20, 4, dtype=torch.float64)

    def loop(tape, step):
        for index in torch.arange(20).split(2):
            tape.note(index=index)
            step(model(inputs[index]).square().mean())
            if int(index[0]) % 4 == 0:
                tape.flush()

    memory = recorded(tmp_path, model, loop)
    assert len(memory.store.manifest.shards) >= 5
    assert_keys_are_those_of_their_examples(memory, "0", inputs.unsqueeze(1))
    assert memory.visits["index"].to_pylist() == list(range(20))
    assert_rebuilt(memory, model)
