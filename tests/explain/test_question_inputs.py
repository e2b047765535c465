"""Inputs, outputs and names as users have them: each works, or one sentence says what to do."""

import copy
import pickle

import pytest
import torch
from helpers import batches, close, mlp, sgd, trained
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import LayerNotFound, ModelMismatch, QueryError, StoreError, UnsupportedLayer
from dualform.rules import Rule
from dualform.types import Transition


@pytest.fixture
def run(tmp_path):
    model = mlp(5, 4, 3)
    return trained(tmp_path, model, sgd(model), batches(4, 3, 5, 3))


# ---------------------------------------------------------------- outputs that are tuples


class Giving(nn.Module):
    """A network, and what it gives beside its logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inp, self.out, self.kind = nn.Linear(5, 4), nn.Linear(4, 3), kind

    def forward(self, x: Tensor):
        hidden = self.inp(x).tanh()
        logits = self.out(hidden)
        return {
            "bare": lambda: logits,
            "hidden first": lambda: (hidden, logits),
            "loss first": lambda: (logits.sum(), logits),
            "with a state": lambda: (logits, (hidden, hidden)),
            "with a class": lambda: [logits, logits.argmax(1)],
            "by name": lambda: {"hidden": hidden, "logits": logits},
        }[self.kind]()


def giving(kind: str, path) -> tuple[Giving, dualform.Memory, Tensor]:
    torch.manual_seed(0)
    model = Giving("bare").double()
    run = trained(path, model, sgd(model), batches(3, 4, 5, 3))
    model.kind = kind
    return model, run.memory, run.inputs[:2]


@pytest.mark.parametrize("kind", ["loss first", "with a state", "with a class", "by name"])
def test_logits_are_found_where_nothing_else_can_be_them(kind, tmp_path):
    model, memory, x = giving(kind, tmp_path)
    expected = copy.copy(model)
    expected.kind = "bare"
    close(memory.attend(model, x).by("label", layer="out").total, expected(x).max(1).values)


def test_of_several_tensors_that_could_be_the_logits_none_is_guessed(tmp_path):
    model, memory, x = giving("hidden first", tmp_path)
    with pytest.raises(QueryError, match=r"output\[0\] \(2, 4\), output\[1\] \(2, 3\).*lambda output: output\[1\]"):
        memory.attend(model, x).by("label", layer="out")
    groups = memory.attend(model, x, target=lambda output: output[1][:, 2]).by("label", layer="out")
    close(groups.total, model(x)[1][:, 2])


# ---------------------------------------------------------------- a batch that is a mapping


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"]) * batch["scale"].unsqueeze(1)


class OfNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale.unsqueeze(1)


@pytest.mark.parametrize("kind", [OfBatch, OfNames])
def test_a_mapping_is_the_batch_itself_where_its_names_are_no_arguments(kind, tmp_path):
    torch.manual_seed(0)
    model = kind().double()
    optimizer = sgd(model)
    batch = {"x": torch.randn(4, 5, dtype=torch.float64), "scale": torch.ones(4, dtype=torch.float64)}
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        tape.note(label=torch.arange(4))
        output = model(batch) if kind is OfBatch else model(**batch)
        output.square().sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path)
    expected = model(batch) if kind is OfBatch else model(**batch)
    inputs = [batch, (batch,)] if kind is OfBatch else [batch, tuple(batch.values())]
    for given in inputs:
        close(memory.attend(model, given).by("label", layer="layer").total, expected.max(1).values)
        close(memory.predict(model, given), expected)
    if kind is OfNames:
        with pytest.raises(QueryError, match=r"hold \['scale', 'y'\], but OfNames.forward takes \(x.*scale"):
            memory.predict(model, {"y": batch["x"], "scale": batch["scale"]})


# ---------------------------------------------------------------- an axis that was forgotten


def test_an_example_without_its_batch_axis_is_named(run):
    x = run.inputs[0]
    with pytest.raises(QueryError, match=r"inputs \(5,\) have no axis of examples.*x\[None\]"):
        run.memory.attend(run.model, x).top(1, layer="2", per="slot")
    assert run.memory.attend(run.model, x[None]).top(1, layer="2", per="slot").contribution.shape == (1, 1)


def test_as_many_numbers_as_classes_are_no_examples(tmp_path):
    model = mlp(3, 3, 3)
    run = trained(tmp_path, model, sgd(model), batches(3, 4, 3, 3))
    with pytest.raises(QueryError, match=r"x\[None\]"):
        run.memory.attend(model, run.inputs[0]).by("label", layer="2")


class Words(nn.Module):
    """Gives logits at each place, whether tokens have a batch axis or not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0])


def test_a_sequence_without_its_batch_axis_is_named(tmp_path):
    torch.manual_seed(0)
    model = Words().double()
    optimizer = sgd(model)
    x = torch.randint(7, (3, 6))
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        tape.note(label=torch.arange(3))
        F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
    memory = dualform.open(tmp_path)
    with pytest.raises(QueryError, match=r"got 6 tokens, \(6,\), and was trained on sequences.*x\[None\]"):
        memory.attend(model, x[0]).top(1, layer="out", per="slot")
    close(memory.attend(model, x[:1]).by("label", layer="out").total, model(x)[:1, -1].max(1).values)


# ---------------------------------------------------------------- an axis that nobody named


class Elsewhere(nn.Module):
    """Takes examples along any axis of its input, and says nothing about which."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.first, self.out = axis, nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).tanh().movedim(self.axis, 0).flatten(1, -2).mean(1))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(6, 6, 6), (5, 6, 7)])
def test_examples_are_told_apart_along_the_axis_that_training_showed(axis, sizes, tmp_path):
    """Also where all axes are of one length: each example is answered as by itself."""
    torch.manual_seed(0)
    model = Elsewhere(axis).double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for _ in range(3):
            x, label = torch.randn(*sizes, 4, dtype=torch.float64), torch.randint(3, (sizes[axis],))
            tape.note(label=label)
            F.cross_entropy(model(x), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory, x = dualform.open(tmp_path), torch.randn(*sizes, 4, dtype=torch.float64)
    assert not memory.certificate.marks
    alone = [memory.attend(model, one).by("label", layer="first").values for one in x.split(1, axis)]
    close(memory.attend(model, x).by("label", layer="first").values, torch.cat(alone))


# ---------------------------------------------------------------- experts without rows


class Experts(nn.Module):
    """Each row goes to one expert, by the sign of its first number."""

    def __init__(self, expert) -> None:
        super().__init__()
        self.experts, self.out = nn.ModuleList([expert(), expert()]), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        made, second = torch.zeros_like(x), x[:, 0] > 0
        for expert, rows in zip(self.experts, (~second, second), strict=True):
            made[rows] = expert(x[rows])
        return self.out(made)


class Sequence(nn.Module):
    """A layer that takes sequences, here of one row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.recurrent = kind == "lstm"
        self.layer = (
            nn.LSTM(5, 5, batch_first=True) if self.recurrent else nn.MultiheadAttention(5, 1, batch_first=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return (self.layer(x) if self.recurrent else self.layer(x, x, x))[0][:, 0]


@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")  # whose rows an expert got is not known
@pytest.mark.parametrize("kind", ["linear", "lstm", "attention"])
def test_an_expert_without_rows_has_an_empty_output(kind, tmp_path):
    torch.manual_seed(0)
    model = Experts(lambda: nn.Linear(5, 5) if kind == "linear" else Sequence(kind)).double()
    run = trained(tmp_path, model, sgd(model), batches(3, 6, 5, 3))
    layer = {"linear": "experts.1", "lstm": "experts.1.layer", "attention": "experts.1.layer.in_proj"}[kind]
    x = run.inputs[run.inputs[:, 0] < 0][:3]
    spot = run.memory.attend(model, x)
    assert spot.output(layer).numel() == 0
    close(spot.by("label", layer="out").total, model(x).max(1).values)
    with pytest.raises(QueryError, match="got no row of these inputs"):
        spot.top(1, layer=layer, per="slot")


# ---------------------------------------------------------------- names of layers


def test_a_number_names_a_layer_of_a_sequential(run):
    spot, matrix = run.memory.attend(run.model, run.inputs[:2]), torch.ones(3, 4, dtype=torch.float64)
    for number, name in ((0, "0"), (2, "2")):
        assert torch.equal(
            spot.top(2, layer=number, per="slot").contribution, spot.top(2, layer=name, per="slot").contribution
        )
        assert torch.equal(spot.by("label", layer=number).values, spot.by("label", layer=name).values)
        assert torch.equal(spot.timeline(layer=number).values, spot.timeline(layer=name).values)
        assert torch.equal(spot.output(number), spot.output(name))
        assert torch.equal(run.memory.sizes(number), run.memory.sizes(name))
        assert (
            spot.top_by("label", 1, layer=number, per="slot").keys()
            == spot.top_by("label", 1, layer=name, per="slot").keys()
        )
    assert run.memory.along(2, matrix).total == run.memory.along("2", matrix).total
    run.memory.along(2, matrix).by("label", layer=2)
    with pytest.raises(LayerNotFound, match=r"no layer '1'.*\['0', '2'\]"):
        spot.top(1, layer=1, per="slot")


# ---------------------------------------------------------------- copies of a memory


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


@pytest.mark.parametrize("how", COPIES)
def test_a_memory_can_be_copied_with_its_step_and_its_mask(how, run):
    x = run.inputs[:2]
    for memory in (run.memory, run.memory.at(2).without("label = 1")):
        twin = COPIES[how](memory)
        assert (twin.step, twin.path.absolute()) == (memory.step, memory.path.absolute())
        assert twin.visits.equals(memory.visits)
        close(twin.predict(run.model, x), memory.predict(run.model, x))
        assert memory.attend(run.model, x).by("label", layer="2").names


@pytest.mark.parametrize("how", COPIES)
def test_a_spotlight_can_be_copied(how, run):
    spot = run.memory.attend(run.model, run.inputs[:2], target=1)
    expected = spot.by("label", layer="0").values
    close(COPIES[how](spot).by("label", layer="0").values, expected)
    along = run.memory.along("2", torch.ones(3, 4, dtype=torch.float64))
    close(COPIES[how](along).by("label", layer="2").values, along.by("label", layer="2").values)


def test_a_taught_rule_that_cannot_be_pickled_is_named(run):
    rule = Rule("Mine", lambda s: Transition(wg=-s["lr"]))
    memory = dualform.open(run.path, rules=[rule])
    with pytest.raises(StoreError, match=r"rule 'Mine'.*top of a module.*rules="):
        pickle.dumps(memory)
    assert copy.deepcopy(memory).store is memory.store


def test_a_lazy_layer_without_weights_is_named(run):
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 3)).double()
    with pytest.raises(ModelMismatch, match=r"'0\.weight'.*Run one batch"):
        run.memory.attend(model, run.inputs[:2])


# ---------------------------------------------------------------- functional calls


def test_a_functional_call_inside_the_with_says_what_to_do(tmp_path):
    model = mlp(5, 4, 3)
    x = torch.randn(2, 5, dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(UnsupportedLayer, match=r"torch\.func\.functional_call.*deepcopy"),
        dualform.record(model, optimizer, tmp_path, progress=False),
    ):
        torch.func.functional_call(model, weights, x).sum().backward()
