"""The examples of a training, what is asked about it, and the training itself, recorded so that it can be run again."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn, optim

import dualform
from dualform import data
from dualform.explain import ReplayedRun
from experiments.runs import Run

from . import networks
from .settings import DataName, TrainingSettings, WrongLabelSettings

CHECKPOINTS = 5
"""States of the network that methods with checkpoints are given, after equal shares of training."""


@dataclass(frozen=True)
class Examples:
    """What a network is trained on, and what it is asked."""

    inputs: Tensor
    labels: Tensor
    queries: Tensor
    query_labels: Tensor
    wrong: Tensor
    """Which training labels were changed."""


def examples_of(settings: TrainingSettings) -> Examples:
    """The same examples and queries for all networks of a variant."""
    share = settings.wrong if isinstance(settings, WrongLabelSettings) else 0.0
    return _drawn(settings.data, settings.examples, settings.queries, share)


@cache
def _drawn(name: DataName, train_size: int, queries: int, share_wrong: float) -> Examples:
    generator = torch.Generator().manual_seed(0)
    if name == "wikitext-2":
        passages = [_passages(part, count, generator) for part, count in (("train", train_size), ("valid", queries))]
        return Examples(*_shifted(passages[0]), *_shifted(passages[1]), torch.zeros(train_size, dtype=torch.bool))
    images, labels, test_images, test_labels = _images(name)
    chosen = torch.randperm(len(images), generator=generator)[:train_size]
    asked = torch.randperm(len(test_images), generator=generator)[:queries]
    labels, wrong = labels[chosen].clone(), torch.zeros(train_size, dtype=torch.bool)
    if share_wrong:
        wrong[torch.randperm(len(wrong), generator=generator)[: round(share_wrong * len(wrong))]] = True
        shift = torch.randint(1, 10, (len(wrong),), generator=generator)
        labels = torch.where(wrong, (labels + shift) % 10, labels)
    return Examples(images[chosen], labels, test_images[asked], test_labels[asked], wrong)


def _images(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images with labels, and those of which some are asked."""
    if name == "digits":
        images, labels = data.small_digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
        images, labels = images.flatten(1).float()[order] / 16, labels[order]
        return images[:1000], labels[:1000], images[1000:], labels[1000:]
    read = data.mnist if name == "mnist" else data.fashion_mnist
    (images, labels), (test_images, test_labels) = read("train"), read("test")
    images, test_images = images.float() / 255, test_images.float() / 255
    if name == "mnist":
        images, test_images = images.flatten(1), test_images.flatten(1)
    return images, labels, test_images, test_labels


def _passages(part: str, count: int, generator: torch.Generator) -> Tensor:
    """Passages of words from random places, none of which overlap."""
    words, length = _words()[part], networks.CONTEXT + 1
    places = torch.randperm(len(words) // length, generator=generator)[:count]
    return torch.stack([words[length * place : length * (place + 1)] for place in places.tolist()])


@cache
def _words() -> dict[str, Tensor]:
    """WikiText-2 as numbers of its most frequent words; all others are the word 0."""
    texts = {part: data.wikitext2(part).replace("\n", " <eos> ").split() for part in ("train", "valid")}
    frequent = [word for word, _ in Counter(texts["train"]).most_common(networks.WORDS) if word != "<unk>"]
    numbers = {word: number for number, word in enumerate(frequent[: networks.WORDS - 1], start=1)}
    return {part: torch.tensor([numbers.get(word, 0) for word in text]) for part, text in texts.items()}


def _shifted(passages: Tensor) -> tuple[Tensor, Tensor]:
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------------- training


def order_of(settings: TrainingSettings) -> list[Tensor]:
    """The batches of all epochs; the last of an epoch may be smaller."""
    generator = torch.Generator().manual_seed(settings.seed)
    epochs = [torch.randperm(settings.examples, generator=generator) for _ in range(settings.epochs)]
    return [batch for epoch in epochs for batch in epoch.split(settings.batch)]


def network_of(settings: TrainingSettings) -> nn.Module:
    """The network before its first step."""
    torch.manual_seed(settings.seed)
    return networks.NETWORKS[settings.network]()


def optimizer_of(settings: TrainingSettings, model: nn.Module) -> optim.Optimizer:
    options = dict(settings.optimizer)
    return networks.OPTIMIZERS[options.pop("kind")](model.parameters(), **options)


def trained(settings: TrainingSettings) -> Iterator[nn.Module]:
    """The network after each step of plain training."""
    examples, model = examples_of(settings), network_of(settings)
    optimizer = optimizer_of(settings, model)
    for batch in order_of(settings):
        networks.loss(model(examples.inputs[batch]), examples.labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model


def train_recorded(run: Run, settings: TrainingSettings) -> dict[str, Any]:
    """Train, recorded so that it can be run again; and once more without, to see what that takes."""
    examples, model = examples_of(settings), network_of(settings)
    optimizer, order = optimizer_of(settings, model), order_of(settings)
    with dualform.record(model, optimizer, run.memory, keep="replay", overwrite=True, progress=False) as tape:
        for batch in order:
            tape.note(index=batch)
            networks.loss(model(examples.inputs[batch]), examples.labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    begin = time.process_time()
    for _ in trained(settings):
        pass
    plain = time.process_time() - begin
    with torch.no_grad():
        outputs = model.eval()(examples.queries)
    right = outputs.argmax(-1) == examples.query_labels
    return {
        "steps": len(order),
        "plain_seconds": plain,
        "accuracy": float(right.double().mean()),
        "loss": float(networks.loss(outputs, examples.query_labels)),
    }


def replayed(run: Run, settings: TrainingSettings) -> ReplayedRun:
    """The recorded training, ready to be run again."""
    examples = examples_of(settings)
    memory = dualform.open(run.memory)
    return memory.replay(network_of(settings), losses, lambda index: (examples.inputs[index], examples.labels[index]))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Each example's share of the mean cross entropy of a batch."""
    inputs, labels = batch
    outputs = model(inputs)
    entries = nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")
    return entries.reshape(len(labels), -1).sum(1) / labels.numel()


def question(settings: TrainingSettings) -> dict[str, Any]:
    """What is asked: the margins of the right classes; for passages, minus their loss."""
    examples = examples_of(settings)
    return {"inputs": examples.queries, "target": lambda output: networks.targets(output, examples.query_labels)}


def checkpoints(settings: TrainingSettings) -> list[dict[str, Any]]:
    """States after equal shares of training, with the learning rate there."""
    steps = len(order_of(settings))
    places = {round(steps * part / CHECKPOINTS) for part in range(1, CHECKPOINTS + 1)}
    states = []
    for step, model in enumerate(trained(settings), start=1):
        if step in places:
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            states.append({"step": step, "rate": settings.optimizer["lr"], "state": state})
    return states
