"""Suspects: the laws of their parts, how well they find wrong labels, and what they say about what they cannot do."""

import importlib

import pytest
import torch
from helpers import batches, close, mlp, sgd, tokens, whole
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.data import small_digits
from dualform.errors import ModelMismatch, QueryError, UnknownColumn
from dualform.evaluate import mislabelled
from dualform.models import MLP

SUSPECTS = "dualform.explain.suspects"
ridge, voice, own_sums, influence, rows = (
    importlib.import_module(f"{SUSPECTS}.{name}")
    for name in ("leave_one_out_labels", "training_labels", "own_contributions", "self_influence", "training_set")
)

OPTIMISERS = {
    "SGD": sgd,
    "Adam": lambda model: optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda model: optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True),
}


class Words(nn.Module):
    """The mean of embeddings, and a layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.embed(x).mean(1))


class Pixels(nn.Module):
    """Two convolutions, one of them in groups, and a layer."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 4, 2, groups=2), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.two(self.one(x).relu()).relu().mean((2, 3)))


def visited(path, model, optimizer, x, y, epochs=3, size=4, loss=F.cross_entropy, seen=None, **options):
    """Train with the same examples again and again; ``seen`` collects (index, logits) of every batch."""
    random = torch.Generator().manual_seed(3)
    with dualform.record(model, optimizer, path, **{"dtype": "float64", "progress": False, **options}) as tape:
        for _ in range(epochs):
            for index in torch.randperm(len(x), generator=random).split(size):
                tape.note(index=index, label=y[index])
                logits = model(x[index])
                if seen is not None:
                    seen.append((index, logits.detach()))
                loss(logits, y[index]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return dualform.open(path)


def some_examples(n=14, width=5, seed=0):
    (x, y), *_ = batches(1, n, width, 3, seed=seed)
    y[:3] = torch.arange(3)
    return x, y


def network(kind):
    """A network, and examples for it."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    y = torch.randint(3, (14,), generator=random)
    if kind == "words":
        return Words().double(), torch.randint(11, (14, 6), generator=random), y
    if kind == "pixels":
        return Pixels().double(), torch.randn(14, 1, 4, 4, generator=random, dtype=torch.float64), y
    if kind == "tokens":
        return tokens(), torch.randn(14, 3, 5, generator=random, dtype=torch.float64), y
    model = whole(dropout=0.0) if kind == "whole" else mlp(5, 6, 3)
    return model, torch.randn(14, 5, generator=random, dtype=torch.float64), y


# ---------------------------------------------------------------- self-influence


@pytest.mark.parametrize("kind", ["mlp", "whole", "tokens", "words", "pixels"])
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("target", ["margin", "loss"])
def test_self_influence_is_the_diagonal_of_the_sums_by_example(kind, name, target, tmp_path):
    model, x, y = network(kind)
    memory = visited(tmp_path, model, OPTIMISERS[name](model), x, y)
    model.eval()
    spot = memory.attend(model, x, target=target, labels=y)
    total = torch.zeros(len(x), dtype=torch.float64)
    for layer in memory.layers:
        sums = spot.by("index", layer=layer, progress=False)
        diagonal = torch.stack([sums.values[i, sums.names.index(i)] for i in range(len(x))])
        total += diagonal
        if kind == "pixels" and layer == "two" and name != "SGD":
            with pytest.raises(QueryError, match="grouped convolution"):
                memory.self_influence(model, x, y, layer=layer, target=target, progress=False)
            return
        answer = memory.self_influence(model, x, y, layer=layer, target=target, progress=False)
        assert answer.layers == (layer,) and diagonal.abs().max() > 0
        close(answer.values, diagonal, 1e-9)
    close(memory.self_influence(model, x, y, target=target, progress=False).values, total, 1e-9)


def test_self_influence_follows_steps_and_masks(tmp_path):
    model, x, y = network("mlp")
    memory = visited(tmp_path, model, sgd(model), x, y)
    masked = memory.at(7).without("index = 2")
    sums = masked.attend(model, x, target="margin", labels=y).by("index", layer="2", progress=False)
    answer = masked.self_influence(model, x, y, layer="2", progress=False)
    diagonal = torch.stack([sums.values[i, sums.names.index(i)] for i in range(len(x))])
    close(answer.values, diagonal, 1e-9)
    assert answer.values[2] == 0 and answer.visits[2] == 0


def test_self_influence_in_several_passes_is_the_same(tmp_path, monkeypatch):
    model, x, y = network("tokens")
    memory = visited(tmp_path, model, sgd(model), x, y)
    before = memory.self_influence(model, x, y, progress=False).values
    for module, name, value in ((influence, "HELD", 30), (rows, "BATCH", 4), (own_sums, "ENTRIES", 40)):
        monkeypatch.setattr(module, name, value)
    close(memory.self_influence(model, x, y, progress=False).values, before, 1e-12)


# ---------------------------------------------------------------- the voices


@pytest.mark.parametrize("width", [4, 30])
def test_leaving_one_out_is_really_leaving_one_out(width, monkeypatch):
    """The regression is solved again without each example, its penalty held."""
    monkeypatch.setattr(ridge, "PENALTIES", (0.3,))
    monkeypatch.setattr(ridge, "SHARPNESS", (2.0,))
    x, y = some_examples(20, width)
    found = ridge.leave_one_out_labels(x, y, 3)
    centred = x - x.mean(0)
    penalty = 0.3 * float(centred.square().sum()) / width
    for i in range(len(x)):
        others = torch.arange(len(x)) != i
        a, t = x[others], F.one_hot(y, 3).double()[others]
        inputs = a - a.mean(0)
        weights = torch.linalg.solve(
            inputs.mT @ inputs + penalty * torch.eye(width, dtype=torch.float64), inputs.mT @ (t - t.mean(0))
        )
        close(found[i], (2 * (t.mean(0) + (x[i] - a.mean(0)) @ weights)).softmax(0), 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_voice_of_training_is_the_mean_probability_at_the_visits(reduction, tmp_path):
    model, x, y = network("mlp")
    seen = []
    memory = visited(
        tmp_path,
        model,
        sgd(model, lr=0.02),
        x,
        y,
        epochs=4,
        seen=seen,
        loss=lambda z, t: F.cross_entropy(z, t, reduction=reduction),
    )
    training = memory._training_set(x, y, None, "index")
    said = voice.training_labels(memory.store, memory.view, memory.store.manifest.layers[-1], training, 3, None)
    mean = torch.zeros(len(x), 3, dtype=torch.float64)
    for index, logits in seen:
        mean[index] += logits.softmax(1) / 4
    assert not isinstance(said, str)
    close(said, mean, 1e-9)


def test_the_voice_of_training_says_why_it_is_silent(tmp_path):
    model, x, y = network("mlp")
    memory = visited(tmp_path, model, sgd(model), x, y, loss=lambda z, t: F.mse_loss(z, F.one_hot(t, 3).double()))
    found = memory.suspects(model, x, y, progress=False)
    assert "not those of a softmax" in found.left_out["voice of the training"]
    assert "while it was trained" not in found.summary.split("No voice")[0]


# ---------------------------------------------------------------- wrong labels


def with_wrong_labels(y, seed=5):
    random = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.randperm(len(y), generator=random)[: len(y) // 20]] = True
    return torch.where(wrong, (y + torch.randint(1, 10, y.shape, generator=random)) % 10, y), wrong


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The small digits with 5 % wrong labels, which the network learned by heart; the last 20 examples are not used."""
    pytest.importorskip("sklearn", reason="the extra demo is not installed")
    images, truth = small_digits()
    x, (y, wrong) = images.flatten(1).float() / 16, with_wrong_labels(truth)
    x[101] = x[100]
    torch.manual_seed(0)
    model = MLP(64, 64, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    used = len(x) - 20
    path = tmp_path_factory.mktemp("digits") / "memory"
    memory = visited(path, model, optimizer, x[:used], y[:used], epochs=40, size=50, dtype="float16")
    return memory, model, x, y, truth, wrong


def test_suspects_find_wrong_labels_that_the_network_has_learned_by_heart(digits):
    memory, model, x, y, truth, wrong = digits
    suspects = memory.suspects(model, x, y, progress=False)
    assert mislabelled(suspects.scores, wrong).auc > 0.99
    assert mislabelled(suspects.column("loss"), wrong).auc < 0.98
    assert (suspects.column("suggested") == truth)[wrong].double().mean() > 0.9
    assert suspects.never_used == list(range(len(x) - 20, len(x)))
    assert (100, 101) in suspects.near_duplicates()
    assert suspects.left_out == {}


def test_the_order_of_the_rows_changes_nothing(digits):
    memory, model, x, y, _, _ = digits
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    before = memory.suspects(model, x, y, progress=False)
    after = memory.suspects(model, x[order], y[order], index=order, progress=False)
    torch.testing.assert_close(after.scores, before.scores[order], atol=1e-6, rtol=0)
    assert [line.index for line in after][:20] == [line.index for line in before][:20]
    assert torch.equal(after.column("nearest")[after.column("index").argsort()], before.column("nearest"))


def test_the_baselines_are_those_of_the_network(digits):
    memory, model, x, y, _, _ = digits
    suspects = memory.suspects(model, x, y, progress=False)
    with torch.no_grad():
        logits = model(x).double()
    torch.testing.assert_close(suspects.column("loss"), F.cross_entropy(logits, y, reduction="none"), atol=1e-5, rtol=0)
    given = logits.softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(suspects.column("confidence"), given, atol=1e-5, rtol=0)
    own = memory.self_influence(model, x, y, layer="fc3", progress=False)
    torch.testing.assert_close(suspects.column("own"), own.values)
    assert mislabelled(own.values, digits[-1]).auc > 0.95


def test_tables_have_the_columns_that_people_know(digits):
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    memory, model, x, y, _, wrong = digits
    suspects = memory.suspects(model, x, y, progress=False)
    frame = suspects.to_pandas()
    assert list(frame.columns[:5]) == ["index", "label", "suggested", "score", "suspect"]
    assert frame["score"].is_monotonic_decreasing and (frame["label"] != frame["suggested"]).all()
    lab = suspects.to_datalab()
    assert list(lab.index) == list(range(len(x))) and (lab["given_label"] == y.numpy()).all()
    assert lab["is_label_issue"].sum() == frame["suspect"].sum()
    assert ((lab["predicted_label"] != lab["given_label"]) == lab["is_label_issue"]).all()
    assert lab["label_score"].between(0, 1).all()
    assert lab["label_score"][wrong.numpy()].mean() < 0.5 < lab["label_score"][~wrong.numpy()].mean()
    own = memory.self_influence(model, x, y, progress=False).to_pandas()
    assert list(own.columns) == ["index", "self_influence", "visits"]


def test_what_is_printed_names_the_most_suspicious_first(digits):
    memory, model, x, y, _, _ = digits
    names = ["nil", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    suspects = memory.suspects(model, x, y, classes=names, progress=False)
    first = next(iter(suspects))
    lines = str(suspects).splitlines()
    line = next(line for line in lines if "→" in line and "suggested" not in line)
    assert f"{first.index}" in line and f"{names[first.label]} → {names[first.suggested]}" in line
    assert sum(" → " in line for line in lines) == 11
    assert "20 examples were never used in training" in " ".join(str(suspects).split())
    assert "example" in str(memory.self_influence(model, x, y, progress=False))


def test_words_are_weighed_by_how_rare_they_are(tmp_path):
    """The label is one word among many: the embedding's keys alone are enough to find wrong labels."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(2, 60, (300, 8), generator=random)
    y = torch.randint(2, (300,), generator=random)
    x[:, 3] = y
    wrong = torch.zeros(300, dtype=torch.bool)
    wrong[torch.randperm(300, generator=random)[:15]] = True
    labels = torch.where(wrong, 1 - y, y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 8), nn.Flatten(), nn.Linear(64, 2)).double()
    memory = visited(
        tmp_path, model, optim.Adam(model.parameters(), lr=1e-2), x, labels, epochs=20, size=20, keep={"0": "keys"}
    )
    suspects = memory.suspects(model, x, labels, progress=False)
    assert mislabelled(suspects.scores, wrong).auc > 0.97 and "what 0 saw" in suspects.summary


# ---------------------------------------------------------------- what is refused


def test_labels_other_than_those_of_the_training_are_refused(digits):
    memory, model, x, y, _, _ = digits
    with pytest.raises(QueryError, match="errors are those of other labels"):
        memory.suspects(model, x, y.roll(1), progress=False)


def test_questions_that_cannot_be_answered_say_why(tmp_path):
    model, x, y = network("mlp")
    memory = visited(tmp_path / "slots", model, sgd(model), x, y)
    with pytest.raises(QueryError, match="not among the 5 rows of x"):
        memory.suspects(model, x[:5], y[:5])
    with pytest.raises(QueryError, match=r"labels that are classes.*regression"):
        memory.suspects(model, x, y.double())
    with pytest.raises(QueryError, match="14 examples and y 13 labels"):
        memory.suspects(model, x, y[1:])
    with pytest.raises(QueryError, match="14 different whole numbers"):
        memory.suspects(model, x, y, index=[0] * 14)
    with pytest.raises(UnknownColumn, match="'row_id'"):
        memory.suspects(model, x, y, column="row_id")
    with pytest.raises(QueryError, match="is not among the 3 outputs"):
        memory.suspects(model, x, y + 5)
    with pytest.raises(ModelMismatch):
        memory.suspects(mlp(5, 7, 3), x, y)
    with pytest.raises(QueryError, match="was seen in training"):
        memory.at(0).suspects(model, x, y)


def test_layers_without_keys_are_refused_by_name(tmp_path):
    model, x, y = network("mlp")
    memory = visited(tmp_path / "ledger", model, sgd(model), x, y, keep="ledger", by="label")
    with pytest.raises(QueryError):
        memory.suspects(model, x, y)
    model, x, y = network("mlp")
    memory = visited(tmp_path / "replay", model, sgd(model), x, y, keep="replay")
    with pytest.raises(QueryError, match="keeps no slots"):
        memory.suspects(model, x, y)
    model, x, y = network("mlp")
    memory = visited(tmp_path / "keys", model, sgd(model), x, y, keep="keys")
    found = memory.suspects(model, x, y, progress=False)
    assert "own" not in found.table.column_names and "no layer has slots" in found.left_out["column 'own'"]
    with pytest.raises(QueryError, match="no layer can be asked"):
        memory.self_influence(model, x, y)
