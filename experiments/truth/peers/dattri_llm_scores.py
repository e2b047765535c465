"""Scores of dattri-LLM from the gradients of every step. Usage: dattri_llm_scores.py PROBLEM ANSWER

Each method trains again from the first weights under dattri-LLM's hooks, which keep every example's gradient in memory.
"""

import re
from tempfile import TemporaryDirectory

import torch
from dattri_llm import (
    AdamWInfluenceAttributor,
    AttributionArguments,
    DVEmbAttributor,
    GradientStorageManager,
    HookManager,
    HookManagerConfig,
    OffloadCallback,
    OptimizerStateCallback,
    TracInAttributor,
)
from dattri_llm.attribution import AttributionScore
from problem_file import Problem, Unsupported, networks, write_answer
from torch import Tensor, nn

BATCHLESS = {"places"}
"""Layers whose input has no batch axis, so that an example has no gradient of its own there."""


def hooks(model: nn.Module, callbacks: list) -> HookManager:
    names = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    patterns = [f"^{re.escape(name)}$" for name in names if name not in BATCHLESS]
    return HookManager(model, config=HookManagerConfig(linear_io=patterns), callbacks=callbacks)


def record_training(problem: Problem, store: GradientStorageManager, moments: bool) -> tuple[nn.Module, dict | None]:
    """Train again and store the gradients of each step; returns the trained network and Adam's moments of each step."""
    model = problem.model(problem.first)
    optimizer = problem.make_optimizer(model)
    recorder = OptimizerStateCallback(model, optimizer) if moments else None
    manager = hooks(model, [OffloadCallback(1, store), *([recorder] if recorder else [])])
    with manager.collect():
        for step, batch in enumerate(problem.order):
            optimizer.zero_grad()
            networks.loss(model(problem.inputs[batch]), problem.labels[batch]).backward()
            optimizer.step()
            if recorder:
                recorder.record_post(step)
    manager.remove()
    return model, recorder.dynamics() if recorder else None


def record_queries(problem: Problem, model: nn.Module, store: GradientStorageManager, sign: int) -> None:
    manager = hooks(model, [OffloadCallback(1, store)])
    with manager.collect():
        (sign * networks.targets(model(problem.queries), problem.query_labels).sum()).backward()
    manager.remove()


def sum_of_visits(problem: Problem, score: AttributionScore, rates: list[float] | None = None) -> Tensor:
    """The scores (query, example), summed over the steps. Rows come step by step, each step in the order of its batch.

    Places are counted and not looked up by dattri-LLM's hashes, because equal examples have equal hashes.
    """
    if len(score.row_steps) != sum(map(len, problem.order)) or len(score.test_ids) != len(problem.queries):
        raise ValueError("dattri-LLM merged examples or queries that are equal")
    batches = [iter(batch.tolist()) for batch in problem.order]
    examples = torch.tensor([next(batches[step]) for step in score.row_steps])
    rows = score.scores if rates is None else score.scores * torch.tensor([rates[s] for s in score.row_steps])[:, None]
    return torch.zeros(len(problem.inputs), len(problem.queries)).index_add_(0, examples, rows).T


def attribute(problem: Problem, attributor_class: type, sign: int, moments: bool = False, **given) -> tuple:
    """The scores by visit, and how far the weights of the repeated training are from those of the problem."""
    with TemporaryDirectory() as folder:
        arguments = AttributionArguments(output_dir=f"{folder}/scores", use_cpu=True)
        train, queries = (
            GradientStorageManager(f"{folder}/{name}", residency="memory") for name in ("train", "queries")
        )
        model, dynamics = record_training(problem, train, moments)
        record_queries(problem, model, queries, sign)
        given |= {"dynamics": dynamics} if moments else {}
        score = attributor_class(arguments).attribute_from_cache(train, queries, **given)
    left = f" without layers {', '.join(BATCHLESS)}" if problem.is_language else ""
    return score, f"every step recorded{left}, final weights {problem.distance(model.state_dict()):.1e} from `last`."


def tracin(problem: Problem) -> tuple[Tensor, str]:
    score, note = attribute(problem, TracInAttributor, sign=-1)
    rates = [problem.optimizer["lr"]] * len(problem.order)
    return sum_of_visits(problem, score, rates), f"TracIn from the cache times the learning rate, {note}"


def dvemb(problem: Problem) -> tuple[Tensor, str]:
    """DVEmb has only a learning rate: it takes each step for one of SGD without momentum."""
    if problem.optimizer["kind"] != "SGD":
        raise Unsupported(f"DVEmb follows steps of SGD, and the training used {problem.optimizer['kind']}.")
    rate = problem.optimizer["lr"]
    score, note = attribute(problem, DVEmbAttributor, -1, learning_rate=rate, propagation="test")
    ignored = "momentum ignored, " if problem.optimizer.get("momentum") else ""
    return sum_of_visits(problem, score), f"DVEmb, all coordinates, {ignored}{note}"


def adamw_influence(problem: Problem) -> tuple[Tensor, str]:
    """AdamW-influence gives minus the rise of a query's function when the example is left out."""
    if problem.optimizer["kind"] == "SGD":
        raise Unsupported("AdamW-influence follows the moments of Adam and AdamW, and the training used SGD.")
    score, note = attribute(problem, AdamWInfluenceAttributor, +1, moments=True, propagation="test")
    return sum_of_visits(problem, score), f"AdamW-influence, all coordinates, {note}"


if __name__ == "__main__":
    methods = {"TracIn, every step": tracin, "DVEmb": dvemb, "AdamW-influence": adamw_influence}
    write_answer("dattri-llm", methods)
