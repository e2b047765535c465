"""The problem file, and the answer file that a script writes from its methods."""

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn, optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import networks

State = dict[str, Tensor]


class Unsupported(Exception):
    """The method does not apply to the problem; the message says why in one sentence."""


@dataclass(frozen=True)
class Problem:
    """A training that has happened, as described in README.md."""

    network: str
    first: State
    last: State
    checkpoints: list[dict]
    order: list[Tensor]
    optimizer: dict
    inputs: Tensor
    labels: Tensor
    queries: Tensor
    query_labels: Tensor

    @property
    def is_language(self) -> bool:
        return self.labels.ndim == 2

    def model(self, state: State | None = None) -> nn.Module:
        """The network with the given weights, or with the last weights."""
        model = networks.NETWORKS[self.network]()
        model.load_state_dict(self.last if state is None else state)
        return model.eval()

    def make_optimizer(self, model: nn.Module) -> optim.Optimizer:
        settings = {name: value for name, value in self.optimizer.items() if name != "kind"}
        return networks.OPTIMIZERS[self.optimizer["kind"]](model.parameters(), **settings)

    def distance(self, state: State) -> float:
        """The largest absolute difference between these weights and the last weights of the problem."""
        return max(float((state[name] - last).abs().max()) for name, last in self.last.items())


def write_answer(package: str, methods: dict[str, Callable[[Problem], tuple[Tensor, str]]]) -> None:
    """Read PROBLEM, run the methods on it, write ANSWER; both names come from the command line.

    A method returns its scores (query, example) and a note. Its CPU seconds include all that it needs, so that two
    methods that share a preparation both pay for it. An exception becomes the note of a method without scores.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    source, target = sys.argv[1:]
    problem = Problem(**torch.load(source, weights_only=True))
    answer: dict[str, dict] = {}
    for name, method in methods.items():
        torch.manual_seed(0)
        begin, entry = time.process_time(), {"version": version(package)}
        try:
            with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # progress bars
                scores, note = method(problem)
            entry["scores"] = check_scores(scores, problem)
        except Unsupported as reason:
            note = str(reason)
        except Exception as error:
            message = (str(error).strip() or "no message").splitlines()[0]
            note = f"{package} stops with {type(error).__name__}: {message}"
        answer[name] = entry | {"note": note, "seconds": time.process_time() - begin}
        print(f"{name}: {answer[name]['seconds']:.1f} CPU seconds. {note}", flush=True)
    partial = Path(f"{target}.partial")
    torch.save(answer, partial)
    partial.rename(target)


def check_scores(scores: Tensor, problem: Problem) -> Tensor:
    scores = scores.detach().float().contiguous()
    if scores.shape != (len(problem.queries), len(problem.inputs)):
        raise ValueError(f"scores of shape {tuple(scores.shape)} are not (query, example)")
    if not scores.isfinite().all():
        raise ValueError(f"{int((~scores.isfinite()).sum())} of {scores.numel()} scores are not finite")
    return scores
