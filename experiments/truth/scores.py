"""The scores of all methods, as matrices (query, example) in a folder beside the run."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.evaluate import as_matrix, baselines
from experiments.runs import Run, console

from .problems import checkpoints, examples_of, losses, network_of, order_of, question, replayed
from .settings import TrainingSettings

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
ENVIRONMENTS = {
    "captum_tracin.py": ".venv-truth",
    "kronfluence_ekfac.py": ".venv-truth",
    "trak_scores.py": ".venv-truth",
    "dattri_llm_scores.py": ".venv-truth",
    "bergson_magic.py": ".venv-truth-bergson",
}
"""The environment of each peer's script; ``make truth`` creates them."""
LONGEST = 3600
"""Seconds that a script of a peer may take."""
OURS = ("through training", "direct")


def scores_file(run: Run, method: str) -> Path:
    folder = run.folder / "scores"
    folder.mkdir(exist_ok=True)
    return folder / f"{method.replace(' ', '-')}.npy"


def read_scores(run: Run) -> dict[str, Tensor]:
    """The matrices of all methods that have one, in the order of the page."""
    names = [*OURS]
    for stage in ("trivial", "peers"):
        file = run.folder / f"{stage}.json"
        names += json.loads(file.read_text())["methods"] if file.exists() else []
    files = {name: scores_file(run, name) for name in names}
    return {name: torch.from_numpy(np.load(file)) for name, file in files.items() if file.exists()}


def score(run: Run, settings: TrainingSettings) -> dict[str, Any]:
    """Influence through training and direct contributions, with their CPU seconds."""
    with replayed(run, settings) as again:
        begin = time.process_time()
        check = again.check()
        seconds = time.process_time() - begin
        asked = question(settings)
        smooth = again.metasmoothness(**asked, folder=run.folder / "trainings", progress=False)
        methods = {"through training": again.influence, "direct": again.direct}
        timed = {name: _timed(run, name, partial(ask, **asked, progress=False)) for name, ask in methods.items()}
        return {
            "exact": check.exact,
            "check": str(check),
            "check_seconds": seconds,
            "metasmoothness": smooth.per_direction.tolist(),
            "methods": timed,
        }


def score_trivially(run: Run, settings: TrainingSettings) -> dict[str, Any]:
    """The scores that any method has to beat."""
    examples = examples_of(settings)
    queries, index = len(examples.queries), np.arange(len(examples.inputs))
    with replayed(run, settings) as again:
        model = again.retrain()

    def batch(index: Tensor) -> tuple[Tensor, Tensor]:
        return examples.inputs[index], examples.labels[index]

    methods: dict[str, Callable[[], Any]] = {
        "gradient norm": lambda: baselines.gradient_norm(model, losses, batch, index, queries),
        "loss": lambda: baselines.loss(model, losses, batch, index, queries),
        "random": lambda: baselines.random(queries, len(index), settings.seed),
    }
    if settings.data == "wikitext-2":
        methods = {"BM25": lambda: baselines.bm25(list(examples.queries), list(examples.inputs)), **methods}
    else:
        same = examples.query_labels[:, None] == examples.labels
        methods = {
            "input similarity": lambda: baselines.input_similarity(examples.queries, examples.inputs, same), **methods
        }  # fmt: skip
    return {"methods": {name: _timed(run, name, method) for name, method in methods.items()}}


def _timed(run: Run, name: str, method: Callable[[], Any]) -> dict[str, Any]:
    begin = time.process_time()
    scores = method()
    seconds = time.process_time() - begin
    np.save(scores_file(run, name), as_matrix(scores).float().numpy())
    return {"cpu_seconds": seconds}


# ---------------------------------------------------------------------------------------------------- peers


def peers_are_installed() -> bool:
    return all(_python(script).exists() for script in ENVIRONMENTS)


def _python(script: str) -> Path:
    return ROOT / ENVIRONMENTS[script] / "bin" / "python"


def score_by_peers(run: Run, settings: TrainingSettings) -> dict[str, Any]:
    """The scores of other packages, each in an environment of its own."""
    problem = run.folder / "problem.pt"
    torch.save(problem_of(settings), problem)
    methods: dict[str, Any] = {}
    for script in ENVIRONMENTS:
        answer = run.folder / "answer.pt"
        answer.unlink(missing_ok=True)
        command = [_python(script), PEERS / script, problem, answer]
        try:
            subprocess.run(command, check=True, timeout=LONGEST, stdout=sys.stderr)
            found = torch.load(answer, weights_only=True)
        except (subprocess.SubprocessError, OSError) as error:
            console.print(f"{script}: {error}")
            found = {script.removesuffix(".py"): {"note": f"failed: {type(error).__name__}"}}
        for name, method in found.items():
            if method.get("scores") is not None:
                np.save(scores_file(run, name), method["scores"].float().numpy())
            about = {key: method[key] for key in ("note", "version") if method.get(key)}
            methods[name] = about | ({"cpu_seconds": method["seconds"]} if "seconds" in method else {})
        answer.unlink(missing_ok=True)
    problem.unlink()
    return {"methods": methods}


def problem_of(settings: TrainingSettings) -> dict[str, Any]:
    """A training that has happened, as the scripts of peers read it (``peers/README.md``)."""
    examples, states = examples_of(settings), checkpoints(settings)
    return {
        "network": settings.network,
        "first": network_of(settings).state_dict(),
        "last": states[-1]["state"],
        "checkpoints": states,
        "order": order_of(settings),
        "optimizer": settings.optimizer,
        "inputs": examples.inputs,
        "labels": examples.labels,
        "queries": examples.queries,
        "query_labels": examples.query_labels,
    }
