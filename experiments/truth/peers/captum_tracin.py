"""Scores of captum's TracInCP, over all parameters and over the last layer. Usage: captum_tracin.py PROBLEM ANSWER"""

from captum.influence import TracInCP, TracInCPFast
from problem_file import Problem, Unsupported, networks, write_answer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def example_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each example, a mean over its words in the language model."""
    losses = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.unflatten(0, (len(labels), -1)).mean(1)


def minus_targets(outputs: Tensor, labels: Tensor) -> Tensor:
    """What stands in for the loss of a query: a lower one is a higher target."""
    return -networks.targets(outputs, labels)


class SummedLoss(nn.Module):
    """The sum of a batch; captum reads off the attribute that it is one."""

    reduction = "sum"

    def __init__(self, losses) -> None:
        super().__init__()
        self.losses = losses

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.losses(outputs, labels).sum()


def settings(problem: Problem) -> dict:
    """The arguments that both classes take. A checkpoint's name is its place in the list."""

    def load(model: nn.Module, place: str) -> float:
        checkpoint = problem.checkpoints[int(place)]
        model.load_state_dict(checkpoint["state"])
        return checkpoint["rate"]

    return {
        "model": problem.model(),
        "train_dataset": TensorDataset(problem.inputs, problem.labels),
        "checkpoints": [str(place) for place in range(len(problem.checkpoints))],
        "checkpoints_load_func": load,
        "batch_size": 64,
    }


def all_parameters(problem: Problem) -> tuple[Tensor, str]:
    """Captum's gradients by batch know linear and convolution layers; the language model's come one by one."""
    together = not problem.is_language
    loss, query_loss = (SummedLoss(f) if together else f for f in (example_losses, minus_targets))
    tracin = TracInCP(**settings(problem), loss_fn=loss, test_loss_fn=query_loss, sample_wise_grads_per_batch=together)
    scores = tracin.influence((problem.queries, problem.query_labels), k=None)
    return scores, f"TracInCP at {len(problem.checkpoints)} checkpoints times their learning rates, all parameters."


def last_layer(problem: Problem) -> tuple[Tensor, str]:
    if problem.is_language:
        raise Unsupported(
            "TracInCPFast asserts that the gradients of the last layer's outputs are (example, output), "
            "and a passage has outputs for each of its words."
        )
    given = settings(problem)
    layer = [module for module in given["model"].modules() if isinstance(module, nn.Linear)][-1]
    tracin = TracInCPFast(
        final_fc_layer=layer, loss_fn=SummedLoss(example_losses), test_loss_fn=SummedLoss(minus_targets), **given
    )
    scores = tracin.influence((problem.queries, problem.query_labels), k=None)
    note = f"TracInCPFast at {len(problem.checkpoints)} checkpoints times their learning rates, last layer only."
    return scores, note


if __name__ == "__main__":
    write_answer("captum", {"TracInCP": all_parameters, "TracInCP last layer": last_layer})
