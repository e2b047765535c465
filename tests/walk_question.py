"""Which functions and files one question passes: ``python tests/walk_question.py`` lists them for SGD and for Adam.

The question is ``memory.attend(model, x).top(5, layer="0", per="slot")`` to a memory that was just opened. Its hops are
the functions that hand it on to another file, as in ``tests/walks.py``: a reader has to follow them there.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from helpers import batches, mlp, trained
from torch import nn, optim
from walks import Hop, Tracer, crossing

import dualform

SOURCE = str(Path(dualform.__file__).parent) + "/"
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")


ASIDE = (
    "record/hooks/",
    "record/layers/",
    "explain/weights/model_identity.py",
    "explain/query/model_shadow.py",
    "explain/query/object_references.py",
    "store/cache.py",
    "store/fingerprint_table.py",
    "store/format/fingerprint.py",
    "store/inference_mode.py",
    "store/snapshots.py",
    "store/step_table.py",
    "rules/",
    "types.py",
    "progress.py",
)
"""Checks (is it this model?), the copy of the model that is asked, hooks of layer kinds, caches and look-ups."""


def hops_of_top(optimizer: Callable[[nn.Module], optim.Optimizer], path: Path) -> list[Hop]:
    """The functions that hand a question on to another file, in a memory that has been asked before."""
    model, tracer = mlp(4, 6, 3), Tracer()
    run = trained(path, model, optimizer(model), batches(4, 5, 4, 3))
    memory, x = dualform.open(path), run.inputs[:2]
    with tracer.installed():
        for tracer.on in (False, True):
            memory.attend(model, x).top(5, layer="0", per="slot")
        tracer.on = False
    return crossing(tracer.calls, [hop for hop in tracer.calls if not hop.file.startswith(ASIDE)])


def walk(question: Callable[[], Any]) -> list[tuple[str, str]]:
    """The functions of dualform that a question calls, as (file, function), in the order of their first call."""
    hops: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name not in COMPREHENSIONS:
            hops[code.co_filename.removeprefix(SOURCE), code.co_qualname] = None

    sys.setprofile(note)
    try:
        question()
    finally:
        sys.setprofile(None)
    return list(hops)


def walks_of_top(optimizer: Callable[[nn.Module], optim.Optimizer], path: Path) -> list[list[tuple[str, str]]]:
    """The walks of two questions to a memory, each one ``attend`` and one ``top``: the first opens its files."""
    model = mlp(4, 6, 3)
    run = trained(path, model, optimizer(model), batches(4, 5, 4, 3))
    memory, x = dualform.open(path), run.inputs[:2]
    return [walk(lambda: memory.attend(model, x).top(5, layer="0", per="slot")) for _ in range(2)]


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.01)


def show(title: str, hops: list[tuple[str, str]]) -> None:
    files: dict[str, list[str]] = {}
    for file, function in hops:
        files.setdefault(file, []).append(function)
    folders = Counter(file.split("/")[0] for file in files)
    print(f"\n{title}: {len(hops)} functions in {len(files)} files")
    print("  files by folder: " + ", ".join(f"{folder} {count}" for folder, count in folders.most_common()))
    for file, functions in files.items():
        print(f"  {file:<40} {', '.join(functions)}")


def main() -> None:
    torch.manual_seed(0)
    for optimizer in (sgd, adam):
        with tempfile.TemporaryDirectory() as folder:
            first, second = walks_of_top(optimizer, Path(folder) / "memory")
        show(f"{optimizer.__name__}, first question", first)
        show(f"{optimizer.__name__}, second question", second)
        with tempfile.TemporaryDirectory() as folder:
            show(
                f"{optimizer.__name__}, hops",
                [(hop.file, hop.function) for hop in hops_of_top(optimizer, Path(folder) / "memory")],
            )


if __name__ == "__main__":
    main()
