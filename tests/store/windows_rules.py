"""Run a recording as Windows and macOS would see it: ``python windows_rules.py FOLDER``.

POSIX modules cannot be imported and POSIX calls are missing from ``os``. A file that is open or mapped can neither be
removed nor replaced, a folder cannot be opened, and bytes need ``O_BINARY``. The script prints, as JSON, the checksums
of the files and what the memories answer.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401
import filelock  # noqa: F401
import numpy  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch
import torch.distributed
import xxhash  # noqa: F401

MODULES = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"]
CALLS = (
    "O_DIRECT O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_SYNC O_DSYNC posix_fadvise posix_fallocate fdatasync "
    "sync pread pwrite preadv pwritev fork forkpty setpriority getpriority PRIO_PROCESS nice "
    "sched_getaffinity sched_setaffinity uname statvfs fstatvfs getloadavg sysconf getuid geteuid getpgid "
    "setsid killpg mkfifo chown lchown register_at_fork set_blocking sendfile splice "
    "copy_file_range memfd_create "
)
BINARY = 1 << 30
DIRECT_FROM = 1 << 16
"""Files of this size count as large, so that the small ones of the test are written as large ones are."""

real_open, real_replace, real_unlink = os.open, os.replace, os.unlink


def hide_posix() -> None:
    """Take away what other systems do not have. What is imported by now (torch, pyarrow, …) keeps what it has."""
    for module in MODULES:
        sys.modules[module] = None  # type: ignore[assignment] # importing it raises ImportError
    for call in CALLS.split():
        if hasattr(os, call):
            delattr(os, call)


def refused(path: Any) -> PermissionError:
    error = PermissionError(13, "Access is denied", str(path))
    error.winerror = 5  # type: ignore[attr-defined]
    return error


def in_use(path: Any) -> bool:
    """Whether this process has the file open, or mapped."""
    file = os.path.realpath(path)
    if any(line.rstrip("\n").endswith(file) for line in open("/proc/self/maps", encoding="utf-8")):  # noqa: SIM115
        return True
    handles = (Path("/proc/self/fd") / handle for handle in os.listdir("/proc/self/fd"))
    return file in [os.path.realpath(handle) for handle in handles]


def open_on_windows(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
    if os.path.isdir(path):
        raise refused(path)
    if str(path).endswith(".partial") and flags & os.O_WRONLY:
        assert flags & BINARY, f"{path} is opened as text"
    return real_open(path, flags & ~BINARY, mode, **options)


def replace_on_windows(source: Any, target: Any, **options: Any) -> None:
    for path in (source, target):
        if os.path.exists(path) and in_use(path):
            raise refused(path)
    real_replace(source, target, **options)


def unlink_on_windows(path: Any, **options: Any) -> None:
    if os.path.exists(path) and in_use(path):
        raise refused(path)
    real_unlink(path, **options)


def follow_windows() -> None:
    os.open, os.replace, os.unlink, os.remove = (
        open_on_windows,
        replace_on_windows,
        unlink_on_windows,
        unlink_on_windows,
    )
    os.O_BINARY = BINARY  # type: ignore[attr-defined]


def run(folder: Path) -> dict[str, Any]:
    """Record, ask, resume and write over memories of several kinds; the checksums of their files, and answers."""
    dualform = importlib.import_module("dualform")
    if os.open is open_on_windows:
        sys.platform = "win32"  # only now: other packages load parts of themselves by this name
    errors = importlib.import_module("dualform.errors")

    def train(name: str, steps: int = 3, resume: int | None = None, **options: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(90, 70), torch.nn.ReLU(), torch.nn.Linear(70, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def take(step: int) -> None:
            x, y = torch.randn(300, 90, generator=torch.Generator().manual_seed(step)), torch.arange(300) % 4
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        for step in range(resume or 0):
            take(step)
        with dualform.record(model, optimizer, folder / name, progress=False, resume=resume, **options) as tape:
            for step in range(tape.step, steps):
                tape.note(index=torch.arange(300), label=torch.arange(300) % 4)
                take(step)
                tape.flush()
        return model

    def answer(name: str, model: Any) -> dict[str, Any]:
        memory = dualform.open(folder / name)
        spot = memory.attend(model, torch.ones(1, 90))
        files = {file: entry.xxh3 for file, entry in memory.store.manifest.files.items()}
        return {
            "step": memory.step,
            "files": files,
            "top": [[hit.index, hit.contribution] for hit in spot.top(3, layer="2", per="slot")],
        }

    answers: dict[str, Any] = {}
    model = train("slots")
    answers["slots"] = answer("slots", model)
    memory = dualform.open(folder / "slots")
    memory.attend(model, torch.ones(1, 90)).top(3, layer="2", per="slot")
    try:
        train("slots", 2, overwrite=True)
        answers["refused"] = ""
    except errors.WriteError as error:
        answers["refused"] = str(error)
    del memory
    gc.collect()
    answers["replaced"] = answer("slots", train("slots", 2, overwrite=True))
    gc.collect()
    answers["resumed"] = answer("slots", train("slots", 3, resume=1))
    train("ledger", 4, keep="ledger", by="label")
    answers["ledger"] = dualform.open(folder / "ledger").step
    return answers


if __name__ == "__main__":
    hide_posix()
    follow_windows()
    os.fsync = lambda file: None  # the test is about names and bytes, not about a power cut
    setattr(importlib.import_module("dualform.store.io.direct_io"), "DIRECT_FROM", DIRECT_FROM)  # noqa: B010
    print(json.dumps(run(Path(sys.argv[1]))))
