"""Bad input is rejected with the right error, in one paragraph, and nothing is left behind."""

import gc
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from filelock import FileLock
from helpers import state_of
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import dualform
from dualform.errors import (
    CorruptMemory,
    DualformError,
    DualformWarning,
    FilterError,
    FormatVersionError,
    HorizonError,
    LayerNotFound,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    MissingExtra,
    ModelMismatch,
    NonFiniteGradient,
    NoSteps,
    NotAMemory,
    NoteError,
    NothingToRecord,
    QueryError,
    RecordError,
    UnknownColumn,
    UnsupportedLayer,
    UnsupportedOptimizer,
    WriteError,
)

atomic_file = importlib.import_module("dualform.store.io.atomic_file")
direct_io = importlib.import_module("dualform.store.io.direct_io")
safetensors_file = importlib.import_module("dualform.store.format.safetensors_file")
shard_builder = importlib.import_module("dualform.record.shards.shard_builder")

STEPS, BATCH = 3, 4
NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Turn off the type checks of arguments, as for users; with them a wrong option would never reach the library."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# ---------------------------------------------------------------------------------------------------------------- scene


def network(width: int = 6, hidden: int = 5) -> tuple[nn.Module, optim.SGD]:
    torch.manual_seed(0)
    model = named(fc1=nn.Linear(width, hidden), act=nn.ReLU(), fc2=nn.Linear(hidden, 3)).double()
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(step: int, width: int = 6, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(batch, width, generator=random).double(), torch.randint(3, (batch,), generator=random)


X = data(99)[0]


class Scene:
    """A network, a folder, and the recordings made with them."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "memory"
        self.model, self.optimizer = network()
        self.recordings: list[dualform.Tape] = []
        self.before = set(threading.enumerate())

    def record(
        self, model: Any = None, optimizer: Any = None, path: Path | None = None, **options: Any
    ) -> dualform.Tape:
        options = {"dtype": "float64", "progress": False, **options}
        tape = dualform.record(model or self.model, optimizer or self.optimizer, path or self.path, **options)
        self.recordings.append(tape)
        return tape

    def step(self, tape: dualform.Tape, spoil: Callable[[], Any] = lambda: None, **columns: Any) -> None:
        x, y = data(tape.step)
        tape.note(**{"index": torch.arange(BATCH) + BATCH * tape.step, "label": y, **columns})
        F.cross_entropy(self.model(x), y).backward()
        spoil()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self, **options: Any) -> Any:
        with self.record(**options) as tape:
            for _ in range(STEPS):
                self.step(tape)
        return dualform.open(self.path)

    def spot(self, inputs: Any = X, **options: Any) -> Any:
        return self.memory(**options).attend(self.model, inputs)

    # ------------------------------------------------------------------------------------------ after two good steps

    def then(self, spoil: Callable[[], Any] = lambda: None, **columns: Any) -> None:
        """Two good steps, then one with other columns, or one that is spoiled before the optimiser steps."""
        with self.record() as tape:
            self.step(tape)
            self.step(tape)
            self.step(tape, spoil, **columns)

    def then_note(self, columns: Mapping[str, Any]) -> None:
        """Two good steps, then one with only these columns."""
        with self.record() as tape:
            self.step(tape)
            self.step(tape)
            tape.note(**columns)
            self.model(X).sum().backward()
            self.optimizer.step()

    def then_loss(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """Two good steps, then one with this loss."""
        with self.record() as tape:
            self.step(tape)
            self.step(tape)
            tape.note(index=torch.arange(BATCH), label=torch.zeros(BATCH, dtype=torch.int64))
            loss(self.model).backward()
            self.optimizer.step()

    def poison(self, name: str) -> Callable[[], None]:
        """Set one entry of one gradient to NaN."""

        def spoil() -> None:
            grad = self.model.get_parameter(name).grad
            assert grad is not None
            grad.view(-1)[1] = NAN

        return spoil

    # ---------------------------------------------------------------------------------------------- folders and files

    def folder(self, name: str, text: str | bytes) -> Path:
        """A folder with one file."""
        self.path.mkdir()
        (self.path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return self.path

    def manifest(self, change: Callable[[str], str | bytes]) -> Path:
        """A memory whose manifest was changed."""
        self.memory()
        file = self.path / "manifest.json"
        changed = change(file.read_text())
        file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
        return self.path

    def spoiled(self, name: str, change: Callable[[bytes], bytes | None]) -> Path:
        """A memory with one changed file."""
        self.memory()
        file = self.path / name
        changed = change(file.read_bytes())
        if changed is None:
            file.unlink()
        else:
            file.write_bytes(changed)
        return self.path

    def without_steps(self) -> dualform.Memory:
        with self.record():
            pass
        return dualform.open(self.path)

    # ------------------------------------------------------------------------------------------------ nothing is left

    def check_nothing_is_left(self) -> None:
        assert not list(self.root.rglob("*.partial"))
        alive = {t for t in set(threading.enumerate()) - self.before if t.name == "dualform-writer"}
        assert not alive, "a writer is still waiting for steps"
        for tape in self.recordings:
            for name, module in [(r.uses[0].info.path, r.module) for r in tape.plan.modules]:
                assert not module._forward_hooks and not module._forward_pre_hooks, f"hooks on '{name}'"
                assert not module._backward_hooks and not module._backward_pre_hooks, f"hooks on '{name}'"
            for optimizer in tape.optimizers:
                assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
            if tape.path.is_dir():
                with FileLock(tape.path / ".lock", timeout=0):
                    pass
        if self.recordings:
            self.check_that_recording_goes_on()

    def check_that_recording_goes_on(self) -> None:
        """Over what the failure left, and with the same model elsewhere."""
        optimizer = self.optimizer
        for path, overwrite in ((self.root / "elsewhere", False), (self.path, True)):
            if path.is_file() or (path / "shards" / "keep.txt").exists():
                continue
            if any(not bool(p.isfinite().all()) for p in self.model.parameters()):
                self.model, optimizer = network()
            optimizer.zero_grad()
            with dualform.record(
                self.model, optimizer, path, dtype="float64", overwrite=overwrite, progress=False
            ) as tape:
                x, y = data(0, self.model.get_parameter("fc1.weight").shape[1])
                tape.note(label=y)
                F.cross_entropy(self.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert dualform.open(path).step == 1
            assert dualform.open(path).check(self.model, full=True).worst < 1e-10


def linear(width: int = 6, out: int = 3) -> nn.Linear:
    return nn.Linear(width, out).double()


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def sgd(*models: nn.Module) -> optim.SGD:
    return optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


class MySGD(optim.SGD):
    """Might step in its own way."""


class Attention(nn.Module):
    """One block with torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.fc = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attn(x, x, x, need_weights=False)[0].mean(1))


class Tied(nn.Module):
    """A word model whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(self.embed(x)).tanh())


def record_model(scene: Scene, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
    with scene.record(model, optimizer or sgd(model), **options):
        pass


def record_over_an_app(scene: Scene, **options: Any) -> None:
    """A web application has a manifest.json too."""
    app = scene.folder("manifest.json", '{"name": "app"}').rename(scene.root / "app")
    record_model(scene, scene.model, path=app, **options)


def in_a_big_layer(scene: Scene) -> None:
    """One NaN among 6,000 entries: the check before each step covers every entry."""
    scene.model, scene.optimizer = network(100, 60)
    with warnings.catch_warnings(), scene.record() as tape:
        warnings.simplefilter("ignore", DualformWarning)
        for step in range(6):
            x, y = data(step, 100)
            tape.note(label=y)
            F.cross_entropy(scene.model(x), y).backward()
            if step == 4:
                scene.poison("fc1.weight")()
            scene.optimizer.step()
            scene.optimizer.zero_grad()
            if step == 1:
                tape.flush()


def locked(scene: Scene, **options: Any) -> None:
    model, optimizer = network()
    with scene.record() as tape:
        scene.step(tape)
        scene.step(tape)
        with scene.record(model, optimizer, **options):
            pass


def without_pandas(answer: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        answer.to_pandas()


def compiled(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what the compiler imports
        return torch.compile(model)


def deprecated(norm: str, layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(nn.utils, norm)(layer)


def flipped(byte: int) -> Callable[[bytes], bytes]:
    """One bit of one byte turns around."""

    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[byte] ^= 4
        return bytes(changed)

    return change


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def gone(content: bytes) -> None:
    return None


INIT, SHARD, CALLS = "init.safetensors", "shards/000000.safetensors", "calls/000000.parquet"
VISITS, LINES, SNAPSHOT = "visits/000000.parquet", "steps/000000.parquet", "snapshots/000000.safetensors"
FILES = (INIT, SHARD, CALLS, VISITS, LINES, SNAPSHOT)
MIDDLE, LAST = 2000, -1


# ---------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Case:
    """What is wrong, the error and some of its words, and the least step that the memory holds afterwards."""

    what: str
    error: type[DualformError]
    says: tuple[str, ...]
    act: "Act"
    stands: int | None = None


Act = Callable[[Scene], Any]
Ask = Callable[[dualform.Memory, nn.Module], Any]


def unfit(ask: Ask) -> list[tuple[str, Act, tuple[str, ...]]]:
    """The models that do not fit, with the same question to each."""
    narrow, missing = named(fc1=linear(6, 4), act=nn.ReLU(), fc2=linear(4)), named(fc1=linear(6, 5))
    return [
        ("of another width", lambda s: ask(s.memory(), narrow), ("'fc1.weight' of shape (5, 6)", "(4, 6)", "trained")),
        ("without a layer", lambda s: ask(s.memory(), missing), ("'fc2.weight'", "has 'fc1.weight'", "trained")),
    ]


ON_A_MODEL: dict[str, Ask] = {
    "attend": lambda memory, model: memory.attend(model, X),
    "predict": lambda memory, model: memory.predict(model, X),
    "check": lambda memory, model: memory.check(model),
    "load_into": lambda memory, model: memory.load_into(model),
}

WITH_SLOTS: dict[str, Ask] = {
    "check()": lambda memory, model: memory.check(),
    "check(model)": lambda memory, model: memory.check(model, full=True),
    "weights": lambda memory, model: memory.weights(),
    "parameter": lambda memory, model: memory.parameter("fc1.bias"),
    "predict": lambda memory, model: memory.predict(model, X),
    "ledger": lambda memory, model: memory.ledger("label"),
    "top": lambda memory, model: memory.attend(model, X).top(2, layer="fc2", per="slot"),
    "top weights": lambda memory, model: memory.attend(model, X).top(2, layer="fc2", score="weight", per="slot"),
    "by": lambda memory, model: memory.attend(model, X).by("label", layer="fc1"),
    "timeline": lambda memory, model: memory.attend(model, X).timeline(layer="fc1"),
    "output": lambda memory, model: memory.attend(model, X).output("fc1"),
    "without": lambda memory, model: memory.without("label = 0").predict(model, X),
}

WITHOUT_STEPS: dict[str, Ask] = {
    "attend": lambda memory, model: memory.attend(model, X),
    "check": lambda memory, model: memory.check(model),
    "certificate": lambda memory, model: memory.certificate,
    "without": lambda memory, model: memory.without("label = 1"),
    "only": lambda memory, model: memory.only("label = 1"),
    "ledger": lambda memory, model: memory.ledger("label"),
}

FOLDERS = [
    Case("a path that is not there", MemoryNotFound, ("nowhere", "no such folder", "dualform.record("),
         lambda s: dualform.open(s.root / "nowhere")),
    Case("an empty folder", NotAMemory, ("no manifest.json", "nothing"), lambda s: dualform.open(s.root)),
    Case("a folder of something else", NotAMemory, ("no manifest.json", "thesis.tex"),
         lambda s: dualform.open(s.folder("thesis.tex", "x"))),
    Case("a file", NotAMemory, ("thesis.tex", "a file"),
         lambda s: dualform.open(s.folder("thesis.tex", "x") / "thesis.tex")),
    Case("the manifest of something else", NotAMemory, ("format", "dualform-memory"),
         lambda s: dualform.open(s.folder("manifest.json", '{"name": "app"}'))),
    Case("a manifest that is a list", NotAMemory, ("format", "dualform-memory"),
         lambda s: dualform.open(s.folder("manifest.json", "[1, 2]"))),
    Case("a newer version", FormatVersionError, ("version 3", "this dualform reads", "upgrade"),
         lambda s: dualform.open(s.manifest(lambda t: t.replace('"version": 2', '"version": 3')))),
    Case("a manifest cut short", CorruptMemory, ("manifest.json", "not valid JSON", "Restore"),
         lambda s: dualform.open(s.manifest(lambda t: t[: len(t) // 2]))),
    Case("an empty manifest", CorruptMemory, ("manifest.json", "not valid JSON", "Restore"),
         lambda s: dualform.open(s.manifest(lambda t: ""))),
    Case("a manifest that is no text", CorruptMemory, ("manifest.json", "not valid JSON", "Restore"),
         lambda s: dualform.open(s.manifest(lambda t: b"\xff\xfe\x00"))),
    Case("a changed number in the manifest", CorruptMemory, ("manifest.json", "checksum", "Restore"),
         lambda s: dualform.open(s.manifest(lambda t: t.replace('"visits": 12', '"visits": 13')))),
    *(Case(f"{name} cut short", CorruptMemory, (name, "cut short", "Restore", "resume"),
           lambda s, n=name: dualform.open(s.spoiled(n, half)))
       for name in FILES),
    *(Case(f"{name} missing", CorruptMemory, (name, "missing", "Restore", "resume"),
           lambda s, n=name: dualform.open(s.spoiled(n, gone)))
       for name in FILES),
    *(Case(f"a changed bit of {name}", CorruptMemory, (name, "bytes changed", "Restore"),
           lambda s, n=name: dualform.open(s.spoiled(n, flipped(LAST))))
       for name in (INIT, CALLS, VISITS, LINES)),
    *(Case(f"a changed bit among the slots, seen by {how}", CorruptMemory, (SHARD, "bytes changed", "Restore"),
           lambda s, ask=ask: ask(dualform.open(s.spoiled(SHARD, flipped(MIDDLE))), s.model))
       for how, ask in WITH_SLOTS.items()),
    *(Case(f"a changed bit, byte {byte} of the slots", CorruptMemory, (SHARD, "bytes changed"),
           lambda s, byte=byte: dualform.open(s.spoiled(SHARD, flipped(byte))).weights())
       for byte in (0, 9, LAST)),
    Case("a changed bit of a snapshot", CorruptMemory, (SNAPSHOT, "bytes changed"),
         lambda s: dualform.open(s.spoiled(SNAPSHOT, flipped(LAST))).check()),
    Case("a memory that is there already", MemoryExists, ("3 steps", "resume=3", "overwrite=True"),
         lambda s: (s.memory(), s.memory()), 3),
    Case("a folder that is being recorded into", MemoryLocked, ("another recording", "another path"), locked, 2),
    Case("overwriting what is being recorded", MemoryLocked, ("another recording", "another path"),
         lambda s: locked(s, overwrite=True), 2),
    Case("resuming what is being recorded", MemoryLocked, ("another recording", "another path"),
         lambda s: locked(s, resume=1), 2),
    Case("recording into a file", NotAMemory, ("thesis.tex",),
         lambda s: record_model(s, s.model, path=s.folder("thesis.tex", "x") / "thesis.tex")),
    Case("recording below a file", WriteError, ("thesis.tex",),
         lambda s: record_model(s, s.model, path=s.folder("thesis.tex", "x") / "thesis.tex" / "memory")),
    Case("recording over another manifest", NotAMemory, ("format", "dualform-memory"),
         record_over_an_app),
    Case("overwriting another manifest", NotAMemory, ("format", "dualform-memory"),
         lambda s: record_over_an_app(s, overwrite=True)),
]  # fmt: skip

RECORDING = [
    Case("an unknown layer", LayerNotFound, ("'fc9'", "['fc1', 'fc2']", "Pass one of these"),
         lambda s: record_model(s, s.model, layers=["fc9"])),
    Case("a layer that is not linear", LayerNotFound, ("'act'", "['fc1', 'fc2']"),
         lambda s: record_model(s, s.model, layers=["fc1", "act"])),
    Case("keep for an unknown layer", LayerNotFound, ("'fc9'", "['fc1', 'fc2']"),
         lambda s: record_model(s, s.model, keep={"fc9": "keys"})),
    Case("batch_dim for an unknown layer", LayerNotFound, ("'fc9'", "['fc1', 'fc2']"),
         lambda s: record_model(s, s.model, batch_dim={"fc9": 1})),
    Case("an unknown dtype", QueryError, ("'float8'", "['float16', 'float32', 'float64']"),
         lambda s: record_model(s, s.model, dtype="float8")),
    Case("an unknown keep", QueryError, ("'all'", "['slots', 'keys', 'ledger', 'keys+ledger', 'nothing']"),
         lambda s: record_model(s, s.model, keep="all")),
    Case("an unknown keep of a layer", QueryError, ("'all'", "['slots', 'keys', 'ledger', 'keys+ledger', 'nothing']"),
         lambda s: record_model(s, s.model, keep={"fc1": "all"})),
    Case("a negative snapshot_every", QueryError, ("snapshot_every", "-3"),
         lambda s: record_model(s, s.model, snapshot_every=-3)),
    Case("LBFGS", UnsupportedOptimizer, ("LBFGS", "'AdamW'", "'SGD'", "rules="),
         lambda s: record_model(s, s.model, optim.LBFGS(s.model.parameters()))),
    Case("a subclass of SGD", UnsupportedOptimizer, ("MySGD", "'SGD'", "rules="),
         lambda s: record_model(s, s.model, MySGD(s.model.parameters(), lr=0.1))),
    Case("an optimiser among two without a rule", UnsupportedOptimizer, ("LBFGS",),
         lambda s: record_model(s, s.model, [s.optimizer, optim.LBFGS(linear().parameters())])),
    Case("the optimiser of another model", NothingToRecord, ("Sequential", "['fc1', 'fc2']", "Pass the optimiser"),
         lambda s: record_model(s, s.model, sgd(linear()))),
    Case("no optimiser", NothingToRecord, ("Sequential", "Pass the optimiser"),
         lambda s: dualform.record(s.model, [], s.path)),
    Case("a named layer that is not trained", NothingToRecord, ("'fc1'", "optimiser", "leave it out"),
         lambda s: record_model(s, s.model, sgd(s.model.get_submodule("fc2")), layers=["fc1"])),
    Case("a model without layers of a known kind", NothingToRecord, ("Sequential", "LayerNorm", "nn.Linear"),
         lambda s: record_model(s, named(norm=nn.LayerNorm(3)))),
    Case("a bilinear layer", UnsupportedLayer, ("'two'", "nn.Bilinear", "no dual form", "keep={'two': 'nothing'}"),
         lambda s: record_model(s, named(two=nn.Bilinear(3, 3, 3)))),
    Case("an embedding that is shortened", UnsupportedLayer, ("'embed'", "max_norm=1", "keep={'embed': 'nothing'}"),
         lambda s: record_model(s, named(embed=nn.Embedding(3, 3, max_norm=1)))),
    Case("a sparse embedding", UnsupportedLayer, ("'embed'", "sparse=True", "sparse=False"),
         lambda s: record_model(s, named(embed=nn.Embedding(3, 3, sparse=True)))),
    Case("dropout inside a recurrent layer", UnsupportedLayer, ("'rnn'", "dropout=0.5", "nn.Dropout", "'nothing'"),
         lambda s: record_model(s, named(rnn=nn.LSTM(3, 3, num_layers=2, dropout=0.5)))),
    Case("a named layer with weight norm", UnsupportedLayer, ("'fc'", "weight or spectral norm", "'nothing'"),
         lambda s: record_model(s, named(fc=weight_norm(linear())), layers=["fc"])),
    Case("a named layer with spectral norm", UnsupportedLayer, ("'fc'", "weight or spectral norm", "'nothing'"),
         lambda s: record_model(s, named(fc=spectral_norm(linear())), layers=["fc"])),
    Case("a named layer with the old weight norm", UnsupportedLayer, ("'fc'", "weight or spectral norm", "'nothing'"),
         lambda s: record_model(s, named(fc=deprecated("weight_norm", linear())), layers=["fc"])),
    Case("a named layer with the old spectral norm", UnsupportedLayer, ("'fc'", "weight or spectral norm", "'nothing'"),
         lambda s: record_model(s, named(fc=deprecated("spectral_norm", linear())), layers=["fc"])),
    Case("a lazy layer without weights", UnsupportedLayer, ("'fc'", "LazyLinear", "Run one batch"),
         lambda s: record_model(s, named(fc=nn.LazyLinear(3)))),
    Case("a compiled model", UnsupportedLayer, ("compiled", "_orig_mod", "inside the with-block"),
         lambda s: record_model(s, compiled(s.model), s.optimizer)),
    Case("a note before the with", RecordError, ("with",),
         lambda s: dualform.record(s.model, s.optimizer, s.path).note(label=1)),
    Case("a column missing", NoteError, ("['index']", "['index', 'label']", "same columns"),
         lambda s: s.then_note({"index": range(BATCH)}), 2),
    Case("no column at all", NoteError, ("[]", "['index', 'label']", "same columns"), lambda s: s.then_note({}), 2),
    Case("a new column", NoteError, ("'source'", "['index', 'label']", "same columns"),
         lambda s: s.then(source="web"), 2),
    Case("a column of another type", NoteError, ("'label'", "string", "int64"), lambda s: s.then(label="cat"), 2),
    Case("whole numbers that became fractions", NoteError, ("'label'", "float64", "int64"),
         lambda s: s.then(label=torch.rand(BATCH)), 2),
    Case("columns of two lengths", NoteError, ("'label'", "3 values", "4 examples"),
         lambda s: s.then(label=[0, 1, 2]), 2),
    *(Case(f"a column called {name}", NoteError, (f"'{name}'", "another name"),
           lambda s, n=name: s.then(**dict[str, Any]({n: 1})), 2)
       for name in ("visit", "step", "row")),
    Case("a column with two axes", NoteError, ("'label'", "(4, 2)"), lambda s: s.then(label=torch.zeros(BATCH, 2)), 2),
    Case("a column of anything", NoteError, ("'label'", "dict"), lambda s: s.then(label={"a": 1}), 2),
    Case("a column of None", NoteError, ("'label'", "NoneType"), lambda s: s.then(label=None), 2),
    Case("a ragged column", NoteError, ("'label'",), lambda s: s.then(label=[[1], [1, 2], [3], [4]]), 2),
    Case("a loss that is NaN", NonFiniteGradient, ("'fc1.weight'", "step 3", "stands at step 2", "learning rate"),
         lambda s: s.then_loss(lambda m: m(X).sum() * NAN), 2),
    Case("a loss that is infinite", NonFiniteGradient, ("step 3", "stands at step 2", "learning rate"),
         lambda s: s.then_loss(lambda m: m(X).sum() * INF), 2),
    Case("inputs with infinity", NonFiniteGradient, ("step 3", "stands at step 2", "batch"),
         lambda s: s.then_loss(lambda m: m(X * INF).sum()), 2),
    Case("inputs with one NaN", NonFiniteGradient, ("step 3", "stands at step 2", "batch"),
         lambda s: s.then_loss(lambda m: m(X.where(X.max() > X, NAN)).sum()), 2),
    *(Case(f"one NaN in the gradient of {name}", NonFiniteGradient, (f"'{name}'", "step 3", "stands at step 2"),
           lambda s, n=name: s.then(s.poison(n)), 2)
       for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")),
    Case("one NaN in a large gradient", NonFiniteGradient, ("NaN", "stands at step", "learning rate"),
         in_a_big_layer, 4),
]  # fmt: skip

ASKING = [
    *(Case(f"an unknown layer, asked by {how}", LayerNotFound, ("'fc9'", "['fc1', 'fc2']", "one of these"), ask)
       for how, ask in {
        "top": lambda s: s.spot().top(1, layer="fc9", per="slot"), "by": lambda s: s.spot().by("label", layer="fc9"),
        "timeline": lambda s: s.spot().timeline(layer="fc9"), "output": lambda s: s.spot().output("fc9"),
    }.items()),
    *(Case(f"an unknown column, asked by {how}", UnknownColumn, ("'source'", "'label'", "while recording"), ask)
       for how, ask in {
        "by": lambda s: s.spot().by("source", layer="fc1"), "ledger": lambda s: s.memory().ledger("source"),
        "timeline": lambda s: s.spot().timeline("source", layer="fc1"),
    }.items()),
    *(Case(f"a model {which}, for {how}", ModelMismatch, says, ask)
       for how, on in ON_A_MODEL.items() for which, ask, says in unfit(on)),
    *(Case(f"no steps, asked by {how}", NoSteps, ("no complete step",),
           lambda s, ask=ask: ask(s.without_steps(), s.model))
       for how, ask in WITHOUT_STEPS.items()),
    Case("a step after the last", HorizonError, ("step 4", "0 to 3"), lambda s: s.memory().at(4)),
    Case("a step before the first", HorizonError, ("step -1", "0 to 3"), lambda s: s.memory().at(-1)),
    Case("half a step", HorizonError, ("1.5", "0 to 3"), lambda s: s.memory().at(1.5)),
    Case("queries of the wrong width", QueryError, ("'fc1'", "takes 6", "has 5"),
         lambda s: s.spot(X[:, :5]).top(1, layer="fc2", per="slot")),
    Case("queries that are no tensor", QueryError, ("tensor", "list"), lambda s: s.spot([[1.0] * 6])),
    Case("no queries", QueryError, ("example",), lambda s: s.spot(X[:0]).top(1, layer="fc2", per="slot")),
    Case("queries with NaN", QueryError, ("NaN",),
         lambda s: s.spot(torch.cat([X, X[:1] * NAN])).top(1, layer="fc2", per="slot")),
    Case("a filter with bad grammar", FilterError, ("'label =='", "ends too early", "'label'"),
         lambda s: s.memory().only("label ==")),
    Case("an empty filter", FilterError, ("''", "'label'"), lambda s: s.memory().only("")),
    Case("a filter on an unknown column", FilterError, ("sauce", "'label'"), lambda s: s.memory().without("sauce = 1")),
    Case("a filter that reads files", FilterError, ("cannot read the filter",),
         lambda s: s.memory().without("(select count(*) from '/etc/passwd') > 0")),
    Case("a filter of another length", FilterError, ("unnest", "visit"),
         lambda s: s.memory().only("unnest([true, false])")),
    Case("an expression on an unknown column", FilterError, ("sauce", "'label'"),
         lambda s: s.memory().only(pc.field("sauce") == 1)),
    Case("an expression that is no condition", FilterError, ("label", "bool"),
         lambda s: s.memory().only(pc.field("label"))),
    Case("a mask of the wrong length", FilterError, ("12 booleans", "(3,)"),
         lambda s: s.memory().only(np.ones(3, bool))),
    Case("a mask of numbers", FilterError, ("12 booleans", "int64"), lambda s: s.memory().only(np.ones(12, np.int64))),
    Case("a filter that matches nothing", FilterError, ("'label = 7'", "none of the 12 visits"),
         lambda s: s.memory().without("label = 7")),
    Case("a filter that matches nothing by then", FilterError, ("'step = 3'", "up to step 2"),
         lambda s: s.memory().at(2).without("step = 3")),
    Case("a filter on what is masked already", FilterError, ("'step = 1'", "masked already"),
         lambda s: s.memory().only("step > 1").without("step = 1")),
    Case("an unknown score", QueryError, ("'cosine'", "['weight', 'abs', 'contribution']"),
         lambda s: s.spot().top(1, layer="fc1", score="cosine", per="slot")),
    Case("an unknown order", QueryError, ("'best'", "['largest', 'smallest', 'magnitude']"),
         lambda s: s.spot().top(1, layer="fc1", order="best", per="slot")),
    Case("no hits at all", QueryError, ("0",), lambda s: s.spot().top(0, layer="fc1", per="slot")),
    Case("a negative number of hits", QueryError, ("-2",), lambda s: s.spot().top(-2, layer="fc1", per="slot")),
    Case("a timeline of no stretches", QueryError, ("0",), lambda s: s.spot().timeline(layer="fc1", stretches=0)),
    Case("a position that is not there", QueryError, ("position 1", "1 rows"),
         lambda s: s.spot().top(1, layer="fc1", position=1, per="slot")),
    *(Case(f"target {target!r}", QueryError, says,
           lambda s, t=target: s.spot().top(1, layer="fc1", target=t, per="slot"))
       for target, says in [
        (3, ("target 3", "3 outputs")), (-4, ("target -4", "3 outputs")), (0.5, ("target 0.5", "3 outputs")),
        ((0, 3), ("3 outputs",)),
        ((0,), ("(0,)",)), ((0, 1, 2), ("(0, 1, 2)",)), ("cat", ("'cat'",)), ([0, 1, 2], ("[0, 1, 2]",)),
    ]),
    Case("a target of the wrong shape", QueryError, ("(3,)", "4 examples", "one class each"),
         lambda s: s.spot().top(1, layer="fc1", target=torch.zeros(3, dtype=torch.int64), per="slot")),
    Case("a target without an axis", QueryError, ("()", "4 examples"),
         lambda s: s.spot().top(1, layer="fc1", target=torch.tensor(1), per="slot")),
    Case("a target with two axes", QueryError, ("(4, 1)", "4 examples"),
         lambda s: s.spot().top(1, layer="fc1", target=torch.zeros(4, 1, dtype=torch.int64), per="slot")),
    Case("a target with a class too many", QueryError, ("3 outputs",),
         lambda s: s.spot().top(1, layer="fc1", target=torch.arange(4), per="slot")),
    Case("a target that gives one number for all", QueryError, ("4 examples", "()"),
         lambda s: s.spot().top(1, layer="fc1", target=lambda out: out.sum(), per="slot")),
    Case("a target that gives no tensor", QueryError, ("4 examples", "float"),
         lambda s: s.spot().top(1, layer="fc1", target=lambda out: 1.0, per="slot")),
    Case("an unknown group of a ledger", QueryError, ("9", "'label'"), lambda s: s.memory().ledger("label")[9]),
    Case("an unknown parameter", QueryError, ("'fc9.weight'", "fc1.weight"),
         lambda s: s.memory().parameter("fc9.weight")),
    Case("contributions where only keys were kept", QueryError, ("'fc1.weight'", "score='weight'", "keep='slots'"),
         lambda s: s.spot(keep="keys").top(1, layer="fc1", per="slot")),
    Case("the dual output where only keys were kept", QueryError, ("'fc1.weight'", "keep='slots'"),
         lambda s: s.spot(keep="keys").output("fc1")),
    *(Case(f"{what} as a table without pandas", MissingExtra, ("'pandas'", "pip install 'dualform[pandas]'"),
           lambda s, ask=ask: without_pandas(ask(s)))
       for what, ask in {
        "hits": lambda s: s.spot().top(1, layer="fc1", per="slot"),
        "groups": lambda s: s.spot().by("label", layer="fc1"),
        "a timeline": lambda s: s.spot().timeline(layer="fc1"), "a certificate": lambda s: s.memory().certificate,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize("case", [*FOLDERS, *RECORDING, *ASKING], ids=lambda case: case.what)
def test_what_cannot_work_is_refused_in_one_paragraph_and_nothing_is_left_behind(case: Case, tmp_path):
    scene = Scene(tmp_path)
    with pytest.raises(Exception) as raised:
        case.act(scene)
    assert raised.type is case.error, f"{raised.type.__name__}: {raised.value}"
    assert issubclass(raised.type, DualformError)
    message = str(raised.value)
    assert "\n" not in message and 20 < len(message) < 600, "one paragraph, please"
    assert "Traceback" not in message and 'File "' not in message
    for words in case.says:
        assert words in message, f"{words!r} is not in: {message}"
    if case.stands is not None:
        memory = dualform.open(scene.path)
        assert case.stands <= memory.step <= case.stands + 2
        if step_in_message := re.search(r"stands at step (\d+)", message):
            assert int(step_in_message[1]) == memory.step
        assert all(bool(tensor.isfinite().all()) for tensor in memory.weights().values())
        assert memory.certificate.worst < 1e-10
    scene.check_nothing_is_left()


def test_every_error_has_its_place_in_the_tree():
    text = importlib.import_module("dualform.errors").__doc__
    for error in [DualformError, *_below(DualformError)]:
        assert error.__name__ in text and error.__module__ == "dualform.errors"


def _below(error: type) -> Iterator[type]:
    for subclass in error.__subclasses__():
        yield subclass
        yield from _below(subclass)


# -------------------------------------------------------------------------------------------- what looks bad but is not


@pytest.mark.parametrize(
    ("model", "inputs", "options"),
    [
        (Attention, lambda: torch.randn(5, 3, 4), {"keep": {"attn": "nothing"}}),
        (Tied, lambda: torch.randint(7, (5,)), {"keep": {"out": "nothing"}}),
        (lambda: named(norm=weight_norm(nn.Linear(4, 4)), fc=nn.Linear(4, 3)), lambda: torch.randn(5, 4), {}),
        (lambda: named(norm=spectral_norm(nn.Linear(4, 4)), fc=nn.Linear(4, 3)), lambda: torch.randn(5, 4), {}),
    ],
    ids=["attention", "tied embedding", "weight norm", "spectral norm"],
)  # fmt: skip
def test_what_cannot_be_recorded_can_be_left_to_the_rest(model, inputs, options, tmp_path):
    torch.manual_seed(0)
    network, states = model(), {}
    optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(network, optimizer, tmp_path / "m", dtype="float32", progress=False, **options) as tape:
        for _ in range(4):
            x = inputs()
            tape.note(index=torch.arange(5))
            network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states[tape.step] = state_of(network)
    memory = dualform.open(tmp_path / "m")
    assert memory.layers == ("fc",)
    assert memory.check(network, full=True).worst < 1e-4  # float32
    for step, state in states.items():
        weights = memory.at(step).weights()
        for name in memory.certificate.rest:
            assert torch.equal(weights[name], state[name]), f"'{name}' at step {step}"


def test_more_hits_than_slots_are_all_the_slots(tmp_path):
    spot = Scene(tmp_path).spot()
    hits = spot.top(1000, layer="fc1", per="slot")
    assert hits.slots.shape == (BATCH, STEPS * BATCH)
    assert all(sorted(line) == list(range(STEPS * BATCH)) for line in hits.slots.tolist())
    assert spot.memory.at(1).attend(spot.model, X).top(1000, layer="fc1", per="slot").slots.shape == (BATCH, BATCH)
    assert spot.memory.only("step = 2").attend(spot.model, X).top(1000, layer="fc1", per="slot").slots.shape == (
        BATCH,
        BATCH,
    )
    assert spot.memory.without("true").attend(spot.model, X).top(1000, layer="fc1", per="slot").slots.shape == (
        BATCH,
        0,
    )


@pytest.mark.parametrize("shape", [(1, 6), (6,)], ids=["a batch of one", "no batch axis"])
def test_one_example_is_a_batch(shape, tmp_path):
    model, optimizer = network()
    with dualform.record(model, optimizer, tmp_path / "m", dtype="float64", progress=False) as tape:
        for step in range(3):
            tape.note(index=[step], label=step)
            model(data(step, batch=1)[0].reshape(shape)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "m")
    assert memory.check(model, full=True).worst < 1e-12
    assert memory.visits["index"].to_pylist() == [0, 1, 2]
    hits = memory.attend(model, X[:1]).top(5, layer="fc2", per="slot")
    assert sorted(hit.label for hit in hits) == [0, 1, 2]


def test_a_column_of_another_size_than_the_batch_is_marked_and_the_weights_stay_exact(tmp_path):
    model, optimizer = network()
    with pytest.warns(DualformWarning, match="leading axes"), dualform.record(
        model, optimizer, tmp_path / "m", dtype="float64", progress=False
    ) as tape:  # fmt: skip
        tape.note(index=[1, 2])
        model(X).sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "m")
    assert {mark.kind for mark in memory.certificate.marks} == {"unknown-visits"}
    assert memory.check(model, full=True).worst < 1e-12


def test_an_answer_belongs_to_its_own_target(tmp_path):
    """A new target at the memory address of a discarded one is still a new target."""
    scene = Scene(tmp_path)
    memory = scene.memory()
    spot = memory.attend(scene.model, X)

    def contributions(spot: Any, target: Any) -> Tensor:
        return spot.by("label", layer="fc2", target=target).values

    for make in (lambda c: torch.full((BATCH,), c), lambda c: lambda out: out[:, c]):
        again = [contributions(spot, make(c)) for c in (0, 1, 2)]
        alone = [contributions(memory.attend(scene.model, X), make(c)) for c in (0, 1, 2)]
        assert all(torch.equal(a, b) for a, b in zip(again, alone, strict=True))
    two = memory.attend(scene.model, X[:2])
    one_class_each = contributions(two, torch.tensor([0, 1]))
    difference = contributions(two, (0, 1))
    assert torch.equal(one_class_each, contributions(memory.attend(scene.model, X[:2]), torch.tensor([0, 1])))
    assert torch.equal(difference, contributions(memory.attend(scene.model, X[:2]), (0, 1)))


# --------------------------------------------------------------------------------------- a batch that had to be skipped


def test_a_batch_with_nan_can_be_skipped_and_nothing_else_is_lost(tmp_path):
    scene = Scene(tmp_path)
    with scene.record() as tape:
        for step in range(6):
            x, y = data(step)
            tape.note(index=torch.arange(BATCH) + BATCH * step, label=y)
            F.cross_entropy(scene.model(x * NAN if step == 3 else x), y).backward()
            if step == 3:
                with pytest.raises(NonFiniteGradient):
                    scene.optimizer.step()
            else:
                scene.optimizer.step()
            scene.optimizer.zero_grad()
    memory = dualform.open(scene.path)
    assert memory.step == 5
    assert memory.check(scene.model, full=True).worst < 1e-12
    assert 12 not in memory.visits["index"].to_pylist()


def test_steps_that_a_loss_scaler_skips_are_no_steps(tmp_path):
    torch.manual_seed(0)
    model = named(fc1=nn.Linear(6, 5), act=nn.ReLU(), fc2=nn.Linear(5, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler, taken_steps = torch.amp.GradScaler("cpu", init_scale=2.0**127), 0
    with dualform.record(model, optimizer, tmp_path / "m", dtype="float32", progress=False) as tape:
        for step in range(8):
            x, y = data(step)
            tape.note(label=y)
            scale = scaler.get_scale()
            scaler.scale(100 * F.cross_entropy(model(x.float()), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            taken_steps += scaler.get_scale() == scale
    assert 0 < taken_steps < 8, "the scaler should have skipped some steps"
    memory = dualform.open(tmp_path / "m")
    assert memory.step == taken_steps
    assert memory.check(model, full=True).worst < 1e-4  # float32


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 4e3), (torch.float32, 1e37)], ids=["float16", "float32"]
)  # fmt: skip
def test_large_gradients_are_not_taken_for_infinite_ones(dtype, size, tmp_path):
    torch.manual_seed(0)
    model = named(fc=nn.Linear(6, 3)).to(dtype)
    optimizer = optim.SGD(model.parameters(), lr=1e-3 / size)
    with dualform.record(model, optimizer, tmp_path / "m", progress=False) as tape:
        for _ in range(2):
            (model(torch.ones(5, 6, dtype=dtype)).sum() * size).backward()
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
    assert tape.step == dualform.open(tmp_path / "m").step == 2


# ---------------------------------------------------------------------------------------------- files of other programs


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("part", ["shards", "calls", "visits", "steps", "snapshots"])
def test_recording_removes_no_file_that_it_did_not_write(part, overwrite, tmp_path):
    """A folder of runs may have its own ``snapshots``: reject or ignore it, but never empty it."""
    scene = Scene(tmp_path)
    foreign_file = scene.path / part / "keep.txt"
    if overwrite:
        scene.memory()
    foreign_file.parent.mkdir(parents=True, exist_ok=True)
    foreign_file.write_text("weeks of work")
    try:
        with scene.record(overwrite=overwrite) as tape:
            scene.step(tape)
    except DualformError:
        pass
    assert foreign_file.exists() and foreign_file.read_text() == "weeks of work"


# ------------------------------------------------------------------------------------------------------ another process


HOLDER = """
import sys, torch, dualform
model = torch.nn.Sequential(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dualform.record(model, optimizer, sys.argv[1], progress=False) as tape:
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    tape.flush()
    print("recording", flush=True)
    sys.stdin.read()
"""


def test_another_process_keeps_its_folder_until_it_ends(tmp_path):
    scene = Scene(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(scene.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "recording\n"
        assert dualform.open(scene.path).step == 1, "reading is always allowed"
        with pytest.raises(MemoryLocked, match="another recording"), scene.record(overwrite=True):
            pass
        assert dualform.open(scene.path).step == 1
        holder.kill()
    scene.check_nothing_is_left()


# ------------------------------------------------------------------------------------------------------------ full disk

SMALL_DISK = 3 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of three megabytes."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(disk)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.strip()}")
    yield disk
    gc.collect()  # tensors that still look into files of the disk would keep it busy
    if subprocess.run(["umount", str(disk)], capture_output=True, check=False).returncode:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(params=["through the cache", "past the cache", "past the cache, refused"])
def write_path(request, monkeypatch) -> str:
    """Large files bypass the page cache if the file system allows it; some file systems reject such a write late."""
    if request.param != "through the cache":
        monkeypatch.setattr(direct_io, "DIRECT_FROM", 1)
    if request.param == "past the cache, refused":
        direct, write = os.O_DIRECT, os.write
        import fcntl

        def refusing(file: int, content: Any) -> int:
            if fcntl.fcntl(file, fcntl.F_GETFL) & direct:
                raise OSError(22, "Invalid argument")
            return write(file, content)

        monkeypatch.setattr(direct_io.os, "write", refusing)
    return request.param


def test_a_full_disk_ends_the_recording_at_a_complete_step(small_disk, write_path, monkeypatch):
    monkeypatch.setattr(shard_builder, "SHARD_SECONDS", 0.0)  # a shard a step
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(SMALL_DISK // 2))
    path, history = small_disk / "memory", {}

    def train(model: nn.Module, optimizer: optim.SGD, tape: dualform.Tape, end: int) -> None:
        for step in range(tape.step, end):
            x, y = data(step, 100, 64)
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            history[tape.step] = [*map(_copied, (model.state_dict(), optimizer.state_dict()))]

    model, optimizer = network(100, 20)
    with (
        warnings.catch_warnings(),
        pytest.raises(WriteError, match=r"the disk is full.*Free some space.*resume=") as raised,
    ):
        warnings.simplefilter("ignore", DualformWarning)  # says the same once more
        with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
            train(model, optimizer, tape, 200)
    assert "\n" not in str(raised.value)
    assert not list(small_disk.rglob("*.partial"))
    memory = dualform.open(path)
    last_step = memory.step
    assert 3 < last_step < 200
    model.load_state_dict(history[last_step][0])
    assert memory.check(model, full=True).worst < 1e-12 and memory.certificate.worst < 1e-12
    del memory

    ballast.unlink()
    optimizer.load_state_dict(history[last_step][1])
    optimizer.zero_grad()
    with dualform.record(model, optimizer, path, dtype="float64", resume=last_step, progress=False) as tape:
        train(model, optimizer, tape, last_step + 5)
    assert dualform.open(path).step == last_step + 5
    assert dualform.open(path).check(model, full=True).worst < 1e-12


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def test_a_disk_that_is_full_from_the_start_leaves_nothing(small_disk):
    (small_disk / "ballast").write_bytes(bytes(SMALL_DISK - (16 << 10)))
    model, optimizer = network(100, 60)
    with pytest.raises(WriteError, match="the disk is full"), dualform.record(
        model, optimizer, small_disk / "memory", progress=False
    ):  # fmt: skip
        pass
    assert not list(small_disk.rglob("*.partial"))
    with pytest.raises(NotAMemory):
        dualform.open(small_disk / "memory")
    (small_disk / "ballast").unlink()
    with dualform.record(model, optimizer, small_disk / "memory", progress=False):
        pass


@pytest.mark.parametrize("over", [-8192, 0, 1, 4096, 40_960, 400_000, 1 << 20, 3 << 20])
def test_a_file_that_does_not_fit_is_never_taken_for_a_whole_one(over, small_disk, write_path):
    (small_disk / "ballast").write_bytes(bytes(300_000))
    room = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    file = small_disk / "slots.safetensors"
    try:
        entry = safetensors_file.write_tensors(file, {"keys": [torch.arange((room + over) // 8)]})
    except WriteError:
        assert not list(small_disk.glob("slots*"))
        return
    atomic_file.verify(file, entry, content=True)
    assert over < 0


def test_a_manifest_says_what_it_holds(tmp_path):
    """The numbers by which a changed manifest is detected."""
    scene = Scene(tmp_path)
    scene.memory()
    manifest = json.loads((scene.path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["steps"], manifest["visits"]) == (
        "dualform-memory", 2, STEPS, STEPS * BATCH,
    )  # fmt: skip
