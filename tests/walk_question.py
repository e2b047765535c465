"""Which functions and files one question passes: ``python tests/walk_question.py`` lists them for SGD and for Adam.

The question is ``memory.attend(model, x).top(5, layer="0")`` to a memory that was just opened.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from helpers import batches, mlp, trained
from torch import nn, optim

import dualform

SOURCE = str(Path(dualform.__file__).parent) + "/"
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")


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


def walk_of_top(optimizer: Callable[[nn.Module], optim.Optimizer], path: Path) -> list[tuple[str, str]]:
    """The walk of one ``attend`` and one ``top``."""
    model = mlp(4, 6, 3)
    run = trained(path, model, optimizer(model), batches(4, 5, 4, 3))
    memory, x = dualform.open(path), run.inputs[:2]
    return walk(lambda: memory.attend(model, x).top(5, layer="0"))


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.01)


def main() -> None:
    torch.manual_seed(0)
    for optimizer in (sgd, adam):
        with tempfile.TemporaryDirectory() as folder:
            hops = walk_of_top(optimizer, Path(folder) / "memory")
        files: dict[str, list[str]] = {}
        for file, function in hops:
            files.setdefault(file, []).append(function)
        print(f"\n{optimizer.__name__}: {len(hops)} functions in {len(files)} files")
        for file, functions in files.items():
            print(f"  {file:<40} {', '.join(functions)}")


if __name__ == "__main__":
    main()
