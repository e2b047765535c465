"""Where hits speak: the parts of all positions are those of weights that each position has for itself."""

import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.engine import StoreView, split_by_group
from dualform.errors import QueryError
from dualform.explain import HitPlaces
from dualform.models import MLP, LSTMLanguageModel, TextClassifier, TransformerLM
from dualform.store import Block

N, BATCH, EPOCHS, LENGTH, WORDS = 12, 4, 2, 5, 7


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class LastWord(nn.Module):
    """The logits of a language model at the last position."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        return (output[0] if isinstance(output, tuple) else output)[:, -1]


class Cells(nn.Module):
    """A recurrent cell that is called once for each token, and an output layer after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step, self.head = nn.Embedding(WORDS, 4), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 4)
        for word in self.embed(x).unbind(1):
            state = self.step(torch.cat([word, state], 1)).tanh()
        return self.head(state)


class Tied(nn.Module):
    """A word model whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.embed(x)).tanh().cumsum(1))[:, -1]


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).tanh())


class MeanOver(nn.Module):
    """The mean of a network's outputs for all positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(1)


def words() -> Tensor:
    return torch.randint(0, WORDS, (N, LENGTH))


def convolutional() -> nn.Module:
    head = nn.Sequential(nn.Flatten(), nn.Linear(6 * LENGTH, 3))
    return nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, groups=2), nn.Tanh(), *head)


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor] = words
    classes: int = 3
    length: int = LENGTH
    """Positions of an example."""


KINDS = {
    "LSTM": Kind(lambda: LastWord(LSTMLanguageModel(WORDS, 4, embedding=3)), classes=WORDS),
    "transformer": Kind(
        lambda: LastWord(TransformerLM(WORDS, LENGTH, width=4, heads=2, layers=1, hidden=6)), classes=WORDS
    ),
    "classifier": Kind(lambda: TextClassifier(WORDS, LENGTH, 3, width=4, layers=1, hidden=6, dropout=0.0)),
    "MLP": Kind(lambda: MLP(4, 6, 3), lambda: torch.randn(N, 4), length=1),
    "cells": Kind(Cells),
    "tied": Kind(Tied, classes=WORDS),
    "twice": Kind(Twice, lambda: torch.randn(N, 4), length=1),
    "convolution": Kind(convolutional, lambda: torch.randn(N, 4, LENGTH)),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
}
SHOWN = ["LSTM", "transformer", "classifier", "MLP", "cells"]
"""Networks of which the naive version knows the rows."""


def trained(path, kind: str, optimizer: str, **options: Any) -> tuple[dualform.Memory, nn.Module, Tensor]:
    torch.manual_seed(3)
    made = KINDS[kind]
    model, x = made.make(), made.inputs()
    y = torch.randint(0, made.classes, (N,))
    stepper = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, stepper, path, **{"dtype": "float64", "progress": False, **options}) as tape:
        for _ in range(EPOCHS):
            for index in torch.randperm(N).split(BATCH):
                tape.note(index=index, label=y[index], source=["even" if i % 2 == 0 else "odd" for i in index.tolist()])
                F.cross_entropy(model(x[index]), y[index]).backward()
                stepper.step()
                stepper.zero_grad()
    return dualform.open(path), model.eval(), x


def assert_whole(places: HitPlaces) -> None:
    """The parts of each hit sum to its contribution, on both sides."""
    contribution = places.hits.contribution[0]
    for by_position, elsewhere in (
        (places.query, places.query_elsewhere),
        (places.training, places.training_elsewhere),
    ):
        torch.testing.assert_close(by_position.sum(1) + elsewhere, contribution, rtol=1e-9, atol=1e-11)


# ------------------------------------------------------------------------------------------------ the naive version


def with_rows_of_their_own(model: nn.Module, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same network with a copy of every weight for each position, and one more for what is elsewhere."""
    model = deepcopy(model)
    copies = {
        name: p.detach().expand(length + 1, *p.shape).clone().requires_grad_() for name, p in model.named_parameters()
    }
    for name, module in model.named_modules():
        own = {short: copies[f"{name}.{short}"] for short, _ in module.named_parameters(recurse=False)}
        if isinstance(module, nn.Linear):
            vars(module)["forward"] = linear_by_row(own["weight"], own.get("bias"), length)
        if isinstance(module, nn.Embedding):
            vars(module)["forward"] = lambda x, weight=own["weight"]: weight[torch.arange(x.shape[1]), x]
        if isinstance(module, nn.LSTM):
            vars(module)["forward"] = lstm_by_row(own, module.hidden_size)
    return model, copies


def linear_by_row(weight: Tensor, bias: Tensor | None, length: int) -> Callable[[Tensor], Tensor]:
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        if x.ndim == 3:
            return torch.einsum("btd,tod->bto", x, weight[:-1]) + (0.0 if bias is None else bias[:-1])
        row = 0 if length == 1 else len(calls) - 1 if weight.shape[1:] == (4, 8) else -1  # the layer of Cells
        return x @ weight[row].mT + (0.0 if bias is None else bias[row])

    return forward


def lstm_by_row(own: dict[str, Tensor], hidden: int) -> Callable[..., Any]:
    def forward(x: Tensor, state: Any = None) -> Any:
        h, c, outputs = x.new_zeros(len(x), hidden), x.new_zeros(len(x), hidden), []
        for t, row in enumerate(x.unbind(1)):
            gates = row @ own["weight_ih_l0"][t].mT + h @ own["weight_hh_l0"][t].mT
            i, f, g, o = (gates + own["bias_ih_l0"][t] + own["bias_hh_l0"][t]).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1), (h, c)

    return forward


def gradients_by_row(model: nn.Module, x: Tensor, length: int) -> dict[str, Tensor]:
    """The gradient of the logit of the predicted class with respect to the copies of each weight."""
    by_row, copies = with_rows_of_their_own(model, length)
    output = by_row(x)
    torch.testing.assert_close(output, model(x))
    found = torch.autograd.grad(output.max(), list(copies.values()), allow_unused=True)
    return {name: g for name, g in zip(copies, found, strict=True) if g is not None}


def parts_by_position(memory: dualform.Memory, view: StoreView, length: int) -> dict[str, Tensor]:
    """What each example put into each weight, by the position of its rows: (example, position or elsewhere, …)."""
    store = memory.store
    index = np.append(store.visits["index"].to_numpy(), -1)

    def group_of(block: Block) -> np.ndarray:
        calls, call = block.calls, block.call
        position = calls.positions_of(block.slots)
        position = np.where(calls.rows[call] == length * calls.batch[call], position, length)
        if block.layer.name == "step":  # the layer of Cells
            position = calls.call[call]
        return index[block.visits] * (length + 1) + position

    names = [p.name for p in store.manifest.parameters if p.by_slots]
    split = split_by_group(store, view, names, group_of=group_of, groups=N * (length + 1))
    return {name: part.groups.unflatten(0, (N, length + 1)) for name, part in split.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", SHOWN)
def test_places_are_those_of_weights_that_each_position_has_for_itself(kind, optimizer, tmp_path):
    memory, model, x = trained(tmp_path / "run", kind, optimizer)
    length = KINDS[kind].length
    parts = parts_by_position(memory, memory.view, length)
    for query in range(2):
        spot = memory.attend(model, x[query : query + 1])
        hits = spot.top(N, progress=False)
        places = spot.places(hits, progress=False)
        assert places.query.shape == places.training.shape == (N, length)
        gradients = {
            name: g for name, g in gradients_by_row(model, x[query : query + 1], length).items() if name in parts
        }
        examples = [hit.index for hit in hits]
        of_query = torch.stack([parts[name].sum(1).flatten(1) @ g.flatten(1).mT for name, g in gradients.items()])
        of_training = torch.stack([parts[name].flatten(2) @ g.sum(0).flatten() for name, g in gradients.items()])
        for by_position, elsewhere, expected in (
            (places.query, places.query_elsewhere, of_query.sum(0)[examples]),
            (places.training, places.training_elsewhere, of_training.sum(0)[examples]),
        ):
            torch.testing.assert_close(by_position, expected[:, :-1], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(elsewhere, expected[:, -1], rtol=1e-9, atol=1e-11)
        assert bool(places.query_elsewhere.any()) is (kind in ("classifier", "cells"))
        assert_whole(places)


# ------------------------------------------------------------------------------------------------------ whole hits


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_hits_of_every_kind_sum_to_their_contributions(kind, optimizer, tmp_path):
    memory, model, x = trained(tmp_path / "run", kind, optimizer)
    spot = memory.attend(model, x[:1])
    questions: list[dict[str, Any]] = [{}, {"per": "visit"}, {"after": 2}, {"after": 2, "per": "visit"}]
    for layer in (memory.layers[0], memory.layers[-1]):
        questions += [{"layer": layer, "per": per} for per in ("example", "visit", "slot")]
        questions += [{"layer": layer, "per": per, "position": -1} for per in ("example", "slot")]
    for options in questions:
        hits = spot.top(5, order="magnitude", progress=False, **options)
        places = spot.places(hits, progress=False)
        assert places.layer == hits.layer and len(places) == 5
        assert_whole(places)
        if "position" in options:
            assert not places.query[:, :-1].any()
    for hits in spot.top_by("source", 3, progress=False).values():
        assert_whole(spot.places(hits, progress=False))
    hits = spot.top(3, target=1, progress=False)
    assert_whole(spot.places(hits, target=1, progress=False))


def test_under_a_rule_that_mixes_the_rows_of_a_weight_parts_sum_to_contributions(tmp_path):
    muon = getattr(optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    model, x, y = MeanOver(layers), torch.randn(N, LENGTH, 4), torch.randint(0, 3, (N,))
    stepper = muon(model.parameters(), lr=0.05)
    with dualform.record(model, stepper, tmp_path / "run", dtype="float64", progress=False) as tape:
        for index in torch.arange(N).split(BATCH) * 2:
            tape.note(index=index)
            F.cross_entropy(model(x[index]), y[index]).backward()
            stepper.step()
            stepper.zero_grad()
    spot = dualform.open(tmp_path / "run").attend(model.eval(), x[:1])
    hits = spot.top(N, progress=False)
    assert_whole(spot.places(hits, progress=False))
    assert (hits.contribution != 0).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_float16_parts_sum_to_contributions_up_to_rounding(optimizer, tmp_path):
    torch.set_default_dtype(torch.float32)
    memory, model, x = trained(tmp_path / "run", "transformer", optimizer, dtype="float16")
    spot = memory.attend(model, x[:1])
    places = spot.places(spot.top(5, progress=False), progress=False)
    torch.testing.assert_close(places.contribution, places.hits.contribution[0].double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_slot_has_one_position(optimizer, tmp_path):
    memory, model, x = trained(tmp_path / "run", "transformer", optimizer)
    spot = memory.attend(model, x[:1])
    hits = spot.top(20, layer="inner.head", per="slot", progress=False)
    places = spot.places(hits, progress=False)
    expected = torch.zeros_like(places.training).scatter(1, hits.positions.mT, hits.contribution.mT)
    torch.testing.assert_close(places.training, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_places_are_those_of_the_view(optimizer, tmp_path):
    memory, model, x = trained(tmp_path / "run", "LSTM", optimizer)
    whole = memory.attend(model, x[:1])
    for view in (memory.without("label = 1"), memory.at(4), memory.at(5).only("source = 'odd'")):
        spot = view.attend(model, x[:1])
        hits = spot.top(4, progress=False)
        assert_whole(spot.places(hits, progress=False))
        with pytest.raises(QueryError, match="not what this spotlight recalls"):
            whole.places(hits, progress=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_examples_have_the_lengths_of_their_own_batches(optimizer, tmp_path):
    torch.manual_seed(0)
    model = LastWord(LSTMLanguageModel(WORDS, 4))
    stepper = OPTIMIZERS[optimizer](model.parameters())
    lengths = (3, 8, 1, 5)
    with dualform.record(model, stepper, tmp_path / "run", dtype="float64", progress=False) as tape:
        for step in range(8):
            length = lengths[step % 4]
            tape.note(index=torch.arange(3) + 3 * (step % 4))
            F.cross_entropy(model(torch.randint(0, WORDS, (3, length))), torch.randint(0, WORDS, (3,))).backward()
            stepper.step()
            stepper.zero_grad()
    spot = dualform.open(tmp_path / "run").attend(model, torch.randint(0, WORDS, (1, 6)))
    hits = spot.top(12, progress=False)
    places = spot.places(hits, progress=False)
    assert places.query.shape == (12, 6) and places.training.shape == (12, 8)
    assert_whole(places)
    for hit in hits:
        present = places.training[hit.rank].bool()
        assert present[: lengths[hit.index // 3]].any() and not present[lengths[hit.index // 3] :].any()


def test_slots_that_are_made_by_training_again_have_the_same_places(tmp_path):
    torch.manual_seed(0)
    x, y = words(), torch.randint(0, 3, (N,))
    model = KINDS["classifier"].make()
    initial = deepcopy(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64", replay="1 MB", progress=False) as tape:
        for index in torch.arange(N).split(BATCH) * 3:
            tape.note(index=index)
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    spot = memory.attend(model.eval(), x[:1])
    expected = spot.places(spot.top(4, progress=False), progress=False)
    with memory.replay(initial, *dualform.tasks.classification(x, y)) as run:
        run.slots(dtype="float64", progress=False)
        again = run.attend(x[:1])
        places = again.places(again.top(4, progress=False), progress=False)
    torch.testing.assert_close(places.query, expected.query, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(places.training, expected.training, rtol=1e-9, atol=1e-12)


# ----------------------------------------------------------------------------------------------- what cannot be asked


def test_what_cannot_be_split_says_so(tmp_path):
    memory, model, x = trained(tmp_path / "run", "MLP", "SGD")
    one, several = memory.attend(model, x[:1]), memory.attend(model, x[:3])
    hits = several.top(2, progress=False)
    for spot, of_queries in ((one, hits), (several, hits), (several, hits[0])):
        with pytest.raises(QueryError, match="places are about one query, not 3"):
            spot.places(of_queries, progress=False)
    assert_whole(one.places(hits[0], progress=False))
    with pytest.raises(QueryError, match="not what this spotlight recalls"):
        one.places(hits[1], progress=False)
    with pytest.raises(QueryError, match="Pass the target that they were asked with"):
        one.places(one.top(2, target=2, progress=False), progress=False)
    with pytest.raises(QueryError, match="score='abs'"):
        one.places(one.top(2, layer="fc1", per="slot", score="abs", progress=False), progress=False)


def test_shards_without_a_visible_visit_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("dualform.record.shards.shard_builder"), "SHARD_BYTES", 2000)
    memory, model, x = trained(tmp_path / "run", "LSTM", "SGD")
    store, layer = memory.store, memory.layers[-1]
    assert len(store.manifest.shards) > 2
    visible = np.zeros(len(store.visits), bool)
    visible[[BATCH + 1, -1]] = True
    every = list(store.blocks(layer, errors=True))
    shown = {tuple(block.slots.tolist()) for block in every if visible[block.visits].any()}
    assert {tuple(block.slots.tolist()) for block in store.blocks(layer, errors=True, visible=visible)} == shown
    assert 0 < len(shown) < len(every)
    done: list[int] = []
    spot = memory.attend(model, x[:1])
    places = spot.places(spot.top(1, progress=False), progress=lambda task, slots, total: done.append(slots))
    assert done == sorted(done)
    assert_whole(places)
