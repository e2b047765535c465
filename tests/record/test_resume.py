"""A recording that goes on from a checkpoint ends as if nothing had happened; from a wrong one it does not begin."""

import copy
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from filelock import FileLock
from helpers import close, state_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import (
    CorruptMemory,
    DualformError,
    DualformWarning,
    HorizonError,
    MemoryNotFound,
    NoteError,
    ResumeError,
)
from dualform.store import sampled_entries

STEPS, BATCH, WIDTH = 10, 4, 6
NEAR = 1e-12
AS_THEY_ARE = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # examples are small enough to be read


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class Crash(Exception):
    """The machine went away."""


class Network(nn.Module):
    """Linear layers, and what no slot explains: a normalisation, running statistics, a table. Dropout draws numbers."""

    def __init__(self, table: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(table, WIDTH))
        self.fc1, self.norm, self.fc2 = nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x + self.table.mean(0))
        return self.fc2(F.dropout(self.norm(h).tanh(), 0.2, self.training))


@dataclass(frozen=True)
class Checkpoint:
    """What a careful loop saves: the model, the optimiser, the random numbers, and where it is in the data."""

    step: int
    model: Mapping[str, Any]
    optimizer: dict[str, Any]
    random: Tensor

    def changed(self, **parts: Any) -> "Checkpoint":
        return Checkpoint(**{**copy.deepcopy(vars(self)), **parts})


class Training:
    """A training loop that can be taken up from any of its checkpoints."""

    def __init__(self, path: Path, table: int = 2, momentum: float = 0.9, **options: Any) -> None:
        self.path, self.table, self.momentum = path, table, momentum
        self.options: dict[str, Any] = {"dtype": "float64", "progress": False, **options}
        self.kept: dict[int, Checkpoint] = {}
        self.threads = set(threading.enumerate())
        self.fresh()
        self.keep(0)

    def fresh(self) -> None:
        torch.manual_seed(0)
        self.model = Network(self.table).double()
        nesterov = self.momentum > 0
        self.optimizer = optim.SGD(
            self.model.parameters(), lr=0.1, momentum=self.momentum, weight_decay=1e-2, nesterov=nesterov
        )

    def keep(self, step: int) -> None:
        states = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.kept[step] = Checkpoint(step, *states, torch.get_rng_state())

    def load(self, checkpoint: Checkpoint) -> None:
        """In a new process there would be a new model and a new optimiser."""
        self.fresh()
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(copy.deepcopy(checkpoint.optimizer))
        torch.set_rng_state(checkpoint.random)

    def record(self, **options: Any) -> dualform.Tape:
        return dualform.record(self.model, self.optimizer, self.path, **{**self.options, **options})

    def steps(
        self, tape: dualform.Tape, end: int, *, flushes: Iterable[int] = (), columns: Mapping[str, Any] | None = None,
        spoil: Callable[[int], Any] = lambda step: None,
    ) -> None:  # fmt: skip
        for step in range(tape.step, end):
            random = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, WIDTH, generator=random, dtype=torch.float64)
            y = torch.randint(3, (BATCH,), generator=random)
            noted = {"index": torch.arange(BATCH) + BATCH * step, "label": y, "half": "one" if step % 2 else "two"}
            tape.note(**(noted if columns is None else columns))
            F.cross_entropy(self.model(x), y).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            spoil(step + 1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step + 1 in flushes:
                tape.flush()
            self.keep(step + 1)

    def run(self, end: int = STEPS, *, crash: bool = False, flushes: Iterable[int] = (), **options: Any) -> None:
        """Record from the beginning (or go on) up to a step, and leave with an exception if told so."""
        if "resume" not in options:
            self.load(self.kept[0])
        with suppress(Crash), self.record(**options) as tape:
            self.steps(tape, end, flushes=flushes)
            if crash:
                raise Crash

    def resume(self, at: int, end: int = STEPS, **options: Any) -> None:
        self.load(self.kept[at])
        self.run(end, resume=at, **options)

    @property
    def memory(self) -> dualform.Memory:
        return dualform.open(self.path)


def answers(training: Training) -> dict[str, Any]:
    """All that can be asked of a memory, by name: tensors, and what must be equal to the letter."""
    memory, model = training.memory, training.model
    out: dict[str, Any] = {"step": memory.step, "visits": memory.visits.to_pydict(), "layers": memory.layers}
    out["marks"] = [mark.name for mark in memory.certificate.marks]
    for how, found in (("written", memory.certificate), ("checked", memory.check(model, full=True))):
        assert found.step == memory.step and found.worst < NEAR, f"{how}: {found}"
    for step in range(memory.step + 1):
        out |= {f"{name} at {step}": tensor for name, tensor in memory.at(step).weights().items()}
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spot = memory.attend(model, x)
    for layer in memory.layers:
        hits = spot.top(5, layer=layer, per="slot")
        out |= {f"hits of {layer}": [hits.slots.tolist(), hits.steps.tolist(), hits.columns.to_pydict()]}
        out |= {f"weights of {layer}": hits.weight, f"contributions of {layer}": hits.contribution}
        out |= {f"groups of {layer}": spot.by("label", layer=layer).values, f"output of {layer}": spot.output(layer)}
        out |= {f"timeline of {layer}": spot.timeline("half", layer=layer, stretches=4).values}
    for group, parts in memory.ledger("label").items():
        out |= {f"{name} from {group}": tensor for name, tensor in parts.items()}
    return out


@cache
def undisturbed(momentum: float = 0.9) -> dict[str, Any]:
    """The answers of a recording that ran through."""
    with TemporaryDirectory() as folder:
        training = Training(Path(folder) / "m", momentum=momentum)
        training.run()
        found = answers(training)
        for step, checkpoint in training.kept.items():
            for name, tensor in checkpoint.model.items():
                close(found[f"{name} at {step}"], tensor, NEAR)
        return found


def assert_as_if_undisturbed(training: Training) -> None:
    found, expected = answers(training), undisturbed(training.momentum)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            close(found[name], value, NEAR)
        else:
            assert found[name] == value, name


# ------------------------------------------------------------------------------------------------------- going on


@AS_THEY_ARE
@given(
    at=st.integers(0, STEPS),
    flushes=st.sets(st.integers(1, STEPS)),
    momentum=st.sampled_from([0.0, 0.9]),
    crash=st.booleans(),
)
def test_a_resumed_recording_answers_like_one_that_was_never_disturbed(at, flushes, momentum, crash, tmp_path_factory):
    """Wherever the shards end: at the step of the checkpoint, before it or after it."""
    broken = Training(tmp_path_factory.mktemp("memory") / "m", momentum=momentum)
    broken.run(crash=crash, flushes=flushes)
    broken.resume(at)
    assert_as_if_undisturbed(broken)


@AS_THEY_ARE
@given(lives=st.lists(st.tuples(st.integers(0, STEPS), st.integers(0, 5)), min_size=2, max_size=3))
def test_a_recording_can_be_resumed_again_and_again(lives, tmp_path_factory):
    broken = Training(tmp_path_factory.mktemp("memory") / "m")
    broken.run(7, crash=True)
    for at, more in lives:
        at = min(at, broken.memory.step)
        broken.resume(at, min(STEPS, at + more), crash=True)
        assert broken.memory.step == min(STEPS, at + more)
    broken.resume(broken.memory.step)
    assert_as_if_undisturbed(broken)


def test_the_usual_loop_flushes_saves_crashes_and_goes_on(tmp_path):
    broken = Training(tmp_path / "m")
    broken.load(broken.kept[0])
    with suppress(Crash), broken.record() as tape:
        broken.steps(tape, 5)
        tape.flush()
        broken.steps(tape, 9)
        raise Crash
    broken.load(broken.kept[5])
    with broken.record(resume=5) as tape:
        assert tape.step == 5
        broken.steps(tape, STEPS)
        assert tape.step == STEPS
    assert_as_if_undisturbed(broken)


def test_resuming_at_zero_begins_again(tmp_path):
    broken = Training(tmp_path / "m")
    broken.run(6, crash=True)
    broken.load(broken.kept[0])
    with broken.record(resume=0):
        assert dualform.open(broken.path).step == 0
    broken.resume(0)
    assert_as_if_undisturbed(broken)


def test_resuming_a_memory_that_never_saw_a_step_works(tmp_path):
    broken = Training(tmp_path / "m")
    broken.run(0, crash=True)
    broken.resume(0)
    assert_as_if_undisturbed(broken)


@pytest.mark.parametrize("at", [3, STEPS])
def test_resuming_without_a_further_step_leaves_the_memory_of_that_step(at, tmp_path):
    training = Training(tmp_path / "m")
    training.run(flushes=[3])
    training.resume(at, at)
    memory = training.memory
    assert memory.step == at
    assert memory.check(training.model, full=True).worst < NEAR
    assert memory.certificate.worst < NEAR
    for name, tensor in memory.weights().items():
        close(tensor, training.kept[at].model[name], NEAR)


def test_a_momentum_that_was_there_before_recording_counts_after_a_resume_too(tmp_path):
    training = Training(tmp_path / "m")
    for _ in range(3):
        training.model(torch.randn(BATCH, WIDTH, dtype=torch.float64)).square().sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.keep(0)
    training.run(8, crash=True)
    for at in (5, 0):
        training.resume(at)
        assert training.memory.check(training.model, full=True).worst < NEAR
        assert training.memory.certificate.worst < NEAR


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_certificate_goes_on_in_every_precision(dtype, tmp_path):
    training = Training(tmp_path / "m", dtype=dtype)
    training.run(crash=True)
    undisturbed = training.memory.check(training.model, full=True).worst
    training.resume(5)
    assert training.memory.check(training.model, full=True).worst < 3 * undisturbed + 1e-7
    assert training.memory.certificate.worst < 3 * undisturbed + 1e-7


def test_what_was_noticed_after_the_checkpoint_is_forgotten_and_what_came_before_stays(tmp_path):
    training = Training(tmp_path / "m")

    def uneven(*steps: int) -> Callable[[int], None]:
        def spoil(step: int) -> None:
            grad = training.model.fc1.weight.grad
            if step in steps and grad is not None:
                grad *= torch.linspace(1, 3, grad.numel(), dtype=torch.float64).view_as(grad)

        return spoil

    with pytest.warns(DualformWarning, match="fc1.weight"), training.record() as tape:
        training.steps(tape, STEPS, spoil=uneven(8))
    assert [(mark.name, mark.first_step) for mark in training.memory.certificate.marks] == [("fc1.weight", 8)]
    training.resume(6)
    assert training.memory.certificate.marks == ()
    assert training.memory.check(training.model, full=True).worst < NEAR

    training.load(training.kept[0])
    with pytest.warns(DualformWarning, match="fc1.weight"), training.record(overwrite=True) as tape:
        training.steps(tape, STEPS, spoil=uneven(2))
    training.resume(6)
    assert [(mark.name, mark.first_step) for mark in training.memory.certificate.marks] == [("fc1.weight", 2)]


# ------------------------------------------------------------------------------------------------- a large rest

EVERY = 4


def assert_exact_or_refused(training: Training) -> None:
    """Every step is the model of that step, or it says that it is not known; steps that were looked at are known."""
    memory = training.memory
    for step in range(memory.step + 1):
        try:
            weights = memory.at(step).weights()
        except HorizonError as error:
            assert "snapshot_every=1" in str(error)
            assert step % EVERY and step != memory.step, f"step {step} was looked at"
            continue
        for name, tensor in weights.items():
            close(tensor, training.kept[step].model[name], NEAR)


@pytest.mark.parametrize("flushes", [(), (3, 5, 9)], ids=["one shard", "four shards"])
@pytest.mark.parametrize("resumes", [(), (4,), (6,), (4, 7), (6, 7), (6, 6), (7, 6), (4, 4, 8), (0, 5)], ids=str)
def test_a_rest_that_is_kept_now_and_then_is_exact_or_refused(resumes, flushes, tmp_path):
    training = Training(tmp_path / "m", snapshot_every=EVERY)
    training.run(flushes=flushes)
    for at in resumes:
        training.resume(at, STEPS)
    assert_exact_or_refused(training)
    assert training.memory.check(training.model, full=True).worst < NEAR
    assert training.memory.certificate.worst < NEAR


@pytest.mark.parametrize("at", [4, 6, 9])
def test_a_kill_right_after_a_resume_does_not_make_the_rest_wrong(at, tmp_path):
    training = Training(tmp_path / "m", snapshot_every=EVERY)
    training.run()
    training.load(training.kept[at])
    with training.record(resume=at):
        shutil.copytree(training.path, tmp_path / "killed")  # what a kill would leave
    training.path = tmp_path / "killed"
    assert training.memory.step == at
    for step in range(at + 1):
        with suppress(HorizonError):
            for name, tensor in training.memory.at(step).weights().items():
                close(tensor, training.kept[step].model[name], NEAR)
    training.resume(at)
    assert_exact_or_refused(training)
    assert training.memory.check(training.model, full=True).worst < NEAR


def test_a_large_rest_is_looked_at_less_often_by_itself(tmp_path):
    training = Training(tmp_path / "m", table=60_000)  # 2.9 MB
    training.run(7, crash=True)
    assert training.memory.store.manifest.snapshot_every == 3
    training.resume(5, 8)
    weights = training.memory.at(5).weights()
    for name, tensor in weights.items():
        close(tensor, training.kept[5].model[name], NEAR)


# ------------------------------------------------------------------------------------------------------ refused


def other_model(training: Training) -> Checkpoint:
    return training.kept[6].changed(model=training.kept[5].model)


def other_momentum(training: Training) -> Checkpoint:
    return training.kept[6].changed(optimizer=training.kept[5].optimizer)


def no_momentum(training: Training) -> Checkpoint:
    return training.kept[6].changed(optimizer=training.kept[0].optimizer)


def with_one(name: str, value: float | int = 1) -> Callable[[Training], Checkpoint]:
    """The right checkpoint but for one tensor."""

    def make(training: Training) -> Checkpoint:
        right = training.kept[6]
        return right.changed(model={**right.model, name: right.model[name] + value})

    return make


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda t: t.kept[5], "'fc1.weight' differs"),
        (lambda t: t.kept[0], "'fc1.weight' differs"),
        (other_model, "'fc1.weight' differs"),
        (other_momentum, "state of 'fc1.weight' differs"),
        (no_momentum, "state of 'fc1.weight' differs"),
        (with_one("fc2.bias", 1e-15), "'fc2.bias' differs"),
        (with_one("norm.weight"), "'norm.weight' differs"),
        (with_one("norm.running_mean"), "'norm.running_mean' differs"),
        (with_one("norm.num_batches_tracked"), "'norm.num_batches_tracked' differs"),
        (with_one("table"), "'table' differs"),
    ],
    ids=["step before", "first", "weights", "momentum", "no momentum", "bias", "norm", "statistics", "count", "table"],
)
def test_a_checkpoint_of_something_else_is_refused_by_the_name_of_what_differs(wrong, words, tmp_path):
    training = Training(tmp_path / "m")
    training.run(crash=True, flushes=[4, 8])
    checkpoint = wrong(training)
    before = content(training.path)
    training.load(checkpoint)
    with pytest.raises(ResumeError, match=words) as found, training.record(resume=6):
        pass
    assert "checkpoint of step 6" in str(found.value) and "\n" not in str(found.value)
    assert content(training.path) == before, "a refusal changes nothing"
    assert_nothing_is_left(training)
    training.resume(6)
    assert training.memory.check(training.model, full=True).worst < NEAR


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "a later step": ({"resume": 11}, r"step 11.*up to 10.*flush"),
    "a step far off": ({"resume": 10**9}, r"up to 10"),
    "a negative step": ({"resume": -1}, r"step -1.*up to 10"),
    "fewer layers": ({"resume": 10, "layers": ["fc1"]}, r"layers.*now \['fc1'\].*recorded \['fc1', 'fc2'\]"),
    "other slots": ({"resume": 10, "keep": {"fc2": "keys"}}, r"layers.*fc2.*keys.*slots"),
    "another batch axis": ({"resume": 10, "batch_dim": {"fc1": 1}}, r"layers.*fc1"),
    "another dtype": ({"resume": 10, "dtype": "float32"}, r"dtype.*now float32.*recorded float64"),
    "no rules": ({"resume": 10, "rules": None}, r"parameters"),
    "fewer looks at the rest": ({"resume": 10, "snapshot_every": 4}, r"snapshot_every.*now 4.*recorded 1"),
}


@pytest.mark.parametrize(("options", "words"), OTHER.values(), ids=OTHER)
def test_resuming_as_something_else_is_refused(options, words, tmp_path):
    training = Training(tmp_path / "m")
    training.run(crash=True)
    before = content(training.path)
    with pytest.raises(ResumeError, match=words) as found, training.record(**options):
        pass
    assert "\n" not in str(found.value)
    assert content(training.path) == before
    assert_nothing_is_left(training)


def test_another_model_cannot_resume(tmp_path):
    training = Training(tmp_path / "m")
    training.run(crash=True)
    before = content(training.path)
    other = Training(tmp_path / "m", table=3)
    with pytest.raises(ResumeError, match=r"parameters.*table.*3, 6.*2, 6"), other.record(resume=0):
        pass
    assert content(training.path) == before


def test_a_difference_that_the_samples_miss_shows_in_the_certificate(tmp_path):
    """Of each parameter 32 entries are compared; what is wrong elsewhere is found out when a shard ends."""
    training = Training(tmp_path / "m")
    training.run(crash=True)
    weight = training.kept[6].model["fc1.weight"]
    missed = set(range(weight.numel())) - set(sampled_entries(weight).index.tolist())
    changed = weight.clone()
    changed.view(-1)[min(missed)] += 0.1
    training.load(training.kept[6].changed(model={**training.kept[6].model, "fc1.weight": changed}))
    try:
        training.run(resume=6)
    except ResumeError:
        return  # even better
    assert training.memory.certificate["fc1.weight"] > 1e-3
    assert training.memory.check(training.model, full=True)["fc1.weight"] > 1e-3


@pytest.mark.parametrize(
    "columns", [{"index": [1] * BATCH}, {"index": [1] * BATCH, "label": "cat", "half": "one"}, {}],
    ids=["a column missing", "another type", "none"],
)  # fmt: skip
def test_columns_stay_the_same_after_a_resume(columns, tmp_path):
    training = Training(tmp_path / "m")
    training.run(8, crash=True)
    training.load(training.kept[6])
    with pytest.raises(NoteError, match="same columns"), training.record(resume=6) as tape:
        training.steps(tape, STEPS, columns=columns)
    assert training.memory.step == 6
    training.resume(6)
    assert training.memory.visits.num_rows == STEPS * BATCH


def test_resuming_what_is_not_there_is_refused_and_makes_no_folder(tmp_path):
    training = Training(tmp_path / "nowhere" / "m")
    with pytest.raises(MemoryNotFound, match="nowhere"), training.record(resume=3):
        pass
    assert not training.path.exists()


@pytest.mark.parametrize("name", ["shards/000000.safetensors", "snapshots/000000.safetensors"])
def test_resuming_on_a_changed_shard_is_refused_and_drops_nothing(name, tmp_path):
    training = Training(tmp_path / "m")
    training.run(crash=True, flushes=[4])
    file = training.path / name
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(bytes(changed))
    before = content(training.path)
    training.load(training.kept[6])
    with pytest.raises(CorruptMemory, match=name), training.record(resume=6):
        pass
    assert content(training.path) == before
    assert_nothing_is_left(training)


@pytest.mark.parametrize("change", [bytes, None], ids=["empty", "missing"])
@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_recording_can_be_resumed_from_before_a_broken_shard(at, change, tmp_path):
    training = Training(tmp_path / "m")
    training.run(crash=True, flushes=[4])
    file = training.path / "shards/000001.safetensors"
    file.unlink()
    if change:
        file.write_bytes(change())
    with pytest.raises(CorruptMemory, match="000001"):
        dualform.open(training.path)
    training.resume(at)
    assert_as_if_undisturbed(training)


def test_a_rest_with_nan_is_known_again(tmp_path):
    """NaN is not equal to itself, but its bits are."""
    model = nn.Sequential(nn.Linear(WIDTH, 3))
    model.register_buffer("unset", torch.tensor([float("nan"), 1.0]))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for resume in (None, 1):
        with dualform.record(model, optimizer, tmp_path / "m", resume=resume, progress=False) as tape:
            model(torch.randn(BATCH, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert dualform.open(tmp_path / "m").step == tape.step == 1 + (resume or 0)


def content(path: Path) -> dict[str, bytes]:
    """All files of a memory but the lock."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != ".lock"}


def assert_nothing_is_left(training: Training) -> None:
    """No hook, no lock, no writer, no half a file."""
    assert not any(module._forward_hooks for module in training.model.modules())
    assert not training.optimizer._optimizer_step_pre_hooks and not training.optimizer._optimizer_step_post_hooks
    with FileLock(training.path / ".lock", timeout=0):
        pass
    left = set(threading.enumerate()) - training.threads
    assert not [thread for thread in left if thread.name == "dualform-writer"]
    assert not list(training.path.rglob("*.partial"))


def test_what_went_wrong_in_the_loop_is_what_the_loop_raises(tmp_path):
    training = Training(tmp_path / "m")
    with pytest.raises(Crash), training.record() as tape:
        training.steps(tape, 3)
        raise Crash
    assert training.memory.step == 3
    assert not issubclass(Crash, DualformError)
    assert state_of(training.model).keys() == training.memory.weights().keys()
    assert_nothing_is_left(training)
