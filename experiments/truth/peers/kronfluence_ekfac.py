"""Scores of kronfluence's EK-FAC influence at the last weights. Usage: kronfluence_ekfac.py PROBLEM ANSWER"""

from tempfile import TemporaryDirectory

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from problem_file import Problem, networks, write_answer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

Batch = tuple[Tensor, Tensor]


class TargetTask(Task):
    """The summed training loss, and as the measurement the summed targets of the queries."""

    def compute_train_loss(self, batch: Batch, model: nn.Module, sample: bool = False) -> Tensor:
        """The summed loss of the labels, or of labels drawn from the network's own predictions."""
        outputs, labels = model(batch[0]).flatten(0, -2), batch[1].flatten()
        if sample:
            labels = torch.multinomial(outputs.detach().softmax(1), 1)[:, 0]
        return F.cross_entropy(outputs, labels, reduction="sum")

    def compute_measurement(self, batch: Batch, model: nn.Module) -> Tensor:
        return networks.targets(model(batch[0]), batch[1]).sum()


def influence(problem: Problem, damping: float | None) -> Tensor:
    """Kronfluence gives ∇targetᵀ (H + λ)⁻¹ ∇loss, to first order the rise of the target without the example.

    The scores are minus that.
    """
    train = TensorDataset(problem.inputs, problem.labels)
    queries = TensorDataset(problem.queries, problem.query_labels)
    with TemporaryDirectory() as folder:
        task = TargetTask()
        analyzer = Analyzer(
            "truth", prepare_model(problem.model(), task), task, cpu=True, output_dir=folder, disable_tqdm=True
        )
        analyzer.fit_all_factors(
            "factors", train, per_device_batch_size=64, factor_args=FactorArguments(strategy="ekfac")
        )
        analyzer.compute_pairwise_scores(
            "scores", "factors", queries, train, per_device_query_batch_size=len(queries),
            per_device_train_batch_size=64, score_args=ScoreArguments(damping_factor=damping),
        )  # fmt: skip
        return -analyzer.load_pairwise_scores("scores")["all_modules"]


def scope(problem: Problem) -> str:
    """Kronfluence tracks linear and convolution layers; the note says what this leaves out."""
    kinds = {type(m).__name__ for m in problem.model().modules() if list(m.parameters(recurse=False))}
    others = sorted(kinds - {"Linear", "Conv2d"})
    return f"without the layers of kind {', '.join(others)}" if others else "all layers"


def default_damping(problem: Problem) -> tuple[Tensor, str]:
    damping = ScoreArguments().damping_factor
    note = f"EK-FAC of the true Fisher at the last weights, damping {damping}, {scope(problem)}."
    return influence(problem, damping), note


def relative_damping(problem: Problem) -> tuple[Tensor, str]:
    """Kronfluence takes a damping of None for a tenth of the mean eigenvalue."""
    note = (
        f"EK-FAC of the true Fisher at the last weights, damping 0.1 × each layer's mean eigenvalue, {scope(problem)}."
    )
    return influence(problem, None), note


if __name__ == "__main__":
    write_answer("kronfluence", {"EK-FAC": default_damping, "EK-FAC, damping 0.1 × mean": relative_damping})
