"""What really happens without some examples, and how well each method's scores predict it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform import evaluate
from dualform.evaluate import RemovalRuns
from experiments.runs import Run

from .problems import examples_of, question, replayed
from .scores import OURS, read_scores
from .settings import NETWORKS, FlipSettings, RemovalSettings, WrongLabelSettings


def train_without_subsets(run: Run, settings: RemovalSettings) -> dict[str, Any]:
    """Train again without random subsets of each size. What is finished is kept, so this may be broken off."""
    with replayed(run, settings) as again:
        retraining = again.retraining(**question(settings), folder=run.folder / "trainings")
        for drop in settings.drops:
            runs = evaluate.removal_runs(retraining, settings.examples, drop, settings.subsets)
            np.savez(_removals_file(run, drop), weights=runs.weights.bool().numpy(), values=runs.values.numpy())
    return {"trainings": settings.subsets * len(settings.drops)}


def _removals_file(run: Run, drop: float) -> Path:
    return run.folder / f"removals-{drop:g}.npz"


def removals(run: Run, drop: float) -> RemovalRuns:
    """The trainings without subsets of one size."""
    with np.load(_removals_file(run, drop)) as file:
        return RemovalRuns(torch.from_numpy(file["weights"]).float(), torch.from_numpy(file["values"]))


def judge(run: Run, settings: RemovalSettings) -> dict[str, Any]:
    """The rank correlation of each method's predictions with what came out."""
    scores = read_scores(run)
    found: dict[str, Any] = {}
    for drop in settings.drops:
        runs = removals(run, drop)
        found[f"{drop:g}"] = {name: _correlation(evaluate.lds(matrix, runs)) for name, matrix in scores.items()}
    return {"lds": found}


def judge_averages(run: Run, settings: RemovalSettings) -> dict[str, Any]:
    """The same for scores and outcomes that are averaged over all networks of the variant."""
    each = [Run(run.folder.with_name(f"seed-{seed}"), run.experiment, settings) for seed in range(NETWORKS)]
    if not all((one.folder / "judged.json").exists() for one in each):
        return {"lds": {}, "others": {}}
    scores = [read_scores(one) for one in each]
    names = [name for name in scores[0] if all(name in part for part in scores)]
    averaged: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for drop in settings.drops:
        runs = [removals(one, drop) for one in each]
        matrices = {name: [part[name] for part in scores] for name in names}
        averaged[f"{drop:g}"] = {name: _correlation(evaluate.lds(parts, runs)) for name, parts in matrices.items()}
        others[f"{drop:g}"] = {name: _between_networks(parts, runs) for name, parts in matrices.items()}
    return {"lds": averaged, "others": others}


def _between_networks(scores: Sequence[Tensor], runs: Sequence[RemovalRuns]) -> float:
    """The LDS of the scores of one network for trainings of another one, mean over all pairs."""
    pairs = [(one, other) for one in range(len(scores)) for other in range(len(runs)) if one != other]
    return float(np.mean([evaluate.lds(scores[one], runs[other], samples=1).mean for one, other in pairs]))


def _correlation(result: evaluate.Correlation) -> dict[str, float]:
    return {"mean": result.mean, "low": result.low, "high": result.high}


def leave_out_alone(run: Run, settings: RemovalSettings) -> dict[str, Any]:
    """Each method's strongest examples of a few queries, left out one at a time."""
    examples = examples_of(settings)
    asked = question(settings)
    with replayed(run, settings) as again:
        retraining = again.retraining(**asked, folder=run.folder / "trainings", progress=False)
        found = {}
        for name, matrix in read_scores(run).items():
            if name in ("random", "loss", "gradient norm"):
                continue  # the same examples for all queries, or any
            parts = [
                evaluate.leave_one_out(matrix, retraining, query, settings.strongest)
                for query in range(min(settings.alone, len(examples.queries)))
            ]
            right = torch.cat([(part.predicted.sign() == part.real.sign()).flatten() for part in parts])
            sizes = torch.cat([part.real.abs().flatten() for part in parts])
            found[name] = {
                "correlation": float(np.mean([part.correlation for part in parts])),
                "right_sign": float(right.double().mean()),
                "mean_change": float(sizes.mean()),
            }
            if name == OURS[0]:
                found[name]["pairs"] = [
                    torch.cat([getattr(part, side).flatten() for part in parts]).tolist()
                    for side in ("predicted", "real")
                ]
    return {"methods": found}


def find_wrong_labels(run: Run, settings: WrongLabelSettings) -> dict[str, Any]:
    """The area under the ROC curve of each method: an example is suspicious if it speaks against the right answers to
    the queries; and, of ours, if the margin of its own given label depends on the example itself.
    """
    examples, found = examples_of(settings), {}
    for name, matrix in read_scores(run).items():
        suspicion = matrix[0] if name in ("loss", "gradient norm") else -matrix.mean(0)
        found[name] = _detection(evaluate.mislabelled(suspicion, examples.wrong))
    with replayed(run, settings) as again:
        for name, ask in (("through training", again.influence), ("direct", again.direct)):
            own = ask(examples.inputs, target="margin", labels=examples.labels, progress=False).values.diagonal()
            found[f"{name}, on itself"] = _detection(evaluate.mislabelled(own, examples.wrong))
    return {"methods": found}


def _detection(result: evaluate.Detection) -> dict[str, float]:
    return {"auc": result.auc, "low": result.low, "high": result.high}


def flip(run: Run, settings: FlipSettings) -> dict[str, Any]:
    """How many of the top examples must go until the prediction is another class, by each method."""
    examples = examples_of(settings)
    with replayed(run, settings) as again:
        with torch.no_grad():
            predicted = again.retrain()(examples.queries).argmax(1)

        def lead(output: Tensor) -> Tensor:
            """By how much the logit of the predicted class is ahead of the next one."""
            others = output.scatter(1, predicted[:, None], float("-inf"))
            return output.gather(1, predicted[:, None])[:, 0] - others.max(1).values

        asked = {"target": "margin", "labels": predicted, "progress": False}
        methods = {
            "through training": again.influence(examples.queries, **asked).values,
            "direct": again.direct(examples.queries, **asked).values,
            "input similarity": evaluate.baselines.input_similarity(
                examples.queries, examples.inputs, predicted[:, None] == examples.labels
            ),
        }
        retraining = again.retraining(examples.queries, target=lead, folder=run.folder / "trainings")
        found = {name: evaluate.flips(matrix, retraining, settings.most) for name, matrix in methods.items()}
    return {"methods": {name: {"removed": list(part.removed), "most": part.most, "trainings": part.trainings,
                               "share": part.share(part.most), "interval": part.interval(part.most)}
                        for name, part in found.items()}}  # fmt: skip
