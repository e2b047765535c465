"""Notes and forward passes may come in any order: a note belongs to its batch until the batch's backward pass."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from helpers import Naive, assert_clean, assert_rebuilt, mlp, seeds, sgd
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import DualformWarning, NoteError

ORDERS = {
    "before": ("index label", ""),
    "before, in two": ("index|label", ""),
    "after": ("", "index label"),
    "after, in two": ("", "index|label"),
    "half before, half after": ("index", "label"),
}


def note(tape, which: str, index: Tensor) -> None:
    columns = {"index": index, "label": index % 2}
    for names in filter(None, which.split("|")):
        tape.note(**{name: columns[name] for name in names.split()})


def train(
    path, order: str, batches: Sequence[Tensor], inputs: Tensor, *, accumulate: int = 1, forwards: int = 1,
    together: bool = False, call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> tuple[dualform.Memory, nn.Module]:  # fmt: skip
    """Several batches a step, several forward passes a batch; a backward pass each, or one for all."""
    model = mlp(4, 3, 2)
    optimizer = sgd(model)
    before, after = ORDERS[order]
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        losses = []
        for i, index in enumerate(batches, start=1):
            note(tape, before, index)
            loss = torch.stack([call(model, inputs[index]).square().mean() for _ in range(forwards)]).sum()
            with torch.no_grad():
                model(inputs)  # an evaluation takes no note
            note(tape, after, index)
            if together:
                losses.append(loss)
            else:
                loss.backward()
            if i % accumulate == 0:
                if together:
                    torch.stack(losses).sum().backward()
                    losses = []
                optimizer.step()
                optimizer.zero_grad()
    return dualform.open(path), model


def assert_noted(memory: dualform.Memory, batches: Sequence[Tensor], inputs: Tensor, forwards: int = 1) -> None:
    order = memory.visits["index"].to_pylist()  # of batches with one backward pass the last one comes first
    assert sorted(order) == sorted(torch.cat(list(batches)).tolist())
    assert memory.visits["label"].to_pylist() == [index % 2 for index in order]
    slots, index = Naive(memory.path).slots("0"), np.array(order)
    assert len(slots.visit) == forwards * len(order) and (slots.visit >= 0).all()
    assert torch.equal(slots.keys, inputs[index[slots.visit]])


@given(
    order=st.sampled_from(list(ORDERS)),
    accumulate=st.integers(1, 3),
    steps=st.integers(1, 3),
    size=st.integers(1, 3),
    forwards=st.integers(1, 2),
    together=st.booleans(),
    seed=seeds,
)
def test_the_order_of_note_and_forward_does_not_matter(
    order, accumulate, steps, size, forwards, together, seed, tmp_path_factory
):  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(12, 4, generator=random, dtype=torch.float64)
    batches = [torch.randperm(12, generator=random)[:size] for _ in range(accumulate * steps)]
    memory, model = train(
        tmp_path_factory.mktemp("memory"), order, batches, inputs,
        accumulate=accumulate, forwards=forwards, together=together,
    )  # fmt: skip
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert_noted(memory, batches, inputs, forwards)


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpointed", "checkpointed, reentrant"])
@pytest.mark.parametrize("order", ORDERS)
def test_activation_checkpointing_takes_no_note(order, reentrant, tmp_path):
    inputs = torch.randn(12, 4, dtype=torch.float64)
    batches = torch.randperm(12).split(2)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)

    memory, _ = train(tmp_path, order, batches, inputs, accumulate=3, call=call)
    assert_clean(memory)
    assert_noted(memory, batches, inputs)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_ledger_sees_notes_of_either_order(order, tmp_path):
    model = mlp(4, 3, 2)
    optimizer = sgd(model, momentum=0.0, weight_decay=0.0, lr=1.0)
    parts = {}
    with dualform.record(model, optimizer, tmp_path, keep="ledger", by="source", progress=False) as tape:
        for source in ("a", "b"):
            if order == "before":
                tape.note(source=[source] * 2)
            loss = model(torch.randn(2, 4, dtype=torch.float64)).square().sum()
            if order == "after":
                tape.note(source=[source] * 2)
            (parts[source],) = torch.autograd.grad(loss, [model.get_parameter("0.weight")], retain_graph=True)
            loss.backward()
        optimizer.step()
    ledger = dualform.open(tmp_path).ledger("source")
    for source, gradient in parts.items():
        torch.testing.assert_close(ledger[source]["0.weight"].double(), -gradient)


# ---------------------------------------------------------------- notes that would be lost


def backward(tape, model) -> None:
    model(torch.randn(2, 4, dtype=torch.float64)).square().mean().backward()


def noted_twice(tape, model, optimizer):
    tape.note(index=[0, 1])
    tape.note(index=[2, 3])


def noted_after_each_backward_pass(tape, model, optimizer):
    for i in range(2):
        backward(tape, model)
        tape.note(index=[2 * i, 2 * i + 1])
    optimizer.step()


def noted_after_each_step(tape, model, optimizer):
    for i in range(2):
        backward(tape, model)
        optimizer.step()
        tape.note(index=[2 * i, 2 * i + 1])


def half_of_it_after_the_backward_pass(tape, model, optimizer):
    tape.note(index=[0, 1])
    backward(tape, model)
    tape.note(label=[0, 1])


def noted_before_the_end(tape, model, optimizer):
    tape.note(index=[0, 1])
    backward(tape, model)
    optimizer.step()
    tape.note(index=[2, 3])


def two_forward_passes_between_late_notes(tape, model, optimizer):
    x = torch.randn(2, 4, dtype=torch.float64)
    loss = model(x).sum()
    tape.note(index=[0, 1])
    loss = loss + model(x).sum() + model(x).sum()  # which of them is the next batch?
    tape.note(index=[2, 3])


LOST = [
    noted_twice,
    noted_after_each_backward_pass,
    noted_after_each_step,
    half_of_it_after_the_backward_pass,
    noted_before_the_end,
    two_forward_passes_between_late_notes,
]


@pytest.mark.parametrize("loop", LOST, ids=lambda loop: loop.__name__)
def test_a_note_that_would_be_lost_is_an_error_that_says_when_to_call_it(loop, tmp_path):
    model = mlp(4, 3, 2)
    optimizer = sgd(model)
    with pytest.raises(NoteError, match=r"before (the|its) (forward|backward) pass"):  # noqa: SIM117
        with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
            loop(tape, model, optimizer)


def test_an_error_about_the_last_note_leaves_the_memory_whole(tmp_path):
    model = mlp(4, 3, 2)
    optimizer = sgd(model)
    with pytest.raises(NoteError), dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        noted_before_the_end(tape, model, optimizer)
    memory = dualform.open(tmp_path)
    assert memory.visits["index"].to_pylist() == [0, 1]
    assert_rebuilt(memory, model)


def test_a_batch_that_is_skipped_after_its_forward_pass_takes_its_note_along(tmp_path):
    """As where a loss is not finite: the loop goes on with the next batch."""
    model = mlp(4, 3, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for i in range(4):
            tape.note(index=[2 * i, 2 * i + 1])
            loss = model(torch.randn(2, 4, dtype=torch.float64)).square().mean()
            if i == 1:
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path).visits["index"].to_pylist() == [0, 1, 4, 5, 6, 7]


# ---------------------------------------------------------------- forward passes that leave no trace


class Blocks(nn.Module):
    """Every recorded layer runs without gradients, and again inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(4, 3), mlp(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=True).tanh(), use_reentrant=True)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("evaluate", [False, True])
def test_batches_without_notes_are_distinguished_where_only_the_backward_pass_shows_them(blocks, evaluate, tmp_path):
    """Two batches a step under reentrant checkpointing: each example is a visit of its own."""
    model = Blocks() if blocks else mlp(4, 3, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", batch_dim=0, progress=False):
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
                out = model(x) if blocks else checkpoint(model, x, use_reentrant=True)
                if evaluate:
                    with torch.no_grad():
                        (model.first if isinstance(model, Blocks) else model)(x)
                out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    for layer in memory.store.manifest.layers:
        assert memory.store.calls(layer.name).visit.tolist() == [0, 5, 10, 15, 20, 25]


def test_rows_that_only_the_backward_pass_shows_are_marked_with_what_to_do(tmp_path):
    model = Blocks()
    optimizer = sgd(model)
    with (
        pytest.warns(DualformWarning, match="only inside the backward pass.*use_reentrant=False"),
        dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False),
    ):
        model(torch.randn(5, 4, dtype=torch.float64, requires_grad=True)).square().sum().backward()
        optimizer.step()
