"""Scores of TRAK with one and with all checkpoints of one training. Usage: trak_scores.py PROBLEM ANSWER"""

import logging
from tempfile import TemporaryDirectory

import torch
from problem_file import Problem, State, networks, write_answer
from torch import Tensor, nn
from trak import TRAKer
from trak.modelout_functions import AbstractModelOutput

BATCH = 250


class PassageOutput(AbstractModelOutput):
    """Mean log odds of the right words of a passage, as TRAK's paper has it for language models (its section 5.2)."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def get_output(model: nn.Module, weights: State, buffers: State, words: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, (weights, buffers), words.unsqueeze(0))
        return networks.targets(logits[0], labels).mean()

    def get_out_to_loss_grad(self, model: nn.Module, weights: State, buffers: State, batch: tuple) -> Tensor:
        words, labels = batch
        logits = torch.func.functional_call(model, (weights, buffers), words)
        right = logits.softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (1 - right).mean(1, keepdim=True).detach()


def projection(problem: Problem) -> int:
    """Random directions, a quarter to a half of the examples and at most 512: more than examples are singular."""
    return min(512, 2 ** (len(problem.inputs).bit_length() - 2))


def trak(problem: Problem, states: list[State]) -> Tensor:
    with TemporaryDirectory() as folder:
        traker = TRAKer(
            model=problem.model(), task=PassageOutput() if problem.is_language else "image_classification",
            train_set_size=len(problem.inputs), save_dir=folder, device="cpu", proj_dim=projection(problem),
            use_half_precision=False, logging_level=logging.ERROR,
        )  # fmt: skip
        for number, state in enumerate(states):
            traker.load_checkpoint(state, model_id=number)
            for inputs, labels in zip(problem.inputs.split(BATCH), problem.labels.split(BATCH), strict=True):
                traker.featurize((inputs, labels), num_samples=len(inputs))
        traker.finalize_features()
        for number, state in enumerate(states):
            traker.start_scoring_checkpoint("queries", state, model_id=number, num_targets=len(problem.queries))
            for inputs, labels in zip(problem.queries.split(BATCH), problem.query_labels.split(BATCH), strict=True):
                traker.score((inputs, labels), num_samples=len(inputs))
        return torch.tensor(traker.finalize_scores("queries")).T


def one_checkpoint(problem: Problem) -> tuple[Tensor, str]:
    return trak(problem, [problem.last]), f"TRAK at the last weights, {projection(problem)} random directions."


def all_checkpoints(problem: Problem) -> tuple[Tensor, str]:
    states = [checkpoint["state"] for checkpoint in problem.checkpoints]
    note = f"TRAK at {len(states)} checkpoints of one training, {projection(problem)} random directions."
    return trak(problem, states), note


if __name__ == "__main__":
    write_answer("traker", {"TRAK-1": one_checkpoint, "TRAK-5": all_checkpoints})
