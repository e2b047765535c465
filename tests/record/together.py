"""A small training that several processes do together, or one alone on the same batches.

``torchrun --nproc-per-node 2 tests/record/together.py FOLDER`` trains all cases; the tests train them alone.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from kinds import KINDS, Kind

import dualform
from dualform.errors import DualformError
from dualform.record.shards import shard_builder

WORLD = 2

OPTIMISERS: dict[str, Callable[[nn.Module], list[optim.Optimizer]]] = {
    "SGD": lambda m: [optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)],
    "AdamW": lambda m: [optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4)],
    "Adafactor": lambda m: [optim.Adafactor(m.parameters(), lr=1e-2)],
    "two": lambda m: [
        optim.SGD([p for p in m.parameters() if p.ndim > 1], lr=0.1, momentum=0.9),
        optim.AdamW([p for p in m.parameters() if p.ndim == 1], lr=1e-2, eps=1e-4),
    ],
}


@dataclass(frozen=True)
class Case:
    """A kind of layer and an optimiser; ``how`` the processes make their gradients the same."""

    kind: str = "linear"
    optimiser: str = "SGD"
    how: str = "averaged"
    steps: int = 6
    options: dict[str, Any] = field(default_factory=dict)
    shard_bytes: int | None = None
    stop_at: int | None = None
    """The recording ends here, and goes on from a checkpoint of two steps before."""

    @property
    def about(self) -> Kind:
        return KINDS[self.kind]

    @property
    def ledger(self) -> bool:
        return self.options.get("keep") == "ledger"


BY_SOURCE = {"keep": "ledger", "by": "source"}

CASES: dict[str, Case] = {
    # counts of tokens in a call are not those of the whole batch
    **{f"{kind}, AdamW": Case(kind, "AdamW") for kind in KINDS if kind != "embedding, padded"},
    "SGD": Case(),
    "Adafactor": Case(optimiser="Adafactor"),
    "two optimisers": Case(optimiser="two"),
    "in views": Case("conv2d", how="in views"),
    "accumulated apart": Case("lstm", "AdamW", how="accumulated apart"),
    "accumulated together": Case("conv2d", "AdamW", how="accumulated together"),
    "averaged by hand": Case("linear", "AdamW", how="averaged by hand"),
    "added by hand": Case("linear", how="added by hand"),
    "many shards": Case(optimiser="AdamW", steps=60, shard_bytes=4000),
    "in float16": Case(optimiser="AdamW", options={"dtype": "float16"}),
    "resumed": Case(optimiser="AdamW", steps=9, stop_at=7, shard_bytes=1500),
    "a ledger, SGD": Case(options=BY_SOURCE),
    "a ledger, AdamW": Case("conv2d", "AdamW", options=BY_SOURCE),
    "a ledger, accumulated": Case("lstm", "AdamW", how="accumulated apart", options=BY_SOURCE),
    "a ledger, resumed": Case(optimiser="AdamW", steps=9, stop_at=7, options=BY_SOURCE),
}


def train(case: Case, path: Path, rank: int = 0, world: int = 1) -> list[dict[str, Tensor]]:
    """Train and record; returns the weights after every step."""
    model = case.about.model()
    optimizers = OPTIMISERS[case.optimiser](model)
    random = torch.Generator().manual_seed(1)
    net = model
    if world > 1 and not case.how.endswith("by hand"):
        net = DistributedDataParallel(model, gradient_as_bucket_view=case.how == "in views")
    states, checkpoint, then = [_state(model)], None, random.get_state()
    before, shard_builder.SHARD_BYTES = shard_builder.SHARD_BYTES, case.shard_bytes or shard_builder.SHARD_BYTES
    try:
        for first, last, resume in _stretches(case):
            if resume is not None:
                _load(model, optimizers, checkpoint)
            options = {"dtype": "float64", "progress": False, "resume": resume, **case.options}
            with dualform.record(net, optimizers, path, **options) as tape:
                for step in range(first, last):
                    if step == (case.stop_at or 0) - 2 and resume is None:
                        tape.flush()
                        checkpoint, then = _saved(model, optimizers), random.get_state()
                    _step(case, step, net, optimizers, tape, random, rank, world)
                    states[step + 1 :] = [_state(model)]
            if resume is None and case.stop_at is not None:
                random.set_state(then)
    finally:
        shard_builder.SHARD_BYTES = before
    return states


def _stretches(case: Case) -> Iterator[tuple[int, int, int | None]]:
    """From which step to which, and where to resume."""
    if case.stop_at is None:
        yield 0, case.steps, None
    else:
        yield 0, case.stop_at, None
        yield case.stop_at - 2, case.steps, case.stop_at - 2


def _step(
    case: Case, step: int, net: nn.Module, optimizers: list[optim.Optimizer], tape: dualform.Tape,
    random: torch.Generator, rank: int, world: int,
) -> None:  # fmt: skip
    parts = 2 if case.how.startswith("accumulated") else 1
    for part in range(parts):
        x, y = draw(case.about, random)
        index = torch.arange(len(y)) + len(y) * (parts * step + part)
        half = len(y) // world
        mine = slice(rank * half, rank * half + half)
        x = x.narrow(case.about.batch_dim, mine.start, half)
        tape.note(index=index[mine], label=y[mine], source=f"s{(step + part) % 3}")
        with _apart(net) if case.how == "accumulated apart" and part == 0 else nullcontext():
            loss = F.cross_entropy(net(x), y[mine])
            (loss / world if case.how == "added by hand" else loss).backward()
    if world > 1 and case.how.endswith("by hand"):
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            if case.how == "averaged by hand":
                parameter.grad /= world
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _apart(net: nn.Module) -> AbstractContextManager[None]:
    """Every process keeps its gradients to itself."""
    return net.no_sync() if isinstance(net, DistributedDataParallel) else nullcontext()


def draw(kind: Kind, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch for all processes, and its classes."""
    x = torch.cat([kind.inputs(random) for _ in range(WORLD)], kind.batch_dim)
    return x, torch.randint(3, (WORLD * kind.examples,), generator=random)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _saved(model: nn.Module, optimizers: list[optim.Optimizer]) -> Any:
    return deepcopy([_state(model), [optimizer.state_dict() for optimizer in optimizers]])


def _load(model: nn.Module, optimizers: list[optim.Optimizer], saved: Any) -> None:
    model.load_state_dict(saved[0])
    for optimizer, state in zip(optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)


# ---------------------------------------------------------------- what cannot work


def without_averaging(path: Path) -> None:
    """Every process steps with its own gradient."""
    _once(KINDS["linear"].model(), path, seed=dist.get_rank())


def onto_a_memory(path: Path) -> None:
    """There is one already."""
    for _ in range(2):
        _once(DistributedDataParallel(KINDS["linear"].model()), path)


def to_paths_of_their_own(path: Path) -> None:
    """But they train one model."""
    _once(DistributedDataParallel(KINDS["linear"].model()), path / str(dist.get_rank()))


def with_other_columns(path: Path) -> None:
    """Each process notes a column of its own name."""
    _once(DistributedDataParallel(KINDS["linear"].model()), path, column=f"c{dist.get_rank()}")


def from_a_step_that_is_not_there(path: Path) -> None:
    """Resumed too late."""
    model = DistributedDataParallel(KINDS["linear"].model())
    _once(model, path)
    _once(model, path, resume=3)


def to_be_run_again(path: Path) -> None:
    """Several processes cannot be run again yet."""
    _once(DistributedDataParallel(KINDS["linear"].model()), path, replay=True)


REFUSED: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        without_averaging, onto_a_memory, to_paths_of_their_own, with_other_columns, from_a_step_that_is_not_there,
        to_be_run_again,
    )
}  # fmt: skip


def each_alone(path: Path) -> None:
    """Processes that train models of their own record to paths of their own."""
    _once(KINDS["linear"].model(seed=dist.get_rank()), path / str(dist.get_rank()), seed=dist.get_rank())


def killed(path: Path, at: int = 40) -> None:
    """The last process is killed in the middle of a step."""
    shard_builder.SHARD_BYTES = 2000
    model = KINDS["linear"].model()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    net, random = DistributedDataParallel(model), torch.Generator().manual_seed(dist.get_rank())
    with dualform.record(net, optimizer, path, dtype="float64", progress=False):
        for step in range(at + 10):
            if step == at and dist.get_rank() == WORLD - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            net(KINDS["linear"].inputs(random)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                torch.save(_state(model), path.with_name(f"{step + 1}.pt"))


def _once(net: nn.Module, path: Path, *, seed: int = 0, column: str = "index", **options: Any) -> None:
    """One step, recorded."""
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    x = KINDS["linear"].inputs(torch.Generator().manual_seed(seed))
    with dualform.record(net, optimizer, path, progress=False, **options) as tape:
        tape.note(**{column: list(range(len(x)))})
        net(x).square().mean().backward()
        optimizer.step()


def main() -> None:
    """Train all cases, and try what cannot work; or have a process killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    if "killed" in sys.argv:
        killed(folder / "killed")
    for name, case in CASES.items():
        train(case, folder / name, rank, dist.get_world_size())
    each_alone(folder / "alone")
    messages = {}
    for name, attempt in REFUSED.items():
        try:
            attempt(folder / name)
        except DualformError as error:
            messages[name] = [type(error).__name__, str(error)]
    (folder / f"said-{rank}.json").write_text(json.dumps(messages))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
