"""Examples over the whole network: the parts of all weights and biases, against the ledger of every example."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, QueryError

N, BATCH, EPOCHS = 24, 6, 3


class Tied(nn.Module):
    """A word model whose output layer shares the weight of its embedding, with a normalisation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)
        self.norm = nn.LayerNorm(6)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.middle(self.embed(x)).tanh().mean(1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Twice(nn.Module):
    """A layer that is used twice, with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.drop = nn.Linear(4, 4), nn.Linear(4, 3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.drop(self.inner(x).tanh())).tanh())


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(30, 8, bias=False), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    classes: int = 3


KINDS = {
    "mlp": Kind(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: torch.randn(N, 6)),
    "tied": Kind(Tied, lambda: torch.randint(0, 11, (N, 5)), 11),
    "lstm": Kind(Recurrent, lambda: torch.randn(N, 7, 4)),
    "twice": Kind(Twice, lambda: torch.randn(N, 4)),
    "convolution": Kind(convolutional, lambda: torch.randn(N, 4, 5)),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "Adam, coupled decay": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.001, momentum=0.5),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
}


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(path, kind: str, optimizer: str, **options: Any) -> tuple[dualform.Memory, nn.Module, Tensor]:
    torch.manual_seed(3)
    made = KINDS[kind]
    model, x = made.make(), made.inputs()
    y = torch.randint(0, made.classes, (N,))
    stepper = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, stepper, path, dtype="float64", progress=False, **options) as tape:
        for _ in range(EPOCHS):
            for index in torch.randperm(N).split(BATCH):
                tape.note(index=index, label=y[index], source=["even" if i % 2 == 0 else "odd" for i in index.tolist()])
                F.cross_entropy(model(x[index]), y[index]).backward()
                stepper.step()
                stepper.zero_grad()
    return dualform.open(path), model.eval(), x


def of_examples(memory: dualform.Memory, model: nn.Module, x: Tensor) -> list[dict[int, float]]:
    """⟨∂φ/∂θ, what each example put into θ⟩ over all explained parameters, for the logit of the predicted class."""
    ledger = memory.ledger("index", progress=False)
    answers = []
    for one in x:
        output = model(one[None])[0]
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(output[output.argmax()], parameters, allow_unused=True)
        gradients = {name: g for name, g in zip(names, found, strict=True) if g is not None}
        answers.append(
            {i: sum(float((gradients[name] * part).sum()) for name, part in parts.items() if name in gradients)
             for i, parts in ledger.items()}
        )  # fmt: skip
    return answers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_of_the_whole_network_are_those_of_the_ledger(kind, optimizer, tmp_path):
    memory, model, x = trained(tmp_path / "run", kind, optimizer)
    spot = memory.attend(model, x[:3])
    hits = spot.top(N, progress=False)
    expected = of_examples(memory, model, x[:3])
    for query, parts in enumerate(expected):
        found = {hit.index: hit.contribution for hit in hits[query]}
        assert found == pytest.approx(parts, rel=1e-9, abs=1e-10)
        assert [hit.index for hit in hits[query]] == sorted(parts, key=lambda index: -parts[index])
    assert all(hit.visits == EPOCHS and 1 <= hit.first_step < hit.last_step <= memory.step for hit in hits)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adam, coupled decay"])
@pytest.mark.parametrize("kind", KINDS)
def test_examples_groups_and_times_are_sums_over_visits_and_have_the_same_total(kind, optimizer, tmp_path):
    memory, model, x = trained(tmp_path / "run", kind, optimizer)
    spot = memory.attend(model, x[:3])
    visits, examples = spot.top(N * EPOCHS, per="visit", progress=False), spot.top(N, progress=False)
    for query in range(3):
        sums: dict[int, float] = {}
        for hit in visits[query]:
            sums[hit.index] = sums.get(hit.index, 0.0) + hit.contribution
        assert {hit.index: hit.contribution for hit in examples[query]} == pytest.approx(sums, rel=1e-9, abs=1e-11)
    whole = visits.contribution.sum(1)
    groups, line = spot.by("label", progress=False), spot.timeline("source", stretches=3, progress=False)
    torch.testing.assert_close(groups.values.sum(1), whole)
    torch.testing.assert_close(line.values.sum((1, 2)), whole)
    assert groups.residual is not None and groups.total is not None
    assert groups.residual.abs().max() < 1e-9 * groups.total.abs().max()
    named = spot.top_by("source", 2, progress=False)
    assert set(named) == {"even", "odd"} and all(hit.source == name for name, hits in named.items() for hit in hits)
    best = max((hit for hits in named.values() for hit in hits[0]), key=lambda hit: hit.contribution)
    assert best.index == next(iter(examples)).index


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_query_is_the_first_of_many(kind, optimizer, tmp_path):
    """Under AdamW one query is answered by a sweep, and the groups of several by the parts of the weights."""
    memory, model, x = trained(tmp_path / "run", kind, optimizer)
    one, many = memory.attend(model, x[:1]), memory.attend(model, x[:4])
    torch.testing.assert_close(one.by("label", progress=False).values[0], many.by("label", progress=False).values[0])
    first, others = one.top(5, progress=False), many.top(5, progress=False)
    assert [hit.index for hit in first] == [hit.index for hit in others[0]]
    torch.testing.assert_close(first.contribution, others[0].contribution)
    residual = one.by("label", progress=False).residual
    assert residual is not None and residual.abs().max() < 1e-9


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_after_a_step_earlier_visits_are_masked(optimizer, tmp_path):
    memory, model, x = trained(tmp_path / "run", "mlp", optimizer)
    spot = memory.attend(model, x[:2])
    asked: list[dict[str, Any]] = [{"per": "visit"}, {"per": "visit", "layer": "2"}, {"per": "slot", "layer": "0"}]
    for options in asked:
        everything = spot.top(1000, progress=False, **options)
        later = spot.top(1000, after=7, progress=False, **options)
        expected = [(hit.query, hit.columns["visit"], hit.contribution) for hit in everything if hit.step > 7]
        found = [(hit.query, hit.columns["visit"], hit.contribution) for hit in later]
        assert [line[:2] for line in found] == [line[:2] for line in expected]
        assert [line[2] for line in found] == pytest.approx([line[2] for line in expected])
    groups, examples = spot.by("label", after=7, progress=False), spot.top(N, after=7, progress=False)
    torch.testing.assert_close(groups.values.sum(1), examples.contribution.sum(1))
    assert all(hit.first_step > 7 for hit in examples)
    for layer in (None, "2"):  # what is left out is a part of the total, so none is given
        assert spot.by("label", layer=layer, after=7, progress=False).residual is None
    with pytest.raises(QueryError, match="after=12 leaves no step"):
        spot.top(1, after=12)


@pytest.mark.parametrize("kind", KINDS)
def test_in_one_layer_examples_are_the_sums_of_its_slots_and_of_its_bias(kind, tmp_path):
    memory, model, x = trained(tmp_path / "run", kind, "SGD")
    spot = memory.attend(model, x[:2])
    for layer in memory.layers:
        groups, hits = (
            spot.by("index", layer=layer, progress=False),
            spot.top(N, layer=layer, per="example", progress=False),
        )
        assert groups.bias is not None
        parts = groups.values + groups.bias
        for query in range(2):
            expected = dict(zip(groups.names, parts[query].tolist(), strict=True))
            found = {hit.index: hit.contribution for hit in hits[query]}
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)


def test_weights_of_examples_are_those_of_their_slots(tmp_path):
    memory, model, x = trained(tmp_path / "run", "lstm", "AdamW")
    spot, layer = memory.attend(model, x[:2]), memory.layers[0]
    for score in ("weight", "abs"):
        groups = spot.by("index", layer=layer, score=score, progress=False)
        hits = spot.top(N, layer=layer, per="example", score=score, order="magnitude", progress=False)
        for query in range(2):
            expected = dict(zip(groups.names, groups.values[query].tolist(), strict=True))
            assert {hit.index: hit.weight for hit in hits[query]} == pytest.approx(expected)
        assert hits.contribution.isnan().all()


def test_layers_without_slots_are_named(tmp_path):
    memory, model, x = trained(tmp_path / "run", "mlp", "SGD", keep={"0": "keys", "2": "slots"})
    hits = memory.attend(model, x[:1]).top(2, progress=False)
    assert hits.left_out == ("0",) and "Left out, as no slots of them were kept: 0" in str(hits)
    nothing, model, x = trained(tmp_path / "keys", "mlp", "SGD", keep="keys")
    with pytest.raises(QueryError, match="no layer of the memory"):
        nothing.attend(model, x[:1]).top(2, progress=False)


def test_without_an_index_visits_are_the_examples(tmp_path):
    torch.manual_seed(0)
    model = KINDS["mlp"].make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", progress=False) as tape:
        tape.note(label=torch.zeros(4, dtype=torch.int64))
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    hits = dualform.open(tmp_path / "run").attend(model, torch.randn(2, 6)).top(3, progress=False)
    assert hits.per == "visit" and len(list(hits)) == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"score": "abs"}, "name a layer"),
        ({"per": "slot"}, "name it"),
        ({"position": 0}, "name it"),
        ({"per": "token"}, "per='token' is not known"),
        ({"after": -1}, "after=-1"),
    ],
)
def test_what_needs_a_layer_says_so(options, says, tmp_path):
    memory, model, x = trained(tmp_path / "run", "mlp", "SGD")
    with pytest.raises(QueryError, match=re.escape(says)):
        memory.attend(model, x[:1]).top(1, progress=False, **options)


def test_those_who_name_a_layer_alone_are_told_what_has_changed(tmp_path):
    memory, model, x = trained(tmp_path / "run", "mlp", "SGD")
    with pytest.warns(DualformWarning, match="in version 0.1 it gave slots"):
        memory.attend(model, x[:1]).top(1, layer="2", progress=False)


@pytest.mark.parametrize(("optimizer", "early"), [("AdamW", True), ("SGD", False)])
def test_answers_say_how_much_the_first_steps_under_adam_make_up(optimizer, early, tmp_path):
    torch.manual_seed(0)
    model, x = KINDS["mlp"].make(), torch.randn(N, 6)
    y = (x[:, 0] > 0).long()
    stepper = optim.AdamW(model.parameters(), lr=0.02) if early else optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, stepper, tmp_path / "run", progress=False) as tape:
        for step in range(80):
            index = torch.arange(4) + 4 * (step % 6)
            tape.note(index=index)
            F.cross_entropy(model(x[index]) / (1 if step < 5 else 50), y[index]).backward()
            stepper.step()
            stepper.zero_grad()
    spot = dualform.open(tmp_path / "run").attend(model, x[:2])
    remark = spot.top(3, progress=False).remark
    assert ("first 5 of 80 steps" in remark) is early
    assert not spot.top(3, after=5, progress=False).remark
    slots = spot.top(10, layer="2", per="slot", progress=False)
    assert ("of these slots are from the first 5 of 80 steps" in slots.remark) is (
        early and float((slots.steps <= 5).double().mean()) >= 3 * 5 / 80
    )


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_queries_in_chunks_answer_as_all_together(optimizer, tmp_path, monkeypatch):
    memory, model, x = trained(tmp_path / "run", "lstm", optimizer)
    questions: dict[str, Any] = {"top": 5, "by": ["label", "source"], "timeline": 4, "progress": False}
    together = memory.attend(model, x[:5]).ask(**questions)
    monkeypatch.setattr("dualform.explain.ask.whole_network.SUMS_BYTES", 2 * 8 * N)
    parts = memory.attend(model, x[:5]).ask(**questions)
    assert together.hits is not None and parts.hits is not None and together.timeline and parts.timeline
    assert [hit.index for hit in parts.hits] == [hit.index for hit in together.hits]
    torch.testing.assert_close(parts.hits.contribution, together.hits.contribution)
    torch.testing.assert_close(parts.timeline.values, together.timeline.values)
    for column in ("label", "source"):
        torch.testing.assert_close(parts.groups[column].values, together.groups[column].values)
        torch.testing.assert_close(parts.groups[column].initial, together.groups[column].initial)


@pytest.mark.parametrize("keep", ["ledger", "keys+ledger", {"0": "slots", "2": "ledger"}])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_ledgers_answer_by_their_column_as_slots_do(keep, optimizer, tmp_path):
    kept, model, x = trained(tmp_path / "slots", "mlp", optimizer)
    expected = kept.attend(model, x[:2]).by("source", progress=False)
    memory, model, x = trained(tmp_path / "ledger", "mlp", optimizer, keep=keep, by="source")
    spot = memory.attend(model, x[:2])
    groups = spot.by("source", progress=False)
    assert not groups.left_out and groups.residual is not None and groups.residual.abs().max() < 1e-9
    torch.testing.assert_close(groups.values[:, : len(expected.names)], expected.values)
    if isinstance(keep, str):
        with pytest.raises(QueryError, match=r"The ledgers answer by\('source'\)"):
            spot.top(1, progress=False)
    else:
        assert spot.top(1, progress=False).left_out == ("2",)
