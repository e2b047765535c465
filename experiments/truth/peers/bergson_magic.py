"""Scores of MAGIC: bergson's metagradients through the whole training. Usage: bergson_magic.py PROBLEM ANSWER"""

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import torch
import torchopt
from bergson.config.config import TrainingConfig
from bergson.distributed import grad_tree
from bergson.magic import BackwardState, Trainer, TrainerState
from problem_file import Problem, Unsupported, networks, write_answer
from torch import Tensor, nn
from torch.nn import functional as F
from torchopt.pytree import tree_iter

EPS_ROOT = TrainingConfig.eps_root
"""Bergson's default, 1e-17: Adam's second moment gets it under the root, whose slope at a moment of 0 is infinite."""


class Batches:
    """What bergson's trainer reads: the batches in order, and one weight an example."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.device = problem, torch.device("cpu")
        self.weights = nn.Parameter(torch.ones(len(problem.inputs)))

    @property
    def requires_grad(self) -> bool:
        return self.weights.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.weights.requires_grad = value

    def __len__(self) -> int:
        return len(self.problem.order)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        """A batch by bergson's name for inputs; under its name for labels it would look for words."""
        batch = self.problem.order[step]
        inputs, labels = self.problem.inputs[batch], self.problem.labels[batch]
        return {"input_ids": inputs, "right": labels, "weights": self.weights[batch]}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.__getitem__, range(len(self)))


class WeightedLoss(nn.Module):
    """The training loss of a batch, with a weight for each example's share."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        losses = F.cross_entropy(self.network(input_ids).flatten(0, -2), right.flatten(), reduction="none")
        return (losses.unflatten(0, (len(right), -1)).mean(1) * weights).mean()


def torchopt_optimizer(problem: Problem) -> torchopt.base.GradientTransformation:
    """The same optimizer with the same settings, those that the problem leaves to torch's defaults included."""
    settings = problem.make_optimizer(problem.model()).defaults
    if settings.get("amsgrad"):
        raise Unsupported("torchopt's Adam has no AMSGrad.")
    match problem.optimizer["kind"]:
        case "SGD":
            names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
            return torchopt.sgd(**{name: settings[name] for name in names})
        case kind:
            make = {"Adam": torchopt.adam, "AdamW": torchopt.adamw}[kind]
            return make(**{name: settings[name] for name in ("lr", "betas", "eps", "weight_decay")}, eps_root=EPS_ROOT)


def query_gradient(problem: Problem, model: WeightedLoss, state: TrainerState, query: int) -> BackwardState:
    """Where the way back begins: the gradient of one query's target at the last weights."""
    with state.activate(model) as parameters:
        outputs = model.network(problem.queries[query : query + 1])
        target = networks.targets(outputs, problem.query_labels[query : query + 1])[0]
        gradient = {name: value.detach().clone() for name, value in grad_tree(target, parameters).items()}
    moments = [torch.zeros_like(t) for t in tree_iter(state.opt_state) if torch.is_tensor(t) and t.is_floating_point()]
    return BackwardState(gradient, moments, torch.zeros(len(problem.inputs)))


def magic(problem: Problem) -> tuple[Tensor, str]:
    model, batches = WeightedLoss(problem.model(problem.first)), Batches(problem)
    trainer, state = Trainer.initialize(model, torchopt_optimizer(problem))
    with TemporaryDirectory() as folder:
        final = trainer.train(state, batches, save_dir=folder, save_mode="sqrt").detach_().to("cpu")
        distance = problem.distance({name.removeprefix("network."): value for name, value in final.params.items()})
        scores = []
        for query in range(len(problem.queries)):
            state = final.to("cpu")
            backward = query_gradient(problem, model, state, query)
            backward = trainer.backward(folder, batches, backward, state, cleanup=False, save_mode="sqrt")
            scores.append(backward.weight_grads.detach())
    return torch.stack(scores), f"MAGIC on torchopt, final weights {distance:.1e} from `last`."


if __name__ == "__main__":
    write_answer("bergson", {"MAGIC": magic})
