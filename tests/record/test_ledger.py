"""The ledger as a mode of its own: exact parts of the weights for each group, and nothing that grows with training."""

from pathlib import Path

import pytest
import torch
from helpers import close
from kinds import KINDS, Kind
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import HorizonError, NoteError, QueryError, ResumeError

OPTIMISERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, eps=1e-4),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, eps=1e-4, weight_decay=0.1, amsgrad=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True, eps=1e-3),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5, eps=1e-4),
}


class Training:
    """A small network on random data; every step has two passes, and between them the gradient is halved."""

    def __init__(self, kind: Kind, optimiser: str) -> None:
        self.kind, self.model = kind, kind.model()
        self.optimizer = OPTIMISERS[optimiser](self.model.parameters())
        self.random = torch.Generator().manual_seed(1)

    def record(self, path: Path, **options) -> dualform.Tape:
        return dualform.record(self.model, self.optimizer, path, **{"dtype": "float64", "progress": False, **options})

    def step(self, tape: dualform.Tape, s: int) -> None:
        for part in range(2):
            x, n = self.kind.inputs(self.random), self.kind.examples
            y = torch.randint(3, (n,), generator=self.random)
            tape.note(label=y, source=[f"s{(i + s) % 3}" for i in range(n)])
            F.cross_entropy(self.model(x), y).backward()
            if part == 0:
                for p in self.model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trained(path: Path, kind: str = "linear", optimiser: str = "AdamW", steps: int = 8, **options) -> Training:
    training = Training(KINDS[kind], optimiser)
    with training.record(path, **options) as tape:
        for s in range(steps):
            training.step(tape, s)
    return training


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", ["linear", "lstm", "embedding"])
def test_keys_beside_a_ledger_say_what_keys_say_and_what_a_ledger_says(kind, tmp_path):
    run = trained(tmp_path / "tape", kind)
    trained(tmp_path / "both", kind, keep="keys+ledger", by="source")
    trained(tmp_path / "ledger", kind, keep="ledger", by="source")
    tape, both, alone = (dualform.open(tmp_path / name) for name in ("tape", "both", "ledger"))
    assert max(both.certificate.values()) < 1e-10 and not both.certificate.marks
    assert both.visits.equals(tape.visits)
    x = run.kind.inputs(run.random)
    spots = [memory.attend(run.model, x) for memory in (tape, both, alone)]
    for layer in tape.layers:
        hits = [spot.top(5, layer=layer, score="abs", progress=False, per="slot") for spot in spots[:2]]
        assert torch.equal(hits[0].slots, hits[1].slots)
        close(hits[1].weight, hits[0].weight)
        sums = [spot.by("label", layer=layer, score="abs", progress=False).values for spot in spots[:2]]
        close(sums[1], sums[0])
        parts = [spot.by("source", layer=layer, progress=False) for spot in spots]
        for part in parts[1:]:
            close(part.values, parts[0].values, 1e-9)
        with pytest.raises(QueryError, match="can only be asked for by"):
            spots[1].top(3, layer=layer, per="slot")
    weights = tape.without("source = 's1'").weights(progress=False)
    for name, tensor in both.without("source = 's1'").weights(progress=False).items():
        close(tensor, weights[name], 1e-9)


@pytest.mark.parametrize(
    ("kind", "optimiser"),
    [("linear", name) for name in OPTIMISERS] + [(name, "AdamW") for name in KINDS if name != "linear"],
)
def test_a_ledger_alone_says_what_a_whole_tape_says(kind, optimiser, tmp_path):
    run = trained(tmp_path / "tape", kind, optimiser)
    trained(tmp_path / "ledger", kind, optimiser, keep="ledger", by="source")
    tape, alone = dualform.open(tmp_path / "tape"), dualform.open(tmp_path / "ledger")
    assert max(alone.certificate.values()) < 1e-10 and not alone.certificate.marks
    assert max(alone.check(run.model, full=True, progress=False).values()) < 1e-10
    expected, found = tape.ledger("source", progress=False), alone.ledger("source", progress=False)
    assert list(found) == list(expected) == ["s0", "s1", "s2"]
    for name, start in expected.initial.items():
        close(found.initial[name], start, 1e-9)
        for group in expected:
            close(found[group][name], expected[group][name], 1e-9)
    x = run.kind.inputs(run.random)
    layer = run.kind.layers[0]
    by = [memory.attend(run.model, x).by("source", layer=layer, progress=False) for memory in (tape, alone)]
    close(by[1].values, by[0].values, 1e-9)
    assert by[1].residual is not None and by[1].residual.abs().max() < 1e-9
    masked = [memory.without("source = 's1'").weights(progress=False) for memory in (tape, alone)]
    for name in expected.initial:
        close(masked[1][name], masked[0][name], 1e-9)


def test_a_ledger_does_not_grow_with_training(tmp_path):
    sizes = []
    for steps in (10, 40):
        training = Training(KINDS["linear"], "AdamW")
        with training.record(tmp_path / str(steps), keep="ledger", by="source") as tape:
            for s in range(steps):
                training.step(tape, s)
                if s % 3 == 0:
                    tape.flush()
        sizes.append(size(tmp_path / str(steps)))
    assert abs(sizes[1] - sizes[0]) < 64, sizes  # digits of counts in the manifest


def test_the_groups_of_a_ledger_are_its_visits(tmp_path):
    trained(tmp_path, keep="ledger", by="label")
    table = dualform.open(tmp_path).visits.to_pylist()
    assert sorted(line["label"] for line in table) == [0, 1, 2]
    assert sum(line["visits"] for line in table) == 8 * 2 * KINDS["linear"].examples


@pytest.mark.parametrize("ask", ["top", "timeline", "abs"])
def test_single_examples_cannot_be_asked_of_a_ledger(ask, tmp_path):
    run = trained(tmp_path, keep="ledger", by="source")
    spot = dualform.open(tmp_path).attend(run.model, run.kind.inputs(run.random))
    with pytest.raises(QueryError, match="a ledger by 'source' was kept and no slots"):
        if ask == "abs":
            spot.by("source", layer="body", score="abs")
        else:
            options = [{}] if ask == "timeline" else [{"per": "example"}, {"per": "slot"}]
            for option in options[:-1]:
                with pytest.raises(QueryError, match="a ledger by 'source' was kept and no slots"):
                    getattr(spot, ask)(layer="body", **option)
            getattr(spot, ask)(layer="body", **options[-1])


def test_one_layer_may_have_a_ledger_beside_the_slots_of_others(tmp_path):
    run = trained(tmp_path, keep={"head": "ledger"}, by="source")
    memory = dualform.open(tmp_path)
    assert max(memory.check(run.model, full=True, progress=False).values()) < 1e-10
    x = run.kind.inputs(run.random)
    spot = memory.attend(run.model, x)
    for layer in ("body", "head"):
        residual = spot.by("source", layer=layer, progress=False).residual
        assert residual is not None and residual.abs().max() < 1e-9
    assert len(spot.top(3, layer="body", progress=False, per="slot")) == len(x)
    masked = memory.without("source = 's1'")
    close(
        masked.parameter("head.weight"), memory.parameter("head.weight") - memory.ledger("source")["s1"]["head.weight"]
    )
    with pytest.raises(QueryError, match=r"recorded by 'source'.*would have to be split"):
        memory.without("label = 1").weights(progress=False)
    with pytest.raises(HorizonError, match=r"holds its ledger at the steps \[8\] only"):
        memory.at(3).weights(progress=False)


def test_a_ledger_goes_on_from_the_step_of_its_last_flush(tmp_path):
    whole = trained(tmp_path / "whole", keep="ledger", by="source", steps=9)
    training, checkpoint = Training(KINDS["linear"], "AdamW"), {}
    with (
        pytest.raises(RuntimeError, match="power"),
        training.record(tmp_path / "m", keep="ledger", by="source") as tape,
    ):
        for s in range(9):
            if s == 5:
                tape.flush()
                checkpoint = {
                    "model": {k: v.clone() for k, v in training.model.state_dict().items()},
                    "optimizer": torch.save(training.optimizer.state_dict(), tmp_path / "o.pt"),
                    "random": training.random.get_state(),
                }
            if s == 7:
                tape.flush()
                raise RuntimeError("the power went")
            training.step(tape, s)
    again = Training(KINDS["linear"], "AdamW")
    again.model.load_state_dict(checkpoint["model"])
    again.optimizer.load_state_dict(torch.load(tmp_path / "o.pt"))
    again.random.set_state(checkpoint["random"])
    with (
        pytest.raises(ResumeError, match=r"kept at \[5, 7\]"),
        again.record(tmp_path / "m", keep="ledger", by="source", resume=6),
    ):
        pass
    with again.record(tmp_path / "m", keep="ledger", by="source", resume=5) as tape:
        for s in range(5, 9):
            again.step(tape, s)
    found, expected = (dualform.open(tmp_path / name).ledger("source") for name in ("m", "whole"))
    for group in expected:
        for name, tensor in expected[group].items():
            close(found[group][name], tensor, 1e-12)
    assert torch.equal(again.model.head.weight, whole.model.head.weight)  # type: ignore[union-attr]


def test_what_a_ledger_needs_is_said(tmp_path):
    training = Training(KINDS["linear"], "AdamW")
    with pytest.raises(QueryError, match="by='source'"):
        training.record(tmp_path, keep="ledger")
    with pytest.raises(QueryError, match="none is kept"):
        training.record(tmp_path, by="source")
    with (
        pytest.raises(NoteError, match=r"'task'.*\['label', 'source'\]"),
        training.record(tmp_path, keep="ledger", by="task") as tape,
    ):
        training.step(tape, 0)
