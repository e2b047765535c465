"""A replayed training is the recorded one bit for bit: networks of every kind, with all that loops do around them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.store import entry_sample

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

N, C = 24, 3
NUMBERS = torch.Generator().manual_seed(1)
PICTURES, VECTORS = torch.randn(N, 1, 6, 6, generator=NUMBERS), torch.randn(N, 12, generator=NUMBERS)
WORDS, Y = torch.randint(9, (N, 5), generator=NUMBERS), torch.arange(N) % C


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(9, 6), nn.LSTM(6, 7, batch_first=True), nn.Linear(7, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.out = nn.Linear(8, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.embed(x)).mean(1))


class Checkpointed(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.block, self.embed(x), use_reentrant=False).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, C))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, C)
    )


def low_rank() -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)  # the frozen part is not in the memory
    base = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, C))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.1))


@dataclass
class Loop:
    model: Callable[[], nn.Module] = mlp
    inputs: Tensor = VECTORS
    optimizer: Callable[[Any], optim.Optimizer] = lambda parameters: optim.AdamW(parameters, lr=1e-2)
    bfloat16: bool = False
    scale: float = 0.0
    accumulate: int = 1
    schedule: bool = False
    clip: float | None = None

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            shares = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return shares / (len(batch[1]) * self.accumulate)

    def record(self, path: Any, **options: Any) -> tuple[nn.Module, list[dict[str, Tensor]], int]:
        """The trained model, its state after each step, and how many steps the loss scaling skipped."""
        torch.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 8) if self.schedule else None
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=3) if self.scale else None
        states, batches, skipped = [], 0, 0
        with dualform.record(model, optimizer, path, replay="1 MB", progress=False, **options) as tape:
            for _ in range(2):
                for index in torch.randperm(N).split(5):  # the last batch is smaller
                    tape.note(index=index, label=Y[index])
                    loss = self.losses(model, (self.inputs[index], Y[index])).sum()
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
                        before = scaler.get_scale()
                        scaler.step(optimizer)
                        scaler.update()
                        if scaler.get_scale() < before:
                            skipped += 1
                            optimizer.zero_grad()
                            continue
                    optimizer.zero_grad()
                    if schedule:
                        schedule.step()
                    states.append(copy.deepcopy(model.state_dict()))
        return model, states, skipped


SGD = lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9)  # noqa: E731
NETWORKS = {
    "mlp": Loop(),
    "cnn with batch norm": Loop(convolutions, PICTURES, SGD),
    "lstm": Loop(Recurrent, WORDS),
    "transformer with dropout": Loop(Transformer, WORDS),
    "checkpointed transformer": Loop(Checkpointed, WORDS),
    "low rank": Loop(low_rank),
}
AROUND = {
    "plain": {},
    "bfloat16, loss scaling": {"bfloat16": True, "scale": 2.0**12},
    "accumulation, schedule, clipping": {"accumulate": 2, "schedule": True, "clip": 0.3},
    "all of it": {"bfloat16": True, "scale": 2.0**12, "accumulate": 2, "schedule": True, "clip": 0.3},
}
QUICK = {("mlp", "all of it"), ("cnn with batch norm", "all of it"), ("lstm", "plain"), ("low rank", "all of it"),
         ("transformer with dropout", "all of it"), ("checkpointed transformer", "plain")}  # fmt: skip
CASES = [
    pytest.param(name, around, marks=() if (name, around) in QUICK else pytest.mark.slow, id=f"{name}: {around}")
    for name in NETWORKS
    for around in AROUND
]


@pytest.mark.parametrize(("name", "around"), CASES)
def test_a_replayed_training_is_the_recorded_one_after_every_step(name, around, tmp_path):
    loop = replace(NETWORKS[name], **AROUND[around])
    has_slots = name != "checkpointed transformer" and not (name == "lstm" and loop.bfloat16)  # refused; not exact
    for keep in ("replay", "slots") if has_slots else ("replay",):
        _, states, _ = loop.record(tmp_path / keep, keep=keep)
        blank = loop.model()
        torch.manual_seed(77)
        run = dualform.open(tmp_path / keep).replay(blank, loop.losses, lambda i: (loop.inputs[i], Y[i]))
        check = run.check()
        assert check.exact, f"{keep}: {check}"
        assert check.steps == len(states)
        for step, state in enumerate(states, start=1):
            again = run.at(step).state_dict()
            assert entry_sample(again.values()) == entry_sample(state.values())
            assert all(torch.equal(tensor, state[key]) for key, tensor in again.items()), (keep, step)


@pytest.mark.parametrize("keep", ["replay", "slots"])
def test_steps_that_loss_scaling_skips_are_no_part_of_the_run(keep, tmp_path):
    loop = Loop(scale=2.0**127)  # overflows at first, and is halved
    _, states, skipped = loop.record(tmp_path / "run", keep=keep)
    assert 0 < skipped < 10 and len(states) == 10 - skipped
    run = dualform.open(tmp_path / "run").replay(mlp(), loop.losses, lambda i: (VECTORS[i], Y[i]))
    check = run.check()
    assert check.exact and check.steps == len(states), str(check)
    assert all(torch.equal(tensor, states[-1][key]) for key, tensor in run.retrain().state_dict().items())


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("keep", ["replay", "slots"])
def test_another_number_of_threads_is_named(keep, tmp_path):
    """It sums in another order. Whether bits differ depends on the machine, so another loss makes them differ here."""
    loop = Loop()
    loop.record(tmp_path / "run", keep=keep)
    memory = dualform.open(tmp_path / "run")
    with threads(2):
        run = memory.replay(mlp(), lambda m, b: 1.001 * loop.losses(m, b), lambda i: (VECTORS[i], Y[i]))
        check = run.check(3)
    assert check.first_difference == 1 and "recorded with 1 threads, and 2 sum in another order" in str(check)
    assert "torch.set_num_threads(1)" in check.reason
