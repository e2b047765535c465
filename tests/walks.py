"""The walk of a batch to disk: which functions and files of dualform run for it.

    python tests/walks.py

Linear layers, SGD, float16, one process, notes. The second batch of a recording is traced: its note, its forward and
backward pass, its step, and the writing of its shard, which is full after every step here. What is printed:

- main path: functions that bring slots, notes and steps into the files of the shard;
- hops: those of them that call the main path in another file, so that a reader has to follow them there;
- checks (is the memory true?), guards (interrupts, compiled graphs) and look-ups (what the plan says): the tables below
  say which files these are.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.record.shards import shard_builder

PACKAGE = f"{Path(dualform.__file__).parent}/"

GUARDS = ("record/hooks/",)
"""Files whose functions stand around others: interrupts, compiled graphs, copies of hooks."""

CHECKS = (
    "record/verify/",
    "record/rows/",
    "record/distributed/",
    "record/plan/model_links.py",
    "record/training/outside_changes.py",
    "record/training/rule_audit.py",
    "record/state/frozen_weights.py",
    "record/shards/size_report.py",
    "store/format/fingerprint.py",
    "store/fingerprint_table.py",
    "engine/",
)
"""Files whose functions find out whether the memory is true, and add no slot, visit or step to a shard: probes and
fingerprints, marks and the certificate, whose rows these are, the size that is told.
"""

CHECK_NAMES = frozenset(
    [
        "BatchColumns.check",
        "BatchColumns._require_forward",
        "LiveLedger.certificate",
        "RowRun.follow",
        "ShardBuilder._audit",
        "ShardBuilder._certified",
        "ShardBuilder._require_finite",
        "ShardBuilder._not_finite",
        "ShardBuilder._probe",
        "ShardBuilder._update_certificate",
        "ShardBuilder._waiting",
        "ShardBuilder.refused_after_errors",
        "SideColumns.__init__",
        "StepHooks._probe_gradients",
        "StepHooks._check_slots",
        "certificate_lines",
    ]
)
"""Functions of other files that do nothing else."""

LOOKUPS = ("types.py", "rules/", "record/plan/", "record/training/clock.py")
"""Files whose functions only tell what was decided before the first step, or which step it is."""


class Hop(NamedTuple):
    """A function that runs, and its file in the package."""

    file: str
    function: str

    @property
    def kind(self) -> str:
        if self.file.startswith(GUARDS):
            return "guards"
        if self.file.startswith(CHECKS) or self.function in CHECK_NAMES:
            return "checks"
        return "look-ups" if self.file.startswith(LOOKUPS) else "main path"


class Tracer:
    """Collects the functions of dualform that any thread runs."""

    def __init__(self) -> None:
        self.on = False
        self.calls: dict[Hop, set[Hop]] = {}
        """The functions that have run, and what each of them called."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.on or event != "call" or (hop := hop_of(frame)) is None:
            return
        self.calls.setdefault(hop, set())
        if (caller := next(callers(frame), None)) is not None:
            self.calls.setdefault(caller, set()).add(hop)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For this thread and those that begin inside the ``with``."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]


def hop_of(frame: FrameType) -> Hop | None:
    """A function of dualform. Comprehensions and lambdas are none: they are lines of their function."""
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
        return Hop(code.co_filename.removeprefix(PACKAGE), code.co_qualname.replace(".<locals>", ""))
    return None


def callers(frame: FrameType) -> Iterator[Hop]:
    """The functions of dualform that are being run, from the one that has called this one on."""
    while (outer := frame.f_back) is not None:
        frame = outer
        if (hop := hop_of(frame)) is not None:
            yield hop


def kinds(calls: Mapping[Hop, Collection[Hop]]) -> dict[Hop, str]:
    """What each function does for the walk. One that only checks call is a part of the checks."""
    kinds = {hop: hop.kind for hop in calls}
    callers = {hop: [other for other in calls if hop in calls[other] and other != hop] for hop in calls}
    changed = True
    while changed:
        aside = [
            hop
            for hop, kind in kinds.items()
            if kind == "main path" and callers[hop] and all(kinds[other] == "checks" for other in callers[hop])
        ]
        kinds |= dict.fromkeys(aside, "checks")
        changed = bool(aside)
    return kinds


def crossing(calls: Mapping[Hop, Collection[Hop]], main: Collection[Hop]) -> list[Hop]:
    """Functions of the main path that call it in another file."""
    return [hop for hop in main if any(called in main and called.file != hop.file for called in calls[hop])]


def batch_to_disk(folder: Path, make_optimizer: Callable[..., optim.Optimizer] = optim.SGD) -> dict[Hop, set[Hop]]:
    """What runs for the second batch of a recording until its shard is on disk: functions, and what each called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer, tracer = make_optimizer(model.parameters(), lr=0.1), Tracer()
    with pytest.MonkeyPatch.context() as patch, tracer.installed():
        patch.setattr(shard_builder, "SHARD_SECONDS", -1.0)  # each step is a shard
        with dualform.record(model, optimizer, folder / "memory", dtype="float16", progress=False) as tape:
            for tracer.on in (False, True):
                x, y, index = torch.randn(4, 8), torch.arange(4) % 3, torch.arange(4)
                tape.note(index=index, label=y)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                wait_for_disk(folder / "memory", tape.step)
            tracer.on = False
    return tracer.calls


def wait_for_disk(path: Path, steps: int) -> None:
    """Come back when the manifest lists so many steps; nothing of dualform runs for it in this thread."""
    profile = sys.getprofile()
    sys.setprofile(None)
    while dualform.open(path).step < steps:
        threading.Event().wait(0.01)
    threading.Event().wait(0.1)
    sys.setprofile(profile)


def table(title: str, hops: Iterable[Hop]) -> str:
    files: dict[str, list[str]] = {}
    for hop in hops:
        files.setdefault(hop.file, []).append(hop.function)
    lines = [f"  {file:45} {', '.join(functions)}" for file, functions in files.items()]
    return "\n".join([f"{title}: {sum(map(len, files.values()))} functions in {len(files)} files", *lines])


def main() -> None:
    with TemporaryDirectory() as folder:
        calls = batch_to_disk(Path(folder))
    kind_of = kinds(calls)
    main = [hop for hop in calls if kind_of[hop] == "main path"]
    print(table("main path", main), end="\n\n")
    print(table("of these hops", crossing(calls, main)), end="\n\n")
    for kind in ("checks", "guards", "look-ups"):
        print(table(kind, [hop for hop in calls if kind_of[hop] == kind]), end="\n\n")
    print(f"together: {len(calls)} functions in {len({hop.file for hop in calls})} files")


if __name__ == "__main__":
    main()
