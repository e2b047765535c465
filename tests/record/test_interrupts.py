"""Ctrl-C at any instant: no complete step is lost, nothing becomes wrong, and the memory says where it ends."""

import importlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from helpers import EXACT, batches, close, mlp, sgd, state_of
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, RecordError
from dualform.record import trainer_session as session
from dualform.record.shards import shard_builder
from dualform.store import PendingShard, ShardWriter, read_manifest
from dualform.types import Ended

DATA = batches(8, 4, 5, 3)
PLACES = [
    "begin", "note", "forward hook", "backward hook", "end of backward", "hook before the step", "optimiser's step",
    "hook after the step", "digest", "hand-over", "flush", "close",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def press() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def learn(model: nn.Module, optimizer: optim.Optimizer, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def recorded(path: Path, model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> dualform.Tape:
    return dualform.record(model, optimizer, path, dtype="float64", progress=False, **options)


@contextmanager
def before(owner: object, name: str, what: Callable[[], None]) -> Iterator[None]:
    """Inside the ``with`` something happens before a method is called, the first time."""
    method, done = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(True)
            what()
        return method(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def assert_whole(path: Path, model: nn.Module, step: int) -> dualform.Memory:
    """A memory that holds so many steps, and these are the model's weights."""
    memory = dualform.open(path)
    assert memory.step == step
    for name, tensor in memory.weights(progress=False).items():
        close(tensor, model.state_dict()[name], EXACT)
    assert memory.certificate.worst <= EXACT and memory.check(model, full=True, progress=False).worst <= EXACT
    return memory


# ---------------------------------------------------------------- everywhere


@pytest.fixture(scope="module")
def campaign(benchmark) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_builder, "DIGEST_STEPS", 3)
        yield benchmark("interrupts")


@cache
def prepared(campaign: Any, number: int) -> tuple[Any, Mapping[str, int]]:
    """The weights of a case without recording, and how many lines each place has."""
    expected = campaign.undisturbed(campaign.CASES[number])
    with TemporaryDirectory() as folder:
        return expected, campaign.count_lines(campaign.CASES[number], expected, Path(folder) / "first")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, id="slots", marks=pytest.mark.slow),
        pytest.param(4, id="slots and ledger", marks=pytest.mark.slow),
        pytest.param(5, id="warnings are errors"),
    ],
)
def test_an_interrupt_inside_any_place_loses_no_step_and_makes_nothing_wrong(campaign, number, place, tmp_path):
    """Three of them in each run; ``python benchmarks/interrupts.py`` does a thousand and more."""
    case, luck, armed = campaign.CASES[number], Random(place), campaign.Armed()
    catch = (KeyboardInterrupt, DualformWarning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if case.strict else "ignore", DualformWarning)
            expected, lines = prepared(campaign, number)
            for leaves in (False, True):
                run = campaign.Run(case, expected, tmp_path / str(leaves), leaves)
                targets = {(place, luck.randint(1, lines[place])) for _ in range(3)}
                aim = campaign.Aim(targets, campaign.interrupt)
                campaign.one(run, aim, armed, catch, "line")
                assert aim.hit and not campaign.judge(run)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupt_in_the_optimisers_step_comes_when_the_step_is_whole(tmp_path):
    model = mlp(5, 4, 3)
    optimizer, sgd_step = sgd(model), importlib.import_module("torch.optim.sgd")
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path, model, optimizer):
        learn(model, optimizer, *DATA[0])
        with before(sgd_step, "sgd", press):
            learn(model, optimizer, *DATA[1])
    memory = assert_whole(tmp_path, model, 2)
    assert not memory.certificate.marks


def test_an_interrupt_in_a_closure_is_not_put_off(tmp_path):
    """The step has not begun yet, and a closure may take its time."""
    model, calls = mlp(5, 4, 3), []
    optimizer = sgd(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        press()
        calls.append("after the interrupt")
        return F.cross_entropy(model(DATA[0][0]), DATA[0][1])

    with pytest.raises(KeyboardInterrupt), recorded(tmp_path, model, optimizer):
        learn(model, optimizer, *DATA[0])
        optimizer.step(closure)
    assert not calls
    assert_whole(tmp_path, model, 1)


def test_a_loop_that_stops_an_epoch_by_an_interrupt_goes_on_in_the_same_recording(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model, momentum=0.9)
    with recorded(tmp_path, model, optimizer) as tape:
        for place in ("_digest", "flush", "_complete_shard", "_send"):
            with suppress(KeyboardInterrupt), before(tape._recorder.shard_builder, place, press):
                learn(model, optimizer, *DATA[0])
                tape.flush()
    assert assert_whole(tmp_path, model, 4).store.manifest.ended == Ended("closed", 4)


# ---------------------------------------------------------------- errors without a signal


def test_where_warnings_are_errors_a_mark_is_raised_when_no_step_is_half_looked_through(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_builder, "DIGEST_STEPS", 2)
    model, raised = mlp(5, 4, 3), []
    optimizer = sgd(model)
    with warnings.catch_warnings(), suppress(DualformWarning), recorded(tmp_path, model, optimizer):
        warnings.simplefilter("error")
        for x, y in DATA:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            try:
                optimizer.step()
            except DualformWarning as error:
                raised.append(str(error))
    memory = dualform.open(tmp_path)
    assert raised and memory.step == len(DATA) and memory.store.slots("0") == 4 * len(DATA)
    assert memory.certificate.marks
    full = memory.check(model, full=True, progress=False)
    assert memory.certificate.worst == pytest.approx(full.worst, rel=9)


@pytest.mark.parametrize("place", ["_audit", "_number_visits", "_call", "_place"])
def test_an_error_while_steps_are_looked_through_loses_none_or_is_said(place, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_builder, "DIGEST_STEPS", 3)

    def fail() -> None:
        raise MemoryError("nothing left")

    model = mlp(5, 4, 3)
    optimizer, said = sgd(model), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with recorded(tmp_path, model, optimizer) as tape, before(tape._recorder.shard_builder, place, fail):
                for x, y in DATA:
                    tape.note(label=y)
                    with suppress(MemoryError):
                        learn(model, optimizer, x, y)
        except RecordError as error:
            said.append(str(error))
    if place == "_place":
        assert "could not be brought up to step 3 (MemoryError" in said[0] and dualform.open(tmp_path).step == 0
    else:
        memory = assert_whole(tmp_path, model, len(DATA))
        assert memory.visits["label"].to_pylist() == [label for _, y in DATA for label in y.tolist()]
    assert not caught


def test_an_error_in_the_live_certificate_makes_it_anew_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_builder, "DIGEST_STEPS", 3)
    model = mlp(5, 4, 3)
    optimizer = sgd(model)

    def fail() -> None:
        raise MemoryError("nothing left")

    with recorded(tmp_path, model, optimizer) as tape, before(tape._recorder.shard_builder.certificate, "take", fail):
        for x, y in DATA:
            with suppress(MemoryError):
                learn(model, optimizer, x, y)
        tape.flush()
        assert dualform.open(tmp_path).certificate.worst <= EXACT  # from the entries that were kept of each step
    memory = assert_whole(tmp_path, model, len(DATA))
    assert set(memory.certificate) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_step_that_an_error_breaks_off_is_marked_and_its_weights_are_not_kept(goes_on, tmp_path):
    model, whole = mlp(5, 4, 3), {}
    optimizer = sgd(model)

    def half(parameters: Any, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            parameters[0].add_(1.0)
        raise ZeroDivisionError

    with warnings.catch_warnings(), suppress(ZeroDivisionError), recorded(tmp_path, model, optimizer):
        warnings.simplefilter("ignore", DualformWarning)
        learn(model, optimizer, *DATA[0])
        whole = state_of(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.import_module("torch.optim.sgd"), "sgd", half)
            if not goes_on:
                learn(model, optimizer, *DATA[1])
            with suppress(ZeroDivisionError):
                learn(model, optimizer, *DATA[1])
        learn(model, optimizer, *DATA[2])
    memory = dualform.open(tmp_path)
    mark = next(mark for mark in memory.certificate.marks if mark.kind == "interrupted-step")
    assert (mark.name, mark.first_step) == ("0.weight", 2)
    assert memory.step == (2 if goes_on else 1)
    for name, tensor in memory.at(1).weights(progress=False).items():
        close(tensor, whole[name], EXACT)
    assert (memory.certificate.worst <= EXACT) is not goes_on


def test_a_step_that_an_error_stops_before_it_changes_anything_is_not_marked(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    with recorded(tmp_path, model, optimizer):
        learn(model, optimizer, *DATA[0])
        handle = optimizer.register_step_pre_hook(fail)
        with suppress(ZeroDivisionError):
            learn(model, optimizer, *DATA[1])
        handle.remove()
        learn(model, optimizer, *DATA[2])
    assert not assert_whole(tmp_path, model, 2).certificate.marks


def test_what_a_backward_pass_left_that_was_broken_off_is_marked_if_a_step_uses_it(tmp_path):
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *errors: Any) -> Any:
            raise KeyboardInterrupt

    model, (x, y) = mlp(5, 4, 3), DATA[0]
    optimizer = sgd(model)
    with warnings.catch_warnings(), recorded(tmp_path, model, optimizer) as tape:
        warnings.simplefilter("ignore", DualformWarning)
        with suppress(KeyboardInterrupt):
            F.cross_entropy(model[2](Stops.apply(model[1](model[0](x)))), y).backward()
        F.cross_entropy(model(x), y).backward()  # without zero_grad
        optimizer.step()
        assert not tape._recorder.backward_hooks._backward_passes
    memory = dualform.open(tmp_path)
    assert {mark.name for mark in memory.certificate.marks if mark.kind == "not-a-product"} == {"2.weight", "2.bias"}


# ---------------------------------------------------------------- the handler


def test_the_handler_of_the_user_is_put_back_and_is_called_in_between(tmp_path):
    calls: list[str] = []

    def handler(name: str) -> Callable[..., None]:
        return lambda number, frame: calls.append(name)

    first, second, old = handler("first"), handler("second"), signal.getsignal(signal.SIGINT)
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    try:
        signal.signal(signal.SIGINT, first)
        with recorded(tmp_path, model, optimizer):
            press()
            signal.signal(signal.SIGINT, second)
            learn(model, optimizer, *DATA[0])
            press()
        assert signal.getsignal(signal.SIGINT) is second
    finally:
        signal.signal(signal.SIGINT, old)
    assert calls == ["first", "second"]


def test_two_recordings_that_end_in_any_order_leave_the_handler_as_it_was(tmp_path):
    old, one, two = signal.getsignal(signal.SIGINT), mlp(5, 4, 3), mlp(5, 4, 3)
    tapes = [recorded(tmp_path / str(i), model, sgd(model)) for i, model in enumerate((one, two))]
    for tape in tapes:
        tape.__enter__()
    for tape in tapes:
        tape.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is old


def test_a_recording_in_another_thread_leaves_interrupts_alone(tmp_path):
    old, model, found = signal.getsignal(signal.SIGINT), mlp(5, 4, 3), []

    def train() -> None:
        optimizer = sgd(model)
        with recorded(tmp_path, model, optimizer):
            learn(model, optimizer, *DATA[0])
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [old]
    assert_whole(tmp_path, model, 1)


def test_an_interrupt_while_recording_begins_leaves_nothing_behind(tmp_path):
    old, model = signal.getsignal(signal.SIGINT), mlp(5, 4, 3)
    optimizer = sgd(model)
    tape = recorded(tmp_path, model, optimizer)
    with before(tape, "_say", press), pytest.raises(KeyboardInterrupt), tape:
        pytest.fail("the loop must not begin")
    assert not any(module._forward_hooks for module in model.modules()) and not optimizer._optimizer_step_pre_hooks
    assert signal.getsignal(signal.SIGINT) is old and dualform.open(tmp_path).step == 0


def test_who_does_not_want_to_wait_for_the_disk_presses_three_times(tmp_path, capfd):
    model, hangs = mlp(5, 4, 3), threading.Event()
    optimizer = sgd(model)
    presses = threading.Thread(target=lambda: [(time.sleep(0.3), press()) for _ in range(3)])
    began, not_waited = time.monotonic(), pytest.warns(DualformWarning, match="of steps 1 to 1 none is known")
    with not_waited, pytest.raises(KeyboardInterrupt), recorded(tmp_path, model, optimizer) as tape:
        learn(model, optimizer, *DATA[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tape._recorder.shard_builder.writer, "_write", lambda shard: hangs.wait(60))
            presses.start()
            tape.flush()
    assert time.monotonic() - began < 30  # leaving the with-block does not wait again
    hangs.set()
    presses.join()
    told = capfd.readouterr().err
    assert f"writing the steps up to 1 to {tmp_path}" in told and "press Ctrl-C again to give that up" in told


# ---------------------------------------------------------------- hand-over


def shard(number: int, first: int, last: int) -> PendingShard:
    return PendingShard(number, first, last, columns={})


def test_a_shard_is_written_once_and_none_is_left_out(tmp_path):
    model = mlp(5, 4, 3)
    with recorded(tmp_path, model, sgd(model)):
        pass
    writer = ShardWriter(tmp_path, read_manifest(tmp_path))
    one = shard(0, 1, 3)
    for again in (one, one, shard(0, 1, 3)):
        writer.put(again)
    with pytest.raises(RecordError, match="the steps 5 to 6 cannot follow step 3"):
        writer.put(shard(1, 5, 6))
    with pytest.raises(RecordError, match="the steps 3 to 6 cannot follow step 3"):
        writer.put(shard(1, 3, 6))
    writer.put(shard(1, 4, 6))
    writer.wait()
    writer.stop()
    assert [(each.first, each.last) for each in read_manifest(tmp_path).shards] == [(1, 3), (4, 6)]


# ---------------------------------------------------------------- how it ended


def test_a_memory_says_how_its_recording_ended(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with suppress(KeyboardInterrupt), recorded(tmp_path, model, optimizer) as tape:
        learn(model, optimizer, *DATA[0])
        tape.flush()
        assert "not closed" in str(dualform.open(tmp_path).certificate)
        learn(model, optimizer, *DATA[1])
        press()
    memory = assert_whole(tmp_path, model, 2)
    sentence = "Recording was interrupted (KeyboardInterrupt): the memory ends with the last complete step, 2."
    assert memory.certificate.ending == sentence and sentence in str(memory.certificate)
    assert "interrupted" not in str(memory.at(1).certificate)
    with recorded(tmp_path, model, optimizer, resume=2):
        learn(model, optimizer, *DATA[2])
    assert "ecording" not in str(assert_whole(tmp_path, model, 3).certificate)


def test_a_memory_of_before_does_not_claim_to_know_how_it_ended(tmp_path):
    model = mlp(5, 4, 3)
    with recorded(tmp_path, model, sgd(model)):
        pass
    manifest = importlib.import_module("dualform.store.format.manifest")
    assert manifest._ended({"steps": 3}) == Ended("unknown", 3)


def test_running_statistics_of_a_forward_pass_that_was_interrupted_belong_to_no_step(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    optimizer, whole = sgd(model), {}
    with suppress(KeyboardInterrupt), recorded(tmp_path, model, optimizer, snapshot_every=50):
        for x, y in DATA[:3]:
            learn(model, optimizer, x, y)
        whole = state_of(model)
        model(DATA[3][0])
        press()
    memory = dualform.open(tmp_path)
    for name, tensor in memory.weights(progress=False).items():
        close(tensor, whole[name], EXACT)
    with recorded(tmp_path, model, optimizer, resume=3):  # the user's checkpoint has them
        learn(model, optimizer, *DATA[3])
    assert_whole(tmp_path, model, 4)


def test_a_ledger_that_was_interrupted_is_resumed_from_the_flush_before(tmp_path):
    def make() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 3)).double()
        return model, optim.Adam(model.parameters(), lr=0.01)

    (model, optimizer), saved = make(), {}
    options = {"keep": "ledger", "by": "label"}
    with suppress(KeyboardInterrupt), recorded(tmp_path, model, optimizer, **options) as tape:
        for i, (x, y) in enumerate(DATA[:5]):
            tape.note(label=y)
            learn(model, optimizer, x, y)
            if i == 2:
                tape.flush()
                saved = {"model": state_of(model), "optimizer": optimizer.state_dict()}
                torch.save(saved, tmp_path / "checkpoint.pt")
        press()
    assert_whole(tmp_path, model, 5)
    saved = torch.load(tmp_path / "checkpoint.pt")
    model, optimizer = make()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with recorded(tmp_path, model, optimizer, resume=3, **options) as tape:
        tape.note(label=DATA[3][1])
        learn(model, optimizer, *DATA[3])
    assert_whole(tmp_path, model, 4)


def test_a_trainers_session_that_is_interrupted_while_it_ends_ends_all_the_same(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    trained = session.TrainerSession(tmp_path, (), {"dtype": "float64", "progress": False})
    trained.begin(model, [optimizer], None)
    learn(model, optimizer, *DATA[0])
    assert trained._tape is not None
    with before(trained._tape, "_unhook", press), pytest.raises(KeyboardInterrupt):
        trained.end()
    assert_whole(tmp_path, model, 1)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("progress", [True, False])
def test_below_the_traceback_of_ctrl_c_stands_what_is_kept_and_what_to_type(tmp_path, progress):
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(KeyboardInterrupt) as stopped,
        dualform.record(model, optimizer, tmp_path / "m", progress=progress),
    ):
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        raise KeyboardInterrupt
    notes = getattr(stopped.value, "__notes__", [])
    assert len(notes) == progress
    if progress:
        assert "keeps the 3 steps that were complete" in notes[0] and "resume=3" in notes[0]
        command = notes[0].split("Read them with ")[1].split(", or")[0]
        assert eval(command, {"dualform": dualform}).step == 3
