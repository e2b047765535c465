"""Trainings that are interrupted on purpose, and what is wrong with the memories they leave (``interrupts.py``)."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import dualform
from dualform.errors import DualformError, DualformWarning
from dualform.models import MLP

STEPS, BATCH, EVERY = 24, 8, 8
"""Steps, examples of each, and steps from one flush to the next."""

States = list[Mapping[str, Tensor]]


class Small(nn.Module):
    """A normalisation for the rest, a layer whose rows are not the batch's, and two layers of the common kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(12, 10, bias=False), nn.BatchNorm1d(10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.inp(x)).relu())


class Shared(Small):
    """Three rows for the whole batch: their visits are not known, which is marked when steps are looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.eye(3, 2, dtype=x.dtype)
        return self.out(self.norm(self.inp(x)).relu() + self.shared(rows).mean(0))


@dataclass(frozen=True)
class Case:
    """One kind of training. ``strict`` as under ``python -W error``."""

    name: str
    network: Callable[[], nn.Module]
    optimizer: Callable[..., optim.Optimizer]
    options: Mapping[str, Any]
    strict: bool = False
    clip: bool = False
    width: int = 12
    classes: int = 4

    def make(self) -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        model = self.network()
        return model, self.optimizer(model.parameters())

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs, classes and indices of a step."""
        random = torch.Generator().manual_seed(step)
        index = torch.randint(1000, (BATCH,), generator=random)
        x = torch.randn(BATCH, self.width, generator=random)
        return x, torch.randint(self.classes, (BATCH,), generator=random), index


def double(network: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: network().double()


SGD = partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)
ADAM = partial(optim.Adam, lr=0.01)
SLOTS, LEDGER = {"dtype": "float64"}, {"dtype": "float64", "keep": "ledger", "by": "label"}
BOTH = {"dtype": "float64", "keep": {"inp": "slots", "out": "ledger"}, "by": "label"}
CASES = [
    Case("small, slots, SGD", double(Small), SGD, SLOTS),
    Case("small, slots, Adam", double(Small), ADAM, SLOTS),
    Case("small, ledger, SGD", double(Small), SGD, LEDGER),
    Case("small, ledger, Adam", double(Small), ADAM, LEDGER),
    Case("small, slots and ledger, Adam", double(Small), ADAM, BOTH),
    Case("small, slots, Adam, -W error", double(Shared), ADAM, SLOTS, strict=True),
    Case("small, slots, SGD, values clipped, -W error", double(Small), SGD, SLOTS, strict=True, clip=True),
    Case("784-64-10, slots, SGD", partial(MLP, 784, 64, 10), SGD, {}, width=784, classes=10),
    Case("784-64-10, slots, Adam", partial(MLP, 784, 64, 10), ADAM, {"dtype": "float32"}, width=784, classes=10),
]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def take_step(case: Case, model: nn.Module, optimizer: optim.Optimizer, step: int, note: Callable = dict) -> None:
    x, y, index = case.batch(step)
    optimizer.zero_grad()
    note(index=index, label=y)
    x = x.to(next(model.parameters()).dtype)
    nn.functional.cross_entropy(model(x), y).backward()
    if case.clip and step % 7 == 3:
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    optimizer.step()


def undisturbed(case: Case) -> States:
    """The weights after each step, without recording."""
    model, optimizer = case.make()
    states: States = [weights_of(model)]
    for step in range(STEPS):
        take_step(case, model, optimizer, step)
        states.append(weights_of(model))
    return states


# ------------------------------------------------------------------------------------------------------------- one run


@dataclass
class Run:
    """A recorded training that is disturbed, and what is known of it."""

    case: Case
    expected: States
    path: Path
    leaves: bool
    resume: int | None = None
    states: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """All tensors of the model after each complete step, as the loop saw them."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    left_by: BaseException | None = None
    half_done: bool = False
    done: int = 0

    def __post_init__(self) -> None:
        self.model, self.optimizer = self.case.make()

    def train(self, catch: tuple[type[BaseException], ...], again: Callable[[], None] = lambda: None) -> None:
        """Train, recorded. The loop goes on after what it catches, or leaves."""
        if self.resume is not None:
            self.model.load_state_dict(self.checkpoint["model"])
            self.optimizer.load_state_dict(self.checkpoint["optimizer"])
            self.done = self.resume
        tape = dualform.record(
            self.model, self.optimizer, self.path, progress=False, resume=self.resume, **self.case.options
        )
        self.look()
        try:
            with tape:
                while self.done < STEPS:
                    try:
                        if self.done % EVERY == 0 and self.checkpoint.get("step", 0) != self.done:
                            tape.flush()
                            self.save(tape.step)
                        take_step(self.case, self.model, self.optimizer, self.done, tape.note)
                        self.look()
                    except catch as error:
                        self.said.append(f"{type(error).__name__}: {error}")
                        self.look()
                        again()
                        if isinstance(error, DualformError) or (self.leaves and not isinstance(error, Warning)):
                            raise
        except catch as error:
            self.left_by = error
            self.said.append(f"{type(error).__name__}: {error}")
        self.look()

    def look(self) -> None:
        """Which step does the model stand at? The training that nobody disturbed tells."""
        now = weights_of(self.model)
        for step in (self.done, self.done + 1):
            if step <= STEPS and all(torch.equal(now[name], tensor) for name, tensor in self.expected[step].items()):
                self.done = step
                self.states.setdefault(step, state_of(self.model))
                return
        self.half_done = True

    def save(self, step: int) -> None:
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        self.checkpoint = copy.deepcopy(saved)


def off(a: Tensor, b: Tensor, first: Tensor) -> float:
    """‖a − b‖ / ‖b − first‖."""
    size = (b.double() - first.double()).norm().item()
    return (a.double() - b.double()).norm().item() / size if size else (a.double() - b.double()).norm().item()


def judge(run: Run) -> list[str]:
    """What is wrong with the memory that a run left."""
    wrong = []
    if run.half_done:
        wrong.append("half: the weights are of no step")
    try:
        memory = dualform.open(run.path)
    except DualformError as error:
        return wrong if run.left_by is not None and not run.done else [*wrong, f"lost: {error}"]
    if memory.step != run.done:
        wrong.append(f"lost: {run.done} steps were complete, the memory holds {memory.step}")
    ended = memory.store.manifest.ended
    ways = {"closed"} if run.left_by is None else {"interrupted", "closed"} if run.done == STEPS else {"interrupted"}
    if run.done and (ended is None or ended.how not in ways or ended.step != run.done):
        wrong.append(f"other: it says that it ended like this: {ended}")
    hooks = [run.optimizer._optimizer_step_pre_hooks, run.optimizer._optimizer_step_post_hooks]
    if any(hooks) or any(module._forward_hooks for module in run.model.modules()):
        wrong.append("other: hooks are left on the model")
    return wrong + (judge_steps(run, memory) if memory.step and memory.step <= run.done else [])


def judge_steps(run: Run, memory: dualform.Memory) -> list[str]:
    wrong, first, last = [], run.expected[0], memory.step
    model, _ = run.case.make()
    model.load_state_dict(run.states[last])
    certificate, full = memory.certificate, memory.check(model, full=True, progress=False)
    for name, error in certificate.items():
        floor = 10 * max(certificate.floor[name], 1e-12)
        if error > 10 * full[name] + floor or full[name] > 10 * error + floor:
            wrong.append(f"lie: the certificate of {name} says {error:.1e}, it is {full[name]:.1e}")
    if full.worst > 1e-2 and not run.case.clip:
        wrong.append(f"weights: the full check says {full.worst:.1e} after step {last}")
    steps = {last} if run.case.options.get("by") else {1, (last + 1) // 2, last}
    for step in steps:
        for name, tensor in memory.at(step).weights(progress=False).items():
            bar = 1e-10 if tensor.dtype == torch.float64 else 2e-2
            error = off(tensor, run.states[step][name], first.get(name, torch.zeros_like(tensor)))
            if name not in first and not torch.equal(tensor, run.states[step][name]):
                wrong.append(f"weights: the buffer {name} differs at step {step}")
            elif name in first and error > max(bar, 10 * full.get(name, 0.0)):
                wrong.append(f"weights: {name} is off by {error:.1e} at step {step}")
    if run.case.options.get("keep") != "ledger":
        index = torch.cat([run.case.batch(step)[2] for step in range(last)])
        if memory.visits["index"].to_pylist() != index.tolist():
            wrong.append("other: the visits are not those of the batches")
    return wrong


def bring_to_the_end(run: Run) -> list[str]:
    """Resume from the last checkpoint; nobody disturbs that."""
    step = run.checkpoint["step"]
    states = {done: tensors for done, tensors in run.states.items() if done <= step}
    resumed = Run(run.case, run.expected, run.path, False, step, states, run.checkpoint)
    try:
        resumed.train((DualformWarning,) if run.case.strict else ())
    except Exception as error:
        return [f"resume: {type(error).__name__}: {error}"]
    return [f"resumed, {line}" for line in judge(resumed)]
