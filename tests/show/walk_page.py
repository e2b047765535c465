"""The way of a page: which functions and files of dualform run between a request and the question to the memory.

    python tests/show/walk_page.py [-v]

records a small network, serves one prediction page through the ASGI application, and lists every function of dualform
in the order of its first call, up to ``Attribution.ask``. ``-v`` prints the list; without it only counts are printed.
"""

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import dualform
from dualform.models import MLP
from dualform.show.examples import Examples
from dualform.show.views import Explorer
from dualform.show.web.app import make_app

PACKAGE = Path(dualform.__file__).parent
QUESTION = ("explain/attribution.py", "ask")
NOT_FUNCTIONS = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


@dataclass
class Walk:
    """The functions of dualform in the order of their first call."""

    steps: list[tuple[str, str]] = field(default_factory=list)

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(PACKAGE) or frame.f_code.co_name in NOT_FUNCTIONS:
            return
        step = str(file.relative_to(PACKAGE)), frame.f_code.co_name
        if step not in self.steps:
            self.steps.append(step)

    def before(self, is_end: Callable[[tuple[str, str]], bool]) -> list[tuple[str, str]]:
        end = next(i for i, step in enumerate(self.steps) if is_end(step))
        return self.steps[:end]

    def to_question(self) -> list[tuple[str, str]]:
        return self.before(lambda step: step == QUESTION)


@contextmanager
def profiling(walk: Walk) -> Iterator[None]:
    """Profile this thread and those that start in the block: pages run in a thread of their own."""
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def get(app: Any, path: str) -> tuple[int, bytes]:
    """The status and the body of a page, from the application itself."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"host", b"localhost")], "server": ("localhost", 80), "client": ("127.0.0.1", 1), "state": {},
    }  # fmt: skip
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    asyncio.run(app(scope, receive, send))
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages)


def small_explorer(folder: Path) -> Explorer:
    """An explorer of a small recorded network."""
    torch.manual_seed(0)
    x, labels = torch.rand(60, 16), torch.arange(60) % 3
    model = MLP(16, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, folder, progress=False) as tape:
        for step in range(12):
            index = torch.arange(5 * step, 5 * step + 5)
            tape.note(index=index, label=labels[index])
            nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    examples = Examples(x, labels)
    return Explorer(dualform.open(folder), model, examples, examples)


def walk_prediction(folder: Path, path: str = "/prediction/test/3") -> Walk:
    """Serve one prediction page and follow it."""
    app, walk = make_app(small_explorer(folder)), Walk()
    with profiling(walk):
        status, body = get(app, path)
    assert status == 200 and b"What is this prediction made of?" in body
    return walk


def files(steps: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(file for file, _ in steps))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        walk = walk_prediction(Path(folder) / "memory")
    to_explain = walk.before(lambda step: step[0].startswith("explain/"))
    for name, steps in (("first call into explain/", to_explain), ("the question", walk.to_question())):
        show = [step for step in steps if step[0].startswith("show/")]
        print(f"{name}: {len(steps)} functions in {len(files(steps))} files; show/: {len(show)} in {len(files(show))}")
        if "-v" in sys.argv:
            print(*(f"  {file}: {function}" for file, function in steps), sep="\n")


if __name__ == "__main__":
    main()
