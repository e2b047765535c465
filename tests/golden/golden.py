"""Golden memories: small ones that a version of dualform wrote, and what it answered.

``python tests/golden/golden.py`` writes those that are missing. What is there is never written again: a later version
has to open it, and give the same answers.
"""

import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "record"))

from together import Case, train  # pyright: ignore[reportMissingImports]

import dualform

HERE = Path(__file__).parent

BY_SOURCE = {"keep": "ledger", "by": "source"}

CASES: dict[str, Case] = {
    "sgd-float16": Case(options={"dtype": "float16"}),
    "sgd-float32": Case(options={"dtype": "float32"}),
    "sgd-float64": Case(),
    "adamw-float16": Case(optimiser="AdamW", options={"dtype": "float16"}),
    "adamw-float64": Case(optimiser="AdamW"),
    "adafactor": Case(optimiser="Adafactor"),
    "two-optimisers": Case(optimiser="two"),
    "ledger": Case(options=BY_SOURCE),
    "ledger-adamw": Case("conv2d", "AdamW", options=BY_SOURCE),
    "keys-and-ledger": Case(options={"keep": "keys+ledger", "by": "source"}),
    "conv": Case("conv2d, grouped"),
    "embedding-tied": Case("embedding, tied", "AdamW"),
    "lstm": Case("lstm"),
    "attention": Case("attention", "AdamW"),
    "conv1d-of-transformers": Case("linear, turned"),
    "accumulated": Case("linear", "AdamW", how="accumulated apart"),
    "many-shards": Case(optimiser="AdamW", steps=12, shard_bytes=1500),
    "resumed": Case(optimiser="AdamW", steps=9, stop_at=7, shard_bytes=1500),
    "two-processes": Case(optimiser="AdamW"),
    "two-processes-ledger": Case(options=BY_SOURCE),
}


def bar(case: Case) -> float:
    """How far an answer may be off, relative to the largest number in it."""
    return 1e-9 if case.options.get("dtype", "float64") == "float64" else 1e-4


def answers(path: Path, case: Case, inputs: Tensor) -> dict[str, Any]:
    """What a memory answers: weights, predictions, masks, and what each layer's part of a prediction is made of."""
    memory, found = dualform.open(path), {}
    model = memory.load_into(case.about.model(), progress=False)
    found["steps"], found["visits"] = memory.step, memory.store.manifest.visits
    found["layers"] = sorted(info.name for info in memory.store.manifest.layers)
    found["marks"] = sorted({mark.kind for mark in memory.certificate.marks})
    found["weights"] = {name: tensor.tolist() for name, tensor in memory.weights(progress=False).items()}
    found["prediction"] = memory.predict(model, inputs, progress=False).tolist()
    if "by" in case.options:
        without = memory.without("source = 's1'").predict(model, inputs, progress=False)
        found["without a source"] = without.tolist()
    else:
        earlier = memory.at(3)
        found["weights at 3"] = {name: tensor.tolist() for name, tensor in earlier.weights(progress=False).items()}
        found["prediction at 3"] = earlier.predict(model, inputs, progress=False).tolist()
        found["without a class"] = memory.without("label = 1").predict(model, inputs, progress=False).tolist()
    spot = memory.attend(model, inputs)
    for name in found["layers"]:
        found[name] = _of_layer(spot, name, case.options.get("keep", "slots"))
    return found


def _of_layer(spot: Any, layer: str, keep: str) -> dict[str, Any]:
    groups = spot.by("source", layer=layer, progress=False)
    found: dict[str, Any] = {"sources": list(groups.names), "by source": groups.values.tolist()}
    if keep == "slots":
        hits = spot.top(3, layer=layer, progress=False, per="slot")
        found |= {"visits": hits.visits.tolist(), "contributions": hits.contribution.tolist()}
    elif keep == "keys+ledger":
        hits = spot.top(3, layer=layer, score="weight", progress=False, per="slot")
        found |= {"visits": hits.visits.tolist(), "weights": hits.weight.tolist()}
    return found


def differences(before: Any, now: Any, bar: float, where: str = "") -> list[str]:
    """Where two answers are not the same."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = sorted({*before, *now}, key=str)
        return [line for key in keys for line in differences(before.get(key), now.get(key), bar, f"{where}/{key}")]
    if isinstance(before, list) and isinstance(now, list) and _numbers(before):
        one, two = (torch.tensor(each, dtype=torch.float64) for each in (before, now))
        same = one.shape == two.shape and float((one - two).abs().max()) <= bar * max(float(one.abs().max()), 1e-12)
        return [] if same else [f"{where}: {before} became {now}"]
    return [] if before == now else [f"{where}: {before} became {now}"]


def _numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, float)


def unpacked(name: str, folder: Path) -> Path:
    """A golden memory in a folder."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def write(name: str, folder: Path) -> None:
    """Record a case, in two processes where its name says so, and keep the memory with its answers."""
    case, path = CASES[name], folder / name
    if name.startswith("two-processes"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*command, str(HERE / "golden.py"), name, str(path)], check=True)
    else:
        train(case, path)
    inputs = case.about.inputs(torch.Generator().manual_seed(7))
    (HERE / f"{name}.json").write_text(
        json.dumps({"inputs": inputs.tolist(), "answers": answers(path, case, inputs)}) + "\n", encoding="utf-8"
    )
    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
        archive.add(path, name, filter=_plain)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nobody's file, of no time."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def _in_a_process(name: str, path: Path) -> None:
    from torch import distributed as dist

    dist.init_process_group("gloo")
    train(CASES[name], path, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def main() -> None:
    """Write what is missing."""
    if len(sys.argv) == 3:
        _in_a_process(sys.argv[1], Path(sys.argv[2]))
        return
    with TemporaryDirectory() as folder:
        for name in CASES:
            if not (HERE / f"{name}.tar.xz").exists():
                write(name, Path(folder))
                print(name, (HERE / f"{name}.tar.xz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
