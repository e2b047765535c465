"""Interrupts a recording (Ctrl-C, SIGINT) again and again, and sees that no complete step is lost and nothing is wrong.

    python benchmarks/interrupts.py --count 1000 --seed 0

Small networks and one of the README's size are trained in processes of their own, with slots and with ledgers. They are
interrupted at random instants, from outside, and at chosen lines: in every hook, in the optimiser's step, in digest,
hand-over, flush and close. Half of the loops go on inside the same ``with`` after an interrupt, the others leave it.
Afterwards every memory is compared with a training that nobody recorded or disturbed: its steps, its weights, its
visits and its certificate; and some are resumed from a checkpoint and brought to the end.

Further runs have an error raised at such a line in place of a signal (as an exhausted memory would be): there a memory
may end earlier if it says so, and still nothing may be wrong.
"""

import argparse
import copy
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from paper_run import machine, save
from torch import Tensor, nn, optim

import dualform
from dualform.errors import DualformError, DualformWarning
from dualform.memory import writer
from dualform.models import MLP
from dualform.record import interrupts, shelf

COUNT, STEPS, BATCH, EVERY = 1000, 24, 8, 8
SHOTS = 3
"""Interrupts that a run is to get."""

RECORD = Path(interrupts.__file__).parent
FILES = {str(file) for file in (*RECORD.rglob("*.py"), writer.__file__, *Path(optim.__file__).parent.glob("*.py"))}
FILES -= {interrupts.__file__}  # the handler itself

PLACES = {
    ("tape.py", "__enter__"): "begin", ("tape.py", "__exit__"): "close", ("tape.py", "note"): "note",
    ("tape.py", "flush"): "flush", ("kind.py", "_after"): "forward hook", ("passes.py", "_error"): "backward hook",
    ("passes.py", "_ended"): "end of backward", ("steps.py", "_before"): "hook before the step",
    ("steps.py", "_after"): "hook after the step", ("shelf.py", "_digest"): "digest",
    ("shelf.py", "_closed"): "hand-over", ("shelf.py", "_send"): "hand-over",
    (Path(interrupts.STEP.co_filename).name, interrupts.STEP.co_name): "optimiser's step",
}  # fmt: skip
"""Functions, and what the page calls all that happens inside them."""


# ------------------------------------------------------------------------------------------------------------ trainings


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


def undisturbed(case: Case) -> list[Mapping[str, Tensor]]:
    """The weights after each step, without recording."""
    model, optimizer = case.make()
    states: list[Mapping[str, Tensor]] = [weights_of(model)]
    for step in range(STEPS):
        take_step(case, model, optimizer, step)
        states.append(weights_of(model))
    return states


# ------------------------------------------------------------------------------------------------------------- one run


@dataclass
class Run:
    """A recorded training that is disturbed, and what is known of it."""

    case: Case
    expected: list[Mapping[str, Tensor]]
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

    def train(self, catch: tuple[type[BaseException], ...], again: Callable[[], None] = lambda: None) -> None:
        """Train, recorded. The loop goes on after what it catches, or leaves."""
        self.model, self.optimizer = self.case.make()
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
                        take_step(self.case, self.model, self.optimizer, self.done, tape.note)
                        self.look()
                        if self.done % EVERY == 0:
                            tape.flush()
                            self.save(tape.step)
                    except catch as error:
                        self.said.append(f"{type(error).__name__}: {error}")
                        self.look()
                        again()
                        if self.leaves or isinstance(error, DualformError):
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
    resumed = Run(run.case, run.expected, run.path, False, step, dict(run.states), run.checkpoint)
    try:
        resumed.train((DualformWarning,) if run.case.strict else ())
    except Exception as error:
        return [f"resume: {type(error).__name__}: {error}"]
    return [f"resumed, {line}" for line in judge(resumed)]


# ---------------------------------------------------------------------------------------------------- where it is hit


class Aim:
    """Calls ``shoot`` when so many lines of a place have been run."""

    def __init__(self, targets: set[tuple[str, int]], shoot: Callable[[], None]) -> None:
        self.targets, self.shoot = targets, shoot
        self.lines: Counter[str] = Counter()
        self.hit: Counter[str] = Counter()

    def begin(self) -> None:
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and (place := place_of(frame)):
            self.lines[place] += 1
            if (place, self.lines[place]) in self.targets:
                self.hit[place] += 1
                self.shoot()
        return self._line


def place_of(frame: FrameType | None) -> str | None:
    while frame is not None:
        code = frame.f_code
        if (place := PLACES.get((os.path.basename(code.co_filename), code.co_name))) and code.co_filename in FILES:
            return place
        frame = frame.f_back
    return None


class Injected(Exception):
    """In place of what nobody foresees."""


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise Injected("no memory left")


class Armed:
    """The user's own handler: an interrupt counts while a run is under way."""

    def __init__(self) -> None:
        self.on, self.late = False, 0
        signal.signal(signal.SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.on:
            raise KeyboardInterrupt
        self.late += 1


# ------------------------------------------------------------------------------------------------------- the processes


def child(number: int, how: str, runs: int, seed: int) -> None:
    """Run a case again and again, disturbed, and print what was found: one line a run."""
    case, luck, armed = CASES[number], random.Random(f"{number} {how} {seed}"), Armed()
    shelf.DIGEST_STEPS = 3
    expected = undisturbed(case)
    if case.strict:
        warnings.simplefilter("error")
    catch = (KeyboardInterrupt, DualformWarning) if how != "error" else (Injected, DualformWarning, DualformError)
    with tempfile.TemporaryDirectory(prefix="dualform-interrupts-") as folder:
        lines = count_lines(case, expected, Path(folder) / "first")
        for turn in range(runs):
            run = Run(case, expected, Path(folder) / str(turn), leaves=bool(turn % 2))
            places = sorted(lines) if how == "line" else ["digest", "hand-over", "flush", "close"]
            targets = {(place, luck.randint(1, lines[place])) for place in luck.choices(places, k=SHOTS)}
            aim = Aim(targets if how != "instant" else set(), interrupt if how == "line" else fail)
            print("go", flush=True)
            one(run, aim, armed, catch, how)
            wrong = judge(run)
            if how == "error":
                wrong = [line for line in wrong if not (line.startswith(("lost", "other: it says")) and run.said)]
            elif turn % 4 < 2 and run.checkpoint and not wrong and run.done >= run.checkpoint["step"]:
                wrong = bring_to_the_end(run)
            print(json.dumps({"hit": aim.hit, "late": armed.late, "wrong": wrong}), flush=True)


def one(run: Run, aim: Aim, armed: Armed, catch: tuple[type[BaseException], ...], how: str) -> None:
    """A disturbed run; also what comes while the loop is not looking is caught."""
    try:
        armed.on = True
        if how != "instant":
            aim.begin()
        run.train(catch, aim.begin if how != "instant" else lambda: None)
    except catch as error:
        run.left_by = error
    finally:
        sys.settrace(None)
        armed.on = False
    run.look()


def count_lines(case: Case, expected: list[Mapping[str, Tensor]], path: Path) -> Counter[str]:
    """How many lines each place has in a run that nobody disturbs."""
    aim = Aim(set(), lambda: None)
    aim.begin()
    Run(case, expected, path, leaves=False).train((DualformWarning,) if case.strict else (), aim.begin)
    sys.settrace(None)
    return aim.lines


@dataclass
class Tally:
    """What the runs of one kind came to."""

    runs: int = 0
    sent: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def of(self, *kinds: str) -> int:
        return sum(line.startswith(kinds) for line in self.wrong)

    @property
    def line(self) -> str:
        others = len(self.wrong) - self.of("lost", "half", "weights", "lie")
        return f"{self.runs} | {self.sent} | {self.of('lost')} | {self.of('half', 'weights')} | {self.of('lie')} | {others} |"


def disturb(number: int, how: str, shots: int, seed: int) -> Tally:
    """Let a process run a case until it was hit so often; in ``instant`` the signals come from here."""
    tally, luck, late, lasts = Tally(), random.Random(seed), 0, 0.3
    runs = max(2, round(shots / (SHOTS * (0.9 if how != "instant" else 0.8))))
    command = [sys.executable, __file__, "--child", str(number), how, str(runs), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() == "go\n":
            begin, sent = time.perf_counter(), 0
            while how == "instant" and sent < SHOTS:
                if select.select([process.stdout], [], [], luck.uniform(0, 2 * lasts / SHOTS))[0]:
                    break
                process.send_signal(signal.SIGINT)
                sent += 1
            report = json.loads(process.stdout.readline())
            lasts = 0.7 * lasts + 0.3 * min(1.0, time.perf_counter() - begin)
            tally.runs += 1
            tally.sent += (sent - report["late"] + late) if how == "instant" else sum(report["hit"].values())
            tally.hit.update(report["hit"])
            tally.wrong += report["wrong"]
            late = report["late"]
        if process.wait(60) or tally.runs < runs:
            tally.wrong.append(f"other: the process failed: {process.stderr.read()[-1500:]}")
    return tally


def main(count: int, seed: int) -> int:
    """Disturb all cases, and print what came of it."""
    begin, rows, places, wrong, total = time.perf_counter(), [], Counter[str](), [], Counter[str]()
    for how, share, title in (
        ("line", 0.65, "SIGINT at a line"),
        ("instant", 0.4, "SIGINT at an instant"),
        ("error", 0.2, "error at a line"),
    ):
        for number, case in enumerate(CASES):
            tally = disturb(number, how, round(count * share / len(CASES)), seed)
            rows.append(f"| {case.name} | {title} | {tally.line}")
            print(rows[-1], *sorted(set(tally.wrong))[:5], sep="\n", flush=True)
            wrong += [f"{case.name}, {title}: {line}" for line in tally.wrong]
            total[how] += tally.sent
            places.update(tally.hit if how == "line" else {})
    signals = total["line"] + total["instant"]
    text = page(rows, places, wrong, signals, total["error"], seed, time.perf_counter() - begin)
    if count >= COUNT:
        save("interrupts", text)
    else:
        print(text)
    return int(bool(wrong))


def page(
    rows: list[str], places: Counter[str], wrong: list[str], signals: int, errors: int, seed: int, seconds: float
) -> str:
    table, where = "\n".join(rows), "\n".join(f"| {place} | {hits} |" for place, hits in sorted(places.items()))
    said = "\n".join(f"- {line}" for line in wrong[:20])
    return f"""{signals:,} interrupts (SIGINT) and {errors} errors, {STEPS} steps of {BATCH} a run, up to {SHOTS} interrupts a run; a shard after every
flush ({EVERY} steps), steps are looked through after every third. `python benchmarks/interrupts.py --seed {seed}`, {seconds:.0f} s.
{len(wrong)} problems.

| training | disturbed by | runs | times | lost steps | wrong weights | certificates that lie | other problems |
|---|---|---|---|---|---|---|---|
{table}

A step is lost if the optimiser had taken it and the memory does not hold it (after an error: without saying so); weights
are wrong if they are not those of a training that nobody recorded or disturbed, within the certificate; a certificate
lies if it is not within 10 × of the full sum. Other problems: visits, hooks left behind, a memory that does not say how it
ended, a resume that fails. Where the lines were:

| inside | interrupts |
|---|---|
{where}

{said}
Machine: {machine()}."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT, help=f"fewer than {COUNT} are printed only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.child is None:
        sys.exit(main(chosen.count, chosen.seed))
    child(int(chosen.child[0]), chosen.child[1], int(chosen.child[2]), int(chosen.child[3]))
