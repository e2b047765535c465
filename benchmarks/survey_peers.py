"""Scores of captum's TracInCP and kronfluence's EK-FAC for ``survey.py``, in an environment that has these two.

python survey_peers.py FOLDER: reads FOLDER/problem.pt, writes FOLDER/peers.pt
"""

import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from captum.influence import TracInCP
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from survey_networks import NETWORKS, RATES, losses, scored_layers
from torch import nn
from torch.utils.data import TensorDataset


class LogitOfClass(Task):
    """The loss of the labels, and as the measurement the summed logit of the given class."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def compute_train_loss(self, batch, model, sample=False):
        assert not sample
        return losses(model(batch[0]), batch[1]).sum()

    def compute_measurement(self, batch, model):
        return model(batch[0]).gather(1, batch[1][:, None]).sum()

    def get_influence_tracked_modules(self):
        return self.layers


def network(name, state, dtype=torch.float32):
    model = NETWORKS[name]()
    model.load_state_dict(state)
    return model.to(dtype).eval()


def tracin(name, states, train, queries, folder):
    """The products of loss gradients at all checkpoints, and the CPU seconds."""
    model, files = network(name, states[-1]), []
    for number, state in enumerate(states):
        files.append(str(folder / f"{number}.pt"))
        torch.save(state, files[-1])

    def load(model, file):
        model.load_state_dict(torch.load(file, weights_only=True))
        return RATES[files.index(file)]

    begin = time.process_time()
    attributor = TracInCP(
        model, TensorDataset(*train), files, load, layers=scored_layers(model), batch_size=64,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"), sample_wise_grads_per_batch=True,
    )  # fmt: skip
    scores = attributor.influence(tuple(queries), k=None)
    return scores.detach(), time.process_time() - begin


def ekfac(name, state, train, queries, folder, dtype, dampings):
    """Scores for each damping, and the CPU seconds of factors and of the scores of one damping."""
    model = network(name, state, dtype)
    train, queries = (TensorDataset(x.to(dtype), y) for x, y in (train, queries))
    task = LogitOfClass(scored_layers(model))
    analyzer = Analyzer(name.replace(" ", "-"), prepare_model(model, task), task, cpu=True, output_dir=str(folder),
                        disable_tqdm=True)  # fmt: skip
    factor_args = FactorArguments(
        strategy="ekfac", use_empirical_fisher=True, eigendecomposition_dtype=torch.float64, lambda_dtype=dtype,
        activation_covariance_dtype=dtype, gradient_covariance_dtype=dtype, per_sample_gradient_dtype=dtype,
    )  # fmt: skip
    begin, scores = time.process_time(), {}
    analyzer.fit_all_factors("factors", train, 64, factor_args=factor_args, overwrite_output_dir=True)
    fitted = time.process_time()
    for damping in dampings:
        asked = time.process_time()
        arguments = ScoreArguments(
            damping_factor=damping, score_dtype=dtype, precondition_dtype=dtype, per_sample_gradient_dtype=dtype
        )
        analyzer.compute_pairwise_scores(
            "scores", "factors", queries, train, 100, 64, score_args=arguments, overwrite_output_dir=True
        )
        scores[damping] = analyzer.load_pairwise_scores("scores")["all_modules"]
    return scores, fitted - begin, time.process_time() - asked


def main(folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problem, answers = torch.load(folder / "problem.pt", weights_only=True), {}
    for name, states in problem["states"].items():
        train, queries = problem["train"], problem["queries"]
        tracin_scores, tracin_seconds = tracin(name, states, train, queries, folder)
        answers[name] = {"tracin": tracin_scores, "tracin_seconds": tracin_seconds}
        for dtype in (torch.float32, torch.float64):
            where = folder / str(dtype)
            scores, *seconds = ekfac(name, states[-1], train, queries, where, dtype, problem["dampings"])
            answers[name][str(dtype)] = {"scores": scores, "seconds": seconds}
    versions = {package: version(package) for package in ("captum", "kronfluence", "torch")}
    torch.save({"answers": answers, "versions": versions}, folder / "peers.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
