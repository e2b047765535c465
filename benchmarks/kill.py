"""Kills a recording again and again, and sees that nothing is lost but the steps that were under way.

    python benchmarks/kill.py --kills 20

A small network learns digits in a process of its own, which is recorded and after every 20 steps flushes and saves a
checkpoint. The process is killed (SIGKILL) at random moments: a third of them before or between the first files, others
while a file is half written. After each kill the memory must open at a complete step and explain the weights of
that step; and resumed from the last checkpoint it must end with the answers of a run that nobody disturbed. Every other
kill hits a run that was killed and resumed before.
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
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from paper_run import machine
from torch import Tensor, nn

import dualform
from dualform.errors import MemoryNotFound, NotAMemory
from dualform.models import MLP

STEPS, BATCH, EVERY = 240, 32, 20
NEAR = 1e-12
EARLY = (0.02, 0.08)
"""Within so many seconds a new recording writes its first files, and one that is resumed drops what came later."""
Answers = dict[str, object]


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


# --------------------------------------------------------------------------------------------------------- the training


Watch = Callable[[int, nn.Module], None]


def train(place: Place, x: Tensor, y: Tensor, watch: Watch = lambda step, model: None) -> MLP:
    """Record the training, from the last checkpoint if there is one."""
    vars(import_module("dualform.record.shelf"))["SHARD_SECONDS"] = 0.02  # many shards: many moments are inside a write
    torch.manual_seed(0)
    model = MLP(x.shape[1], 48, 10).double()
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
                save(place.checkpoint, model, optimizer, tape.step)
    return model


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A checkpoint that is there whole or not at all."""
    with open(path.with_suffix(".new"), "wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".new"), path)


def digits() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits of 8 × 8 pixels."""
    found = import_module("sklearn.datasets").load_digits()
    return torch.from_numpy(found.data) / 16, torch.from_numpy(found.target)


# ------------------------------------------------------------------------------------------------------------- the kill


def killed(place: Place, data: Path, after: float, in_a_write: bool) -> float | None:
    """Let a process train and kill it; how many milliseconds it had, or None if it had come to its end by then."""
    command = [sys.executable, __file__, "--train", str(place.folder), "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()  # ready: the loop begins
        begin = time.perf_counter()
        time.sleep(after)
        while in_a_write and child.poll() is None and not half_written(place):
            pass
        child.send_signal(signal.SIGKILL)
        took, code = time.perf_counter() - begin, child.wait(60)
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the training failed by itself: {child.stderr.read().splitlines()[-1]}")
        return None if code == 0 else 1e3 * took


def half_written(place: Place) -> list[str]:
    return [p.name for p in place.memory.rglob("*.partial")] if place.memory.exists() else []


# ----------------------------------------------------------------------------------------------------------- the checks


def answers(path: Path, model: nn.Module, x: Tensor) -> Answers:
    """What a memory says: weights on the way, the visits, top hits, sums by group."""
    memory = dualform.open(path)
    spot = memory.attend(model, x[:8])
    out: Answers = {"steps": memory.step, "visits": memory.visits.to_pydict()}
    for step in range(0, STEPS + 1, 50):
        out |= {f"{name} at {step}": tensor for name, tensor in memory.at(step).weights(progress=False).items()}
    for layer in memory.layers:
        hits, groups = spot.top(10, layer=layer, progress=False), spot.by("label", layer=layer, progress=False)
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
        steps = "none" if self.steps is None else str(self.steps)
        error = "" if self.certificate is None else f"{self.certificate:.1e}"
        resumed = "anew" if self.resumed is None else str(self.resumed)
        return f"{self.at:>9.1f}  {self.left:<29} {steps:>11}  {error:>11}  {resumed:>12}  {self.wrong or 'yes'}"


def look(place: Place, weights: dict[int, dict[str, Tensor]], line: Line) -> None:
    """Open what the kill left: it stands at a complete step, and explains the weights of that step."""
    if place.memory.exists():
        inside = sorted(p.name for p in place.memory.iterdir() if p.is_file() and p.name != ".lock")
        whole = "whole files" if "manifest.json" in inside else ", ".join(inside)
        line.left = ", ".join(half_written(place)) or whole or "a folder"
    try:
        memory = dualform.open(place.memory)
    except (MemoryNotFound, NotAMemory):
        assert not (place.memory / "manifest.json").exists()
        return
    line.steps, line.resumed = memory.step, place.resume
    assert line.resumed is not None and line.resumed <= memory.step, "a flushed step was lost"
    if not memory.step:
        return
    model = MLP(64, 48, 10).double()
    model.load_state_dict(weights[memory.step])
    line.certificate = max(memory.check(model, full=True, progress=False).worst, memory.certificate.worst)
    assert line.certificate <= NEAR, "the certificate does not hold"
    assert memory.visits.num_rows == BATCH * memory.step, "visits are missing"


def main(kills: int, seed: int) -> int:
    """Kill, look, resume, compare."""
    print(machine())
    luck, failed = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="dualform-kill-") as folder:
        root, weights = Path(folder), dict[int, dict[str, Tensor]]()
        x, y = digits()
        torch.save((x, y), root / "data.pt")
        whole = Place(root / "whole")
        whole.folder.mkdir()
        begin = time.perf_counter()
        model = train(whole, x, y, lambda step, m: weights.update({step: copy.deepcopy(m.state_dict())}))
        lasts = time.perf_counter() - begin
        expected = answers(whole.memory, model, x)
        shards = len(list((whole.memory / "shards").iterdir()))
        print(f"undisturbed: {STEPS} steps, {1e3 * lasts:.0f} ms, {shards} shards, a checkpoint every {EVERY} steps\n")
        print("kill      at ms  left behind                   steps found  certificate  resumed from  equal?")
        place, number = Place(root / "run"), 0
        while number < kills:
            if number % 2 == 0:  # the others go on with what the kill before left
                shutil.rmtree(place.folder, ignore_errors=True)
                place.folder.mkdir()
            early, resumed = number % 3 == 0, number % 2
            after = luck.uniform(0, EARLY[resumed] if early else 0.8 * lasts)
            try:
                at = killed(place, root / "data.pt", after, in_a_write=number % 3 == 1)
            except RuntimeError as error:
                line = Line(1e3 * after, wrong=str(error))
            else:
                if at is None:  # too late: once more, from the beginning
                    shutil.rmtree(place.folder)
                    place.folder.mkdir()
                    continue
                line = judged(place, Place(root / "copy"), weights, expected, x, y, Line(at))
            number += 1
            failed += line.wrong is not None
            print(f"{number:>4}  {line}", flush=True)
    print(f"\n{kills - failed} passed, {failed} failed")
    return int(failed > 0)


def judged(place: Place, other: Place, weights: dict, expected: Answers, x: Tensor, y: Tensor, line: Line) -> Line:
    """Look at what was left and bring a copy of it to the end; the run itself may be killed once more."""
    shutil.rmtree(other.folder, ignore_errors=True)
    try:
        look(place, weights, line)
        shutil.copytree(place.folder, other.folder)
        model = train(other, x, y)
        line.wrong = difference(answers(other.memory, model, x), expected)
        if half_written(other):
            line.wrong = f"{half_written(other)[0]} is still there"
    except Exception as error:
        line.wrong = f"{type(error).__name__}: {error}"
    return line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.train is None:
        sys.exit(main(chosen.kills, chosen.seed))
    pictures, classes = torch.load(chosen.data)
    train(Place(chosen.train), pictures, classes, lambda step, _: None if step else print("ready", flush=True))
