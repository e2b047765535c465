"""Kills a recording again and again, and sees that nothing is lost but the steps that were under way.

    python benchmarks/kill.py --kills 20

A small network learns digits in a process of its own, which is recorded and after every 20 steps flushes and saves a
checkpoint. The process is killed (SIGKILL) at random moments: a third of them while the first files are written or a
resume drops what came later, a third while a file is half written. After each kill the memory must open at a complete
step and explain the weights of that step; and resumed from the last checkpoint it must end with the answers of a run
that nobody disturbed. Every other kill hits a run that was killed before.
"""

import argparse
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from paper_run import machine, save
from sklearn.datasets import load_digits
from torch import Tensor, nn

import dualform
from dualform.errors import MemoryNotFound, NotAMemory
from dualform.record.shards import shard_builder as shelf

KILLS, STEPS, BATCH, EVERY = 20, 240, 32, 20
NEAR = 1e-12
EARLY = (0.02, 0.08)
"""Within so many seconds a new recording writes its first files, and one that is resumed drops what came later."""

States = Mapping[int, Mapping[str, Tensor]]
Answers = Mapping[str, object]


@dataclass(frozen=True)
class Place:
    """Where one run keeps its memory and its checkpoint."""

    folder: Path

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def resume(self) -> int | None:
        """The step to go on from: that of the checkpoint, else the first; None where there is no memory yet."""
        if not (self.memory / "manifest.json").exists():
            return None
        return torch.load(self.checkpoint)["step"] if self.checkpoint.exists() else 0

    @property
    def half_written(self) -> list[str]:
        return [file.name for file in self.memory.rglob("*.partial")] if self.memory.exists() else []

    def clear(self) -> "Place":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return self


# ------------------------------------------------------------------------------------------------------------- training


def network() -> nn.Sequential:
    """The normalisation is the rest: its parameters and statistics change with every step, kept as snapshots."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)).double()


def data() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits of 8 × 8 pixels."""
    pixels, classes = load_digits(return_X_y=True)
    return torch.from_numpy(pixels) / 16, torch.from_numpy(classes)


def train(place: Place, watch: Callable[[int, nn.Module], object] = lambda step, model: None) -> nn.Module:
    """Record the training, from the last checkpoint if there is one."""
    shelf.SHARD_SECONDS = 0.02  # many shards: many moments are inside a write
    x, y = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    if place.resume:
        saved = torch.load(place.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    watch(0, model)
    with dualform.record(
        model, optimizer, place.memory, dtype="float64", resume=place.resume, progress=False
    ) as tape:  # fmt: skip
        while tape.step < STEPS:
            index = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(tape.step))
            tape.note(index=index, label=y[index])
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch(tape.step, model)
            if tape.step % EVERY == 0:
                tape.flush()
                checkpoint(place.checkpoint, model, optimizer, tape.step)
    return model


def checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A checkpoint that is there whole or not at all."""
    with open(path.with_suffix(".new"), "wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".new"), path)


# ------------------------------------------------------------------------------------------------------------- the kill


def kill(place: Place, after: float, in_a_write: bool) -> float | None:
    """Let a process train and kill it; how many milliseconds it had, or None if it had come to its end by then."""
    command = [sys.executable, __file__, "--train", str(place.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()  # the loop begins
        begin = time.perf_counter()
        time.sleep(after)
        while in_a_write and child.poll() is None and not place.half_written:
            pass
        child.send_signal(signal.SIGKILL)
        took, code = time.perf_counter() - begin, child.wait(60)
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the training failed by itself: {child.stderr.read().splitlines()[-1]}")
        return None if code == 0 else 1e3 * took


# ------------------------------------------------------------------------------------------------------------ the check


@dataclass
class Line:
    """What a kill left, and what became of it."""

    at: float
    left: str = "nothing yet"
    steps: int | None = None
    certificate: float | None = None
    resumed: int | None = None
    wrong: str | None = None

    def __str__(self) -> str:
        steps = "none" if self.steps is None else self.steps
        error = "" if self.certificate is None else f"{self.certificate:.1e}"
        resumed = "anew" if self.resumed is None else self.resumed
        return f"{self.at:.0f} | {self.left} | {steps} | {error} | {resumed} | {self.wrong or 'yes'} |"


def judge(place: Place, other: Place, states: States, expected: Answers, line: Line) -> None:
    """Look at what was left and bring a copy of it to the end; the run itself may be killed once more."""
    try:
        look(place, states, line)
        shutil.rmtree(other.folder, ignore_errors=True)
        shutil.copytree(place.folder, other.folder)
        line.wrong = difference(answers(other.memory, train(other)), expected)
        if other.half_written:
            line.wrong = f"{other.half_written[0]} is still there"
    except Exception as error:
        line.wrong = f"{type(error).__name__}: {error}"


def look(place: Place, states: States, line: Line) -> None:
    """Open what the kill left: it stands at a complete step, and explains the weights of that step."""
    if place.memory.exists():
        inside = sorted(file.name for file in place.memory.iterdir() if file.is_file() and file.name != ".lock")
        whole = "whole files" if "manifest.json" in inside else ", ".join(inside)
        line.left = ", ".join(place.half_written) or whole or "a folder"
    try:
        memory = dualform.open(place.memory)
    except (MemoryNotFound, NotAMemory):
        assert not (place.memory / "manifest.json").exists()
        return
    line.steps, line.resumed = memory.step, place.resume
    assert line.resumed is not None and line.resumed <= memory.step, "a flushed step was lost"
    for name, tensor in memory.weights(progress=False).items() if memory.step else ():
        off = (tensor - states[memory.step][name]).abs().max().item()
        assert off <= NEAR, f"{name} is off by {off:.1e}"
    if memory.step:
        model = network()
        model.load_state_dict(states[memory.step])
        line.certificate = max(memory.check(model, full=True, progress=False).worst, memory.certificate.worst)
        assert line.certificate <= NEAR, "the certificate does not hold"
        assert memory.visits.num_rows == BATCH * memory.step, "visits are missing"


def answers(path: Path, model: nn.Module) -> Answers:
    """What a memory says: weights on the way, the visits, top hits, sums by group."""
    memory = dualform.open(path)
    spot = memory.attend(model, data()[0][:8])
    out: dict[str, object] = {"steps": memory.step, "visits": memory.visits.to_pydict()}
    for step in range(0, STEPS + 1, 30):
        out |= {f"{name} at {step}": tensor for name, tensor in memory.at(step).weights(progress=False).items()}
    for layer in memory.layers:
        hits, groups = (
            spot.top(10, layer=layer, progress=False, per="slot"),
            spot.by("label", layer=layer, progress=False),
        )
        out |= {f"top of {layer}": hits.slots.tolist(), f"columns of {layer}": hits.columns.to_pydict()}
        out |= {f"weights of {layer}": hits.weight, f"contributions of {layer}": hits.contribution}
        out |= {f"groups of {layer}": groups.values, f"names of {layer}": groups.names}
    for group, parts in memory.ledger("label", progress=False).items():
        out |= {f"{name} from {group}": tensor for name, tensor in parts.items()}
    return out


def difference(found: Answers, expected: Answers) -> str | None:
    """The first answer that differs."""
    for name, value in expected.items():
        other = found.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            off = (value - other).abs().max().item() if value.shape == other.shape else float("inf")
            if not off <= NEAR * max(1.0, value.abs().max().item()):
                return f"'{name}' is off by {off:.1e}"
        elif value != other:
            return f"'{name}' differs"
    return None


# ------------------------------------------------------------------------------------------------------------ the table


def main(kills: int, seed: int) -> int:
    """Kill, look, resume, compare."""
    luck, lines, failed = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory(prefix="dualform-kill-") as folder:
        place, other, whole = (Place(Path(folder) / name) for name in ("run", "copy", "whole"))
        states: dict[int, Mapping[str, Tensor]] = {}
        times: list[float] = []

        def watch(step: int, model: nn.Module) -> None:
            states[step] = copy.deepcopy(model.state_dict())
            times.append(time.perf_counter())

        model = train(whole.clear(), watch)
        lasts = times[-1] - times[0]
        expected = answers(whole.memory, model)
        shards = len(list((whole.memory / "shards").iterdir()))
        while len(lines) < kills:
            number = len(lines)
            early, again, in_a_write = number % 3 == 0, number % 2, number % 3 == 1
            if not again:
                place.clear()
            line = Line(luck.uniform(0, EARLY[again] if early else 0.8 * lasts))
            try:
                at = kill(place, line.at, in_a_write)
            except RuntimeError as error:
                line.wrong = str(error)
            else:
                if at is None:  # too late: once more, from the beginning
                    place.clear()
                    continue
                line.at = at
                judge(place, other, states, expected, line)
            failed += line.wrong is not None
            lines.append(f"| {number + 1} | {line}")
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    text = f"""64-48-10 with batch normalisation on digits of 8 × 8 pixels, {STEPS} steps of {BATCH}, float64 memory,
a flush and a checkpoint every {EVERY} steps. Undisturbed it took {1e3 * lasts:.0f} ms and {shards} shards.

| kill | after, ms | left behind | steps found | certificate | resumed from | ends like the undisturbed run? |
|---|---|---|---|---|---|---|
{table}

{kills - failed} passed, {failed} failed. Every second kill hit the run that the kill before it had left.
Machine: {machine()}."""
    if kills >= KILLS:
        save("kill", text)
    else:
        print(text)
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=KILLS, help=f"fewer than {KILLS} are printed only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.train is None:
        sys.exit(main(chosen.kills, chosen.seed))
    train(Place(chosen.train), lambda step, _: None if step else print("ready", flush=True))
