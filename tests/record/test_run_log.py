"""A training recorded with ``replay=`` runs again bit for bit: random numbers, modes, states, whatever else is kept."""

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import HorizonError, NonFiniteGradient, NoteError, QueryError, RecordError, ResumeError
from dualform.record.run_log.state_schedule import StateSchedule
from dualform.store import WeightsChecksum
from dualform.store.fingerprint_table import TURNS

N, D, C = 48, 12, 3
X, Y = torch.randn(N, D, generator=torch.Generator().manual_seed(1)), torch.arange(N) % C


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(-1, 4, 3))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.reshape(-1, 3, 4)).mean(1))


class LowRank(nn.Module):
    """A frozen layer with a trained correction of rank 2, and dropout before it, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(D, C), nn.Linear(D, 2, bias=False), nn.Linear(2, C, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.dropout(x)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, C))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(30, C)
    )


def adamw_in_groups(model: nn.Module) -> optim.Optimizer:
    weights, others = [], []
    for parameter in model.parameters():
        (weights if parameter.ndim > 1 else others).append(parameter)
    return optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)


def trained(kind: type[optim.Optimizer], **options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **options)


ADAM = trained(optim.Adam, lr=1e-2)


@dataclass
class Loop:
    """A training loop with the habits that loops have."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], optim.Optimizer] = ADAM
    clip: float | None = None
    accumulate: int = 1
    schedule: bool = False
    evaluates: bool = False
    scaler: bool = False
    frozen: str = ""
    evaluating: str = ""
    noise: bool = False

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        if self.noise:
            logits = logits + 0.1 * torch.randn_like(logits)
        return F.cross_entropy(logits, batch[1], reduction="none") / (len(batch[1]) * self.accumulate)

    def run(self, model: nn.Module, optimizer: optim.Optimizer, tape: Any, epochs: int = 2) -> list[dict[str, Tensor]]:
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if self.schedule else None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if self.scaler else None
        states, batches = [], 0
        for epoch in range(epochs):
            if self.evaluating:
                model.get_submodule(self.evaluating).eval()
            if self.frozen:
                model.get_submodule(self.frozen).requires_grad_(epoch > 0)
            for index in torch.randperm(N).split(10):
                tape.note(index=index, label=Y[index])
                loss = self.losses(model, (X[index], Y[index])).sum()
                (loss if scaler is None else scaler.scale(loss)).backward()
                batches += 1
                if batches % self.accumulate:
                    continue
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if self.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
                if schedule:
                    schedule.step()
                states.append(copy.deepcopy(model.state_dict()))
                if self.evaluates:
                    model.eval()
                    model(X[:5])
                    torch.rand(3)
                    model.train()
        return states


LOOPS = {
    "dropout": Loop(),
    "batch norm": Loop(convolutions, trained(optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
    "lstm": Loop(Recurrent, trained(optim.RMSprop, lr=1e-2, centered=True)),
    "transformer, groups, clipped": Loop(Transformer, adamw_in_groups, clip=0.05),
    "low rank": Loop(LowRank, trained(optim.NAdam, lr=1e-2)),
    "accumulated, schedule": Loop(accumulate=2, schedule=True),
    "evaluates between": Loop(evaluates=True),
    "loss scale": Loop(scaler=True, clip=0.3),
    "frozen for an epoch": Loop(frozen="0"),
    "one module evaluates": Loop(convolutions, evaluating="2"),
    "noise in the loss": Loop(noise=True),
}


def record(loop: Loop, path: Any, **options: Any) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = loop.model()
    optimizer = loop.optimizer(model)
    with dualform.record(model, optimizer, path, progress=False, **options) as tape:
        return model, loop.run(model, optimizer, tape)


def replay(loop: Loop, path: Any, model: nn.Module) -> Any:
    torch.manual_seed(123)
    return dualform.open(path).replay(model, loop.losses, lambda index: (X[index], Y[index]))


@pytest.mark.parametrize("keep", ["slots", "replay"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_runs_again_bit_for_bit(name, keep, tmp_path):
    loop = LOOPS[name]
    model, states = record(loop, tmp_path / "run", keep=keep, replay="1 MB")
    blank = loop.model()
    if loop.model is LowRank:
        blank.get_submodule("base").load_state_dict(model.get_submodule("base").state_dict())
    run = replay(loop, tmp_path / "run", blank)
    check = run.check()
    assert check.exact, str(check)
    for step in (1, len(states) // 2, len(states)):
        for key, tensor in run.at(step).state_dict().items():
            assert torch.equal(tensor, states[step - 1][key]), (step, key)


@pytest.mark.parametrize("name", ["dropout", "batch norm", "transformer, groups, clipped"])
def test_recording_a_log_changes_nothing(name, tmp_path):
    loop = LOOPS[name]
    torch.manual_seed(0)
    model = loop.model()
    bare = loop.run(model, loop.optimizer(model), type("NoTape", (), {"note": lambda self, **columns: None})())
    for keep in ("slots", "replay"):
        _, recorded = record(loop, tmp_path / keep, keep=keep, replay=True)
        assert all(torch.equal(a[key], b[key]) for a, b in zip(bare, recorded, strict=True) for key in a)


def test_both_ways_of_recording_see_the_same_visits_and_settings(tmp_path):
    loop = LOOPS["transformer, groups, clipped"]
    for keep in ("slots", "replay"):
        record(loop, tmp_path / keep, keep=keep, replay=True)
    one, other = (dualform.open(tmp_path / keep) for keep in ("slots", "replay"))
    assert one.visits.equals(other.visits)
    assert one.store.run_log.equals(other.store.run_log)
    assert [str(k) for k in one.store.generators()] == [str(k) for k in other.store.generators()]


def test_a_stretch_runs_again_from_the_state_before_it(tmp_path):
    model, _ = record(LOOPS["dropout"], tmp_path / "run", keep="replay", replay="30 kB")
    run = replay(LOOPS["dropout"], tmp_path / "run", model)
    log = dualform.open(tmp_path / "run").store.manifest.run_log
    assert log is not None
    kept = [state.step for state in log.states]
    assert len(kept) > 1
    check = run.check(2, after=kept[-1])
    assert check.exact and check.first == kept[-1] + 1


def test_an_optimiser_may_begin_with_a_state(tmp_path):
    torch.manual_seed(0)
    model, loop = mlp(), LOOPS["dropout"]
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    loop.run(model, optimizer, type("NoTape", (), {"note": lambda self, **columns: None})())
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        loop.run(model, optimizer, tape)
    assert replay(loop, tmp_path / "run", model).check().exact


@pytest.mark.parametrize("states", [0, "1 MB"])
def test_two_optimisers_that_take_a_step_together(states, tmp_path):
    torch.manual_seed(0)
    model = mlp()
    optimizers = [optim.SGD(model[0].parameters(), lr=0.1), optim.AdamW(model[3].parameters(), lr=1e-2)]
    with dualform.record(model, optimizers, tmp_path / "run", keep="replay", replay=states, progress=False) as tape:
        for index in torch.randperm(N).split(10):
            tape.note(index=index)
            F.cross_entropy(model(X[index]), Y[index]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.store.steps == 5
    assert replay(Loop(), tmp_path / "run", model).check().exact


def test_optimisers_that_take_turns(tmp_path):
    torch.manual_seed(0)
    model = mlp()
    optimizers = [optim.SGD(model[0].parameters(), lr=0.1), optim.AdamW(model[3].parameters(), lr=1e-2)]
    with dualform.record(model, optimizers, tmp_path / "run", keep="replay", progress=False) as tape:
        for number, index in enumerate(torch.randperm(N).split(10)):
            tape.note(index=index)
            F.cross_entropy(model(X[index]), Y[index]).backward()
            optimizers[number % 2].step()
            model.zero_grad()
    assert replay(Loop(), tmp_path / "run", model).check().exact


def test_batches_whose_gradients_were_dropped_are_no_part_of_the_run(tmp_path):
    torch.manual_seed(0)
    model = mlp()
    first = next(model.parameters())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        for number, index in enumerate(torch.randperm(N).split(6)):
            tape.note(index=index)
            loss = F.cross_entropy(model(X[index]), Y[index])
            if number == 2:
                torch.autograd.grad(loss, first)  # asks, and adds to no gradient
                continue
            loss.backward()
            if number % 4 == 1:
                optimizer.zero_grad(set_to_none=number == 1)  # as a loop that skips a bad batch
                continue
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.store.steps == 5 and len(memory.visits) == 30
    assert replay(Loop(), tmp_path / "run", model).check().exact


def test_a_killed_run_goes_to_its_last_complete_shard(tmp_path):
    script = f"""
        import os, torch, dualform
        import tests_run_log as t
        torch.manual_seed(0)
        model = t.mlp(); optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with dualform.record(model, optimizer, {str(tmp_path / "run")!r}, keep="replay", progress=False) as tape:
            t.LOOPS["dropout"].run(model, optimizer, tape, epochs=1)
            tape.flush()
            t.LOOPS["dropout"].run(model, optimizer, tape, epochs=1)
            os._exit(9)
    """
    (tmp_path / "tests_run_log.py").write_text(Path(__file__).read_text())
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True)
    assert result.returncode == 9, result.stderr
    memory = dualform.open(tmp_path / "run")
    assert memory.store.steps == 5
    run = replay(LOOPS["dropout"], tmp_path / "run", mlp())
    assert run.check().exact and run.check().steps == 5


def test_a_resumed_run_runs_again_as_one(tmp_path):
    torch.manual_seed(0)
    model, loop = mlp(), LOOPS["dropout"]
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        loop.run(model, optimizer, tape, epochs=1)
        tape.flush()
        checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        loop.run(model, optimizer, tape, epochs=1)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", resume=5, progress=False) as tape:
        loop.run(model, optimizer, tape, epochs=2)
    run = replay(loop, tmp_path / "run", model)
    assert run.check().exact and run.check().steps == 15
    other = mlp()
    adam = optim.Adam(other.parameters())
    with pytest.raises(ResumeError, match="not the memory's own at step 10"):
        dualform.record(other, adam, tmp_path / "run", keep="replay", resume=10, progress=False).__enter__()


def test_other_data_is_cut_off_at_the_next_kept_state(tmp_path):
    model, states = record(LOOPS["dropout"], tmp_path / "run", keep="replay", replay="1 MB")
    visits = dualform.open(tmp_path / "run").visits.to_pandas()
    last = int(visits.loc[visits["step"] == 4, "index"].iloc[0])  # seen in steps 4 and once in the second epoch

    def data(index: Tensor) -> tuple[Tensor, Tensor]:
        return X[index] + 0.1 * (index == last)[:, None], Y[index]

    run = dualform.open(tmp_path / "run").replay(model, LOOPS["dropout"].losses, data)
    check = run.check()
    assert check.first_difference == 4 and check.parameters
    assert check.difference is not None and (check.difference.largest or 0.0) > 0
    assert "an example that changed" in str(check)
    with pytest.warns(UserWarning, match="from step 4 of 10 on"):
        for key, tensor in run.at(10).state_dict().items():
            assert torch.equal(tensor, states[-1][key])


WIDE = 300
"""The width of a layer whose weights are so large that an eighth of them is read after each step."""


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, WIDE), nn.ReLU(), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, C))


def edit_in_place(model: nn.Module, optimizer: optim.Optimizer) -> None:
    with torch.no_grad():
        model.get_parameter("3.weight")[5, 7] += 1e-3


def edit_unseen_by_torch(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model.get_parameter("3.weight").data.numpy().view("uint32")[5, 7] ^= 1 << 20


def edit_state(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("3.weight")]["momentum_buffer"][5, 7] += 1e-2


def clear_state(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.state.clear()


def edit_buffer(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model.get_buffer("2.running_mean").add_(1.0)
    model.eval()


def replace_weight(model: nn.Module, optimizer: optim.Optimizer) -> None:
    weight = model.get_parameter("3.weight")
    weight.data = weight.detach() * 1.01


def edit_gradient(model: nn.Module) -> None:
    gradient = model.get_parameter("3.weight").grad
    assert gradient is not None
    gradient[5, 7] += 1e-2


def record_wide(path: Path, *, steps: int = 20, at: int = 4, **options: Any) -> nn.Module:
    """Train for some steps; ``between`` is called after step ``at``, ``before`` with the gradients of the next one."""
    between, before = options.get("between"), options.get("before")
    torch.manual_seed(0)
    model = wide()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with dualform.record(model, optimizer, path, keep="replay", replay=0, progress=False) as tape:
        for step in range(1, steps + 1):
            index = torch.randperm(N)[:16]
            tape.note(index=index)
            F.cross_entropy(model(X[index]), Y[index]).backward()
            if before is not None and step == at + 1:
                before(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if between is not None and step == at:
                between(model, optimizer)
    return model


def check_wide(path: Path) -> Any:
    return replay(Loop(), path, wide()).check()


def test_a_wide_network_runs_again(tmp_path):
    record_wide(tmp_path / "run")
    assert check_wide(tmp_path / "run").exact


@pytest.mark.parametrize(
    "between", [edit_in_place, edit_unseen_by_torch, edit_state, clear_state, edit_buffer, replace_weight]
)
def test_an_edit_between_two_steps_shows_when_the_run_is_run_again(between, tmp_path):
    record_wide(tmp_path / "run", between=between)
    check = check_wide(tmp_path / "run")
    if between is edit_buffer:  # what the network computes in evaluation mode is of the buffer that was edited
        assert check.first_difference is not None and check.first_difference >= 5
    else:
        assert check.first_difference in range(4, 4 + TURNS + 1)


def test_an_edit_of_gradients_shows_when_the_run_is_run_again(tmp_path):
    record_wide(tmp_path / "run", before=edit_gradient)
    assert check_wide(tmp_path / "run").first_difference in range(5, 5 + TURNS)


def test_a_bit_that_nothing_depends_on_shows(tmp_path):
    """A weight whose input is always zero has no effect on the others, and no step changes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConstantPad1d((0, WIDE), 0.0), nn.Linear(D + WIDE, WIDE), nn.Linear(WIDE, C))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", replay=0, progress=False) as tape:
        for step in range(1, 31):
            tape.note(index=torch.arange(N))
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                model.get_parameter("1.weight").data.view(torch.int32)[WIDE - 1, D + 100] ^= 1
            if step == 20:
                model.get_parameter("1.weight").data.view(torch.int32)[WIDE - 1, D + 100] ^= 1
    check = replay(Loop(), tmp_path / "run", model).check()
    assert check.first_difference in range(4, 4 + TURNS)


def test_an_edit_after_the_last_step_shows(tmp_path):
    record_wide(tmp_path / "run", at=20, between=edit_unseen_by_torch)
    check = check_wide(tmp_path / "run")
    assert check.first_difference == 20 and check.parameters == ("3.weight",)


@pytest.mark.parametrize("sizes", [[4, 1000], [300 * 300, 7, 4000, 3 * 70_001]])
def test_every_bit_of_the_weights_is_read_within_eight_steps(sizes):
    weights = [torch.randn(size) for size in sizes]
    before = [WeightsChecksum(weights).after(step) for step in range(TURNS)]
    for weight in weights:
        for place in (0, len(weight) // 3, len(weight) - 1):
            for bit in (0, 31):
                bits = weight.numpy().view("uint32")
                bits[place] ^= 1 << bit
                assert [WeightsChecksum(weights).after(step) for step in range(TURNS)] != before
                bits[place] ^= 1 << bit
    assert [WeightsChecksum(weights).after(step) for step in range(TURNS, 2 * TURNS)] == before
    assert WeightsChecksum([weight[None].T.contiguous().T for weight in weights]).after(3) == before[3]


def test_weights_that_are_not_contiguous_are_read_as_if_they_were():
    weight = torch.randn(500, 400)
    for step in range(TURNS):
        assert WeightsChecksum([weight.T.contiguous().T]).after(step) == WeightsChecksum([weight]).after(step)


def test_a_loop_may_begin_to_call_the_parts_of_its_model(tmp_path):
    """After the first step only the modules that were called so far are watched closely."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, C))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", replay=0, progress=False) as tape:
        for number, index in enumerate(torch.randperm(N).split(6)):
            tape.note(index=index)
            logits = model(X[index]) if number % 3 else model[2](torch.tanh(model[0](X[index])))
            F.cross_entropy(logits, Y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0](X[:2])
    assert len(dualform.open(tmp_path / "run").visits) == N
    check = replay(Loop(), tmp_path / "run", model).check()
    assert check.exact, str(check)


def test_large_states_are_kept_every_sixty_four_steps():
    schedule = StateSchedule(10, size=10 << 20)
    assert [step for step in range(1, 200) if schedule.due(step)] == [64, 128, 192]
    assert StateSchedule(10, size=1 << 10).due(1)


def test_the_budget_holds_however_long_training_is():
    for most in range(0, 7):
        schedule = StateSchedule(most)
        for step in range(1, 400):
            if schedule.due(step):
                schedule.add(step)
            assert len(schedule.kept) <= most
            assert all(number % schedule.every == 0 for number in schedule.kept)
        if most:
            assert len(schedule.kept) > most / 2 - 1 and 399 - schedule.kept[-1] < schedule.every


def test_the_log_is_small(tmp_path):
    """At most 64 bytes a visit and 512 a step however many parameters there are, beside states and generators."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(D, D) for _ in range(40)], nn.Linear(D, C))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", replay=0, progress=False) as tape:
        for _ in range(100):
            for index in torch.randperm(N).split(8):
                tape.note(index=index, label=Y[index])
                F.cross_entropy(model(X[index]), Y[index]).backward()
                optimizer.step()
                optimizer.zero_grad()
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    sizes = {file.parent.name: 0 for file in files}
    for file in files:
        sizes[file.parent.name] += file.stat().st_size
    assert not sizes.get("shards") and not sizes.get("states")
    assert sizes["visits"] <= 64 * 4800
    assert sizes["run_log"] + sizes["calls"] + sizes["steps"] <= 512 * 600


@pytest.mark.parametrize("replay_size", ["2 pounds", "-1 GB", -3, "GB"])
def test_a_size_that_is_none_is_named(replay_size, tmp_path):
    model = mlp()
    with pytest.raises(QueryError, match='write for example replay="2 GB"'):
        dualform.record(model, optim.SGD(model.parameters(), lr=0.1), tmp_path, replay=replay_size)


def test_rows_that_stand_for_half_an_example_are_refused(tmp_path):
    model = mlp()
    with pytest.raises(QueryError, match="copies=2 cannot be run again yet"):
        dualform.record(model, optim.SGD(model.parameters(), lr=0.1), tmp_path, replay=True, copies=2)


@pytest.mark.parametrize("keep", ["slots", "replay"])
def test_batches_without_an_index_are_refused(keep, tmp_path):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tape = dualform.record(model, optimizer, tmp_path / "run", keep=keep, replay=True, progress=False)
    with pytest.raises((RecordError, NoteError), match="not noted with an index"), tape:
        F.cross_entropy(model(X[:4]), Y[:4]).backward()
        optimizer.step()


@pytest.mark.parametrize("keep", ["slots", "replay"])
def test_a_gradient_that_is_no_number_stops_before_the_step(keep, tmp_path):
    torch.manual_seed(0)
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tape = dualform.record(model, optimizer, tmp_path / "run", keep=keep, replay=True, progress=False)
    with pytest.raises(NonFiniteGradient, match="NaN or infinity at step 1; the step was not taken"), tape:
        tape.note(index=torch.arange(4))
        (F.cross_entropy(model(X[:4]), Y[:4]) * float("nan")).backward()
        optimizer.step()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler, at every break of a graph
def test_a_compiled_model_runs_again(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, C))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        compiled = torch.compile(model, backend="aot_eager")
        for index in torch.randperm(N).split(10):
            tape.note(index=index)
            F.cross_entropy(compiled(X[index]), Y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(dualform.open(tmp_path / "run").visits) == N
    assert replay(Loop(), tmp_path / "run", model).check().exact


def test_gradient_checkpointing_is_one_pass(tmp_path):
    torch.manual_seed(0)
    model, checkpoint = mlp(), torch.utils.checkpoint.checkpoint
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        for index in torch.randperm(N).split(10):
            tape.note(index=index)
            F.cross_entropy(checkpoint(model, X[index], use_reentrant=False), Y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(dualform.open(tmp_path / "run").visits) == N
    assert replay(Loop(), tmp_path / "run", model).check().exact


def test_a_memory_without_slots_says_what_it_can_answer(tmp_path):
    model, _ = record(LOOPS["dropout"], tmp_path / "run", keep="replay")
    memory = dualform.open(tmp_path / "run")
    assert torch.equal(memory.predict(mlp(), X[:3]), model.eval()(X[:3]))
    with pytest.raises(HorizonError, match=r"run\.at"):
        memory.at(3).predict(model, X[:3])
    with pytest.raises(QueryError, match=r"memory\.replay"):
        memory.attend(model, X[:3])
    assert "run.check() compares" in str(memory.certificate)


def test_new_parameter_groups_end_the_run(tmp_path):
    torch.manual_seed(0)
    model = mlp()
    optimizer = optim.SGD(model[0].parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        for number, index in enumerate(torch.randperm(N).split(10)):
            if number == 2:
                optimizer.add_param_group({"params": list(model[3].parameters())})
            tape.note(index=index)
            F.cross_entropy(model(X[index]), Y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(QueryError, match="other parameter groups at step 3"):
        replay(Loop(), tmp_path / "run", model)
