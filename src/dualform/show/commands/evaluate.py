"""``dualform evaluate``: how right are influence and direct contributions? Judged by training again without subsets.

It replays classifiers that were trained on the mean cross entropy of each batch. Other losses are replayed in Python,
with ``memory.replay`` and ``dualform.evaluate``.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dualform import evaluate
from dualform.errors import QueryError
from dualform.evaluate import MethodTable, RemovalRuns, baselines
from dualform.explain import Memory, Metasmoothness, ReplayedRun, RunCheck
from dualform.explain.query import examples_first, logits_of, run_model
from dualform.replay import Data, Losses

from .. import figures
from ..examples import Examples
from ..inputs import together

OTHER_LOSS = (
    "This command replays classifiers that were trained on the mean cross entropy of each batch of --data "
    "as they are. For any other loss use memory.replay and dualform.evaluate in Python (docs/guides, 'What would have "
    "changed?')."
)


@dataclass(frozen=True)
class Plan:
    """What is evaluated: the number of queries, the trainings, the share of examples each leaves out."""

    queries: int
    subsets: int
    drop: float
    seed: int
    processes: int | None
    index: str


@dataclass(frozen=True)
class Evaluation:
    """What came out."""

    check: RunCheck
    target: str
    table: MethodTable
    runs: RemovalRuns
    smooth: Metasmoothness


def run(
    memory: Memory, network: nn.Module, training: Examples, test: Examples, plan: Plan, folder: Path, console: Console
) -> Evaluation:
    """Check the run, score every example, train again without subsets; print and keep what comes out in ``folder``."""
    losses, data = classification(training, network)
    queries = min(plan.queries, len(test))
    inputs = together(test.rows(range(queries)), test.beside(range(queries)), network)
    with _replayed(memory, network, losses, data, plan.index, console) as (replayed, check):
        trained = replayed.retrain()
        with torch.no_grad():
            predicted = examples_first(logits_of(run_model(trained, inputs)), {}).argmax(1)
        console.print(f"{len(replayed.examples):,} training examples, {queries} queries, {plan.subsets} trainings.")
        question: dict[str, Any] = {"target": "margin", "labels": predicted}
        kept: dict[str, Any] = {"folder": folder / "trainings", "processes": plan.processes}
        smooth = replayed.metasmoothness(inputs, **question, **kept, share=plan.drop, seed=plan.seed)
        runs = evaluate.removal_runs(
            replayed.retraining(inputs, **question, **kept),
            len(replayed.examples), plan.drop, plan.subsets, plan.seed,
        )  # fmt: skip
        scores = _scores(replayed, trained, losses, data, training, test, predicted, inputs)
        table = evaluate.table(scores, runs)
    outcome = Evaluation(check, "the margin of the predicted class", table, runs, smooth)
    console.print(as_table(outcome, plan))
    console.print(str(smooth))
    for file in save(outcome, memory, plan, folder):
        console.print(f"Written: {file}", soft_wrap=True)
    return outcome


def classification(training: Examples, network: nn.Module) -> tuple[Losses, Data]:
    """The shares of the mean cross entropy of a batch, and its batches from the examples of --data."""
    if training.labels is None:
        raise QueryError("the training examples have no labels; give --data a file with 'inputs' and 'labels'.")
    labels = torch.as_tensor(np.asarray(training.labels)).long()

    def losses(model: nn.Module, batch: tuple[Any, Tensor]) -> Float[Tensor, " b"]:
        logits = examples_first(logits_of(run_model(model, batch[0])), {})
        return nn.functional.cross_entropy(logits, batch[1], reduction="none") / len(batch[1])

    def data(index: Int[Tensor, " b"]) -> tuple[Any, Int[Tensor, " b"]]:
        numbers = index.tolist()
        return together(training.rows(numbers), training.beside(numbers), network), labels[index]

    return losses, data


@contextmanager
def _replayed(
    memory: Memory, network: nn.Module, losses: Losses, data: Data, index: str, console: Console
) -> Iterator[tuple[ReplayedRun, RunCheck]]:
    """The run on as many threads as it comes out exactly with: first on one, with which trainings run side by side."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        replayed = memory.replay(network, losses, data, index=index)
        if not replayed.check().exact and before > 1:
            torch.set_num_threads(before)
            replayed = memory.replay(network, losses, data, index=index)
        check = replayed.check()
        console.print(str(check), soft_wrap=True)
        if check.first_difference == 1:
            raise QueryError(f"the run is another one from its first step on. {OTHER_LOSS}")
        yield replayed, check
    finally:
        torch.set_num_threads(before)


def _scores(
    replayed: ReplayedRun, trained: nn.Module, losses: Losses, data: Data, training: Examples, test: Examples,
    predicted: Int[Tensor, " n"], inputs: Any,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """All methods, as functions, so that their CPU seconds are measured."""
    index, queries = replayed.examples, len(predicted)
    own = training.rows(index.tolist())
    same = predicted[:, None] == torch.as_tensor(np.asarray(training.labels)).long()[index]
    return {
        "through training": lambda: replayed.influence(inputs, target="margin", labels=predicted),
        "direct": lambda: replayed.direct(inputs, target="margin", labels=predicted),
        "input similarity": lambda: baselines.input_similarity(test.rows(range(queries)), own, same),
        "gradient norm": lambda: baselines.gradient_norm(trained, losses, data, index, queries),
        "loss": lambda: baselines.loss(trained, losses, data, index, queries),
        "random": lambda: baselines.random(queries, len(index)),
    }


def as_table(outcome: Evaluation, plan: Plan) -> Table:
    """The methods side by side, for the terminal."""
    queries, subsets = outcome.runs.values.shape[1], len(outcome.runs)
    title = (
        f"LDS: rank correlation of predicted and retrained {outcome.target} "
        f"({queries} queries, {subsets} trainings without {plan.drop:.0%})"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for heading in ("LDS", "95 % interval", "CPU seconds"):
        table.add_column(heading, justify="right")
    for name, part in outcome.table.correlations.items():
        interval = f"{part.low:+.3f} to {part.high:+.3f}"
        table.add_row(name, f"{part.mean:+.3f}", interval, f"{outcome.table.seconds[name]:.2f}")
    return table


def save(outcome: Evaluation, memory: Memory, plan: Plan, folder: Path) -> list[Path]:
    """Write the figure and the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, numbers = folder / "lds.png", folder / "evaluation.json"
    figures.lds(outcome.table).savefig(figure)
    numbers.write_text(json.dumps(content(outcome, memory, plan), indent=2) + "\n", encoding="utf-8")
    return [figure, numbers]


def content(outcome: Evaluation, memory: Memory, plan: Plan) -> dict[str, Any]:
    """The numbers, with what they are about."""
    methods = [
        {"method": name, "lds": part.mean, "low": part.low, "high": part.high,
         "cpu_seconds": outcome.table.seconds[name], "per_query": part.per_query.tolist()}
        for name, part in outcome.table.correlations.items()
    ]  # fmt: skip
    return {
        "memory": str(memory.path),
        "versions": memory.store.manifest.versions,
        "check": str(outcome.check),
        "target": outcome.target,
        "queries": outcome.runs.values.shape[1],
        "subsets": plan.subsets,
        "drop": plan.drop,
        "seed": plan.seed,
        "metasmoothness": outcome.smooth.per_direction.tolist(),
        "methods": methods,
    }
