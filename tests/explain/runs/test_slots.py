"""Answers of a run that kept no slots are those of kept slots, whatever the budget, and nothing stays on disk."""

import gc
import pickle
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, QueryError, StoreError
from dualform.record.shards import shard_builder
from dualform.types import Keep

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

N, C, BATCH = 24, 3, 6


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(7, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, C)

    def forward(self, x):
        return self.out(self.lstm(self.embed(x))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, C)

    def forward(self, x):
        return self.out(self.block(self.embed(x)).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, C))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(16, C)
    )


def vectors():
    return torch.randn(N, 6)


def pictures():
    return torch.randn(N, 1, 5, 5)


def words():
    return torch.randint(7, (N, 4))


momentum, adam = partial(optim.SGD, lr=0.1, momentum=0.9), partial(optim.Adam, lr=1e-2)
adamw = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
SUBJECTS = {
    "mlp momentum": (mlp, vectors, momentum, "2"),
    "mlp adamw": (mlp, vectors, adamw, "2"),
    "cnn momentum": (cnn, pictures, momentum, "3"),
    "lstm adam": (LSTM, words, adam, "lstm"),
    "transformer adamw": (Transformer, words, adamw, "block.linear1"),
}


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / len(batch[0])


class Training:
    """A recorded training of some epochs, with all slots or without them."""

    def __init__(self, path, name="mlp momentum", keep: Keep = "slots", epochs=3):
        make, inputs, make_optimizer, self.layer = SUBJECTS[name]
        torch.manual_seed(0)
        self.x, self.y = inputs(), torch.randint(C, (N,))
        self.model = make()
        optimizer = make_optimizer(self.model.parameters())
        with dualform.record(self.model, optimizer, path, dtype="float32", keep=keep, progress=False) as tape:
            for _ in range(epochs):
                for index in torch.randperm(N).split(BATCH):
                    tape.note(
                        index=index + 50, label=self.y[index], even=(index % 2 == 0),
                        source=["ab"[int(i) % 2] for i in index], weight=index.double() / 7, epoch="x",
                    )  # fmt: skip
                    losses(self.model, (self.x[index], self.y[index])).sum().backward()
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        self.memory = dualform.open(path)

    def data(self, index):
        return self.x[index - 50], self.y[index - 50]

    def run(self, data=None):
        return self.memory.replay(self.model, losses, data or self.data)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shard_builder, "SHARD_BYTES", 1)  # a shard a step


def bytes_below(folder):
    """The bytes of all files of slots; the writer may rename or remove one meanwhile."""
    total = 0
    for file in folder.rglob("shards/*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def answers(memory, training):
    """Many answers, as tensors."""
    layer, x = training.layer, training.x[:3]
    spot = memory.attend(training.model, x)
    hits, groups = spot.top(4, layer=layer, per="slot"), spot.by("label", layer=layer)
    alphas = spot.ask(layer, per="slot", top=3, by=("source",), score="abs")
    masked = memory.without("label = 1 and step <= 7")
    earlier = memory.at(6)
    return {
        "top visits": hits.visits,
        "top weights": hits.weight,
        "top contributions": hits.contribution,
        "top index": torch.tensor(hits.columns["index"].to_pylist()),
        "by": groups.values,
        "by bias": groups.bias,
        "by initial": groups.initial,
        "by |α|": alphas.groups["source"].values,
        "top |α|": alphas.hits.weight,
        "timeline": spot.timeline("source", layer=layer, stretches=3).values,
        "output": spot.output(layer),
        "earlier top": earlier.attend(training.model, x).top(2, layer=layer, per="slot").contribution,
        "masked prediction": masked.predict(training.model, x),
        "examples": spot.top(3).contribution,
        "masked top": masked.attend(training.model, x).top(2, layer=layer, per="slot").contribution,
        **{f"weights of step 6, {name}": tensor for name, tensor in earlier.weights().items()},
        **{f"ledger, {name}": part for name, part in memory.ledger("source")["a"].items()},
        **{f"check, {name}": torch.tensor(e) for name, e in memory.check(training.model, full=True).items()},
    }


def assert_equal(some, others):
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(
    ("name", "shards"), [*((name, shards) for name in SUBJECTS for shards in (4.5, 1000.0)), ("mlp momentum", 1.5)]
)
def test_answers_are_those_of_kept_slots_under_any_budget(tmp_path, name, shards):
    kept = Training(tmp_path / "kept", name)
    bare = Training(tmp_path / "bare", name, keep="keys")
    largest = max(file.stat().st_size for file in (tmp_path / "kept" / "shards").iterdir())
    budget, sizes = int(shards * largest), []

    def data(index):
        sizes.append(bytes_below(tmp_path / "slots"))
        return bare.data(index)

    with bare.run(data) as run:
        memory = run.slots(budget, folder=tmp_path / "slots")
        assert memory.visits.equals(kept.memory.visits) and memory.certificate == kept.memory.certificate
        assert_equal(answers(memory, bare), answers(kept.memory, kept))
    assert max(sizes) <= budget and len(sizes) >= 12
    assert (len(sizes) > 12) == (shards < 1000), "what does not fit is run again"
    assert not list((tmp_path / "slots").iterdir())


@pytest.mark.parametrize("name", ["mlp momentum", "transformer adamw"])
def test_all_layers_take_one_pass_together(tmp_path, name):
    bare, calls = Training(tmp_path / "bare", name, keep="keys"), []

    def data(index):
        calls.append(len(index))
        return bare.data(index)

    with bare.run(data) as run:
        run.slots("10 MB")
        largest = run._slots[-1].files.total // 12
        memory = run.slots(int(1.5 * largest))
        calls.clear()
        memory.at(8).weights()
        assert 7 <= len(calls) <= 8
        calls.clear()
        memory.check(bare.model, full=True)
        assert 11 <= len(calls) <= 12
        calls.clear()
        memory.attend(bare.model, bare.x[:2]).top(3)
        assert 11 <= len(calls) <= (12 if name == "mlp momentum" else 24)


def test_sizes_of_visits_are_those_of_kept_slots(tmp_path):
    kept = Training(tmp_path / "kept")
    memory = kept.run().slots("50 kB")
    assert torch.equal(memory.sizes("2"), kept.memory.sizes("2"))


def test_attend_asks_the_trained_network_and_runs_training_once(tmp_path):
    bare, calls = Training(tmp_path / "bare", keep="keys"), []

    def data(index):
        calls.append(len(index))
        return bare.data(index)

    run = bare.run(data)
    spot = run.attend(bare.x[:2], target=1)
    torch.testing.assert_close(spot.prediction, bare.model(bare.x[:2]).detach())
    torch.testing.assert_close(spot.output("2"), bare.model(bare.x[:2]).detach())
    run.attend(bare.x[:2]).top(3, layer="0", per="slot")
    assert len(calls) == 12
    run.close()
    with pytest.raises(StoreError, match=r"removed by run\.close"):
        spot.top(1, layer="0", per="slot")
    assert len(run.attend(bare.x[:1]).top(3, layer="0", per="slot")) == 1, "it can be asked again after that"
    run.close()


def test_layers_and_precision_can_be_chosen(tmp_path):
    bare = Training(tmp_path / "bare", keep="keys")
    memory = bare.run().slots(layers=["2"], dtype="float16")
    assert memory.layers == ("2",) and memory.store.manifest.dtype == "float16"
    assert bare.run().slots().store.manifest.dtype == "float32", "as the memory was recorded"


@pytest.mark.parametrize("call", [3, 12, 14])
def test_an_interrupt_leaves_nothing_behind_and_a_usable_run(tmp_path, call):
    bare, calls, folder = Training(tmp_path / "bare", keep="keys"), [], tmp_path / "slots"

    def data(index):
        calls.append(len(index))
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return bare.data(index)

    run, memory = bare.run(data), None
    with pytest.raises(KeyboardInterrupt):
        memory = run.slots("50 kB", folder=folder)
        assert call == 14
        memory.attend(bare.model, bare.x).top(3, layer="0", per="slot")
    if memory is None:
        assert call < 14 and not list(folder.iterdir())
    else:
        assert [path.name for path in folder.glob("*/*")] == ["memory"]
        top = memory.attend(bare.model, bare.x).top(3, layer="0", per="slot")
        assert torch.equal(top.slots, run.slots().attend(bare.model, bare.x).top(3, layer="0", per="slot").slots)
    assert run.check().exact
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run.close()
    assert not list(folder.iterdir())


def test_an_interrupt_between_two_steps_leaves_nothing_behind(tmp_path):
    bare = Training(tmp_path / "bare", keep="keys")

    def progress(task, done, total):
        if done == 4:
            raise KeyboardInterrupt

    run = bare.run()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run.slots(folder=tmp_path / "slots", progress=progress)
    assert not list((tmp_path / "slots").iterdir()), "also while somebody holds on to the error"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and interrupt.value is not None
    assert len(run.attend(bare.x[:1]).top(1, layer="0", per="slot")) == 1
    run.close()


def test_errors_of_the_user_leave_nothing_behind(tmp_path):
    bare, folder = Training(tmp_path / "bare", keep="keys"), tmp_path / "slots"
    calls = []

    def broken(index):
        calls.append(len(index))
        if len(calls) == 5:
            raise RuntimeError("the disk of the user")
        return bare.data(index)

    with pytest.raises(RuntimeError, match="the disk of the user"):
        bare.run(broken).slots(folder=folder)
    with pytest.raises(QueryError, match="one number an example"):
        bare.run(lambda index: tuple(part[:5] for part in bare.data(index))).slots(folder=folder)
    assert not list(folder.iterdir())


def test_slots_go_when_nobody_uses_them(tmp_path):
    bare = Training(tmp_path / "bare", keep="keys")
    memory = bare.run().slots(folder=tmp_path / "slots")
    gc.collect()
    assert len(list((tmp_path / "slots").iterdir())) == 1 and len(memory.visits) == 72
    del memory
    gc.collect()
    assert not list((tmp_path / "slots").iterdir())


def test_another_run_than_the_recorded_one_warns_in_its_answers(tmp_path):
    bare = Training(tmp_path / "bare")
    run = bare.run(lambda index: (bare.data(index)[0] * 2, bare.data(index)[1]))
    with pytest.warns(DualformWarning, match="differs from the recorded one from step 1"):
        run.slots()
    with pytest.warns(DualformWarning, match="differs from the recorded one from step 1"):
        spot = run.attend(bare.x[:1])
    assert spot.output("2").shape == (1, C)


def test_a_training_that_does_not_repeat_says_so(tmp_path):
    bare, calls = Training(tmp_path / "bare", keep="keys"), []

    def data(index):
        calls.append(len(index))
        return bare.data(index) if len(calls) <= 12 else (bare.data(index)[0] + 1e-3, bare.data(index)[1])

    memory = bare.run(data).slots("50 kB")
    with pytest.raises(StoreError, match="did not come out the second time"):
        memory.attend(bare.model, bare.x).top(3, layer="0", per="slot")


def test_wrong_options_are_answered_with_a_sentence(tmp_path):
    bare = Training(tmp_path / "bare", keep="keys")
    run = bare.run()
    for budget in ("much", -1, "4 XB"):
        with pytest.raises(QueryError, match="is no number of bytes"):
            run.slots(budget)
    with pytest.raises(QueryError, match=r"budget=300 bytes is too small"):
        run.slots(300)
    with pytest.raises(StoreError, match="cannot be sent to another one"):
        pickle.dumps(run.slots().store)
    run.close()


def test_another_precision_is_named(tmp_path):
    wrong: Any = "int8"
    with pytest.raises((QueryError, TypeCheckError), match="dtype"):
        Training(tmp_path / "bare", keep="keys").run().slots(dtype=wrong)


def test_a_memory_without_settings_cannot_be_run_again(tmp_path):
    torch.manual_seed(0)
    model = mlp()
    optimizer = momentum(model.parameters())
    with dualform.record(model, optimizer, tmp_path / "ledger", keep="keys+ledger", by="label", progress=False) as tape:
        for _ in range(3):
            tape.note(index=np.arange(4), label=1)
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(QueryError, match="does not hold the settings of the optimiser"):
        dualform.open(tmp_path / "ledger").replay(model, losses, lambda index: index)


def test_progress_counts_the_steps(tmp_path):
    bare, calls = Training(tmp_path / "bare", keep="keys"), []
    bare.run().slots(progress=lambda *call: calls.append(call))
    assert calls[-1] == ("running training again", 12, 12) and Path(bare.memory.path).exists()
