"""The history of allocations: how many query heads each key/value head had, pass by pass of a training loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.errors import QueryError, require

from .allocating import Allocating


class Allotted(NamedTuple):
    """What one key/value head had in one pass: so many query heads, mean over the batch, which is this share of all."""

    step: int
    layer: str
    group: int
    heads: float
    share: float


class Allocations:
    """Query heads of each key/value head, layer by layer: ``history["blocks.0.attn"]`` is (pass, group)."""

    def __init__(self, heads: dict[str, int]) -> None:
        self.heads = heads
        """How many query heads each layer has."""
        self._told: dict[str, list[Tensor]] = {name: [] for name in heads}

    def note(self, layer: str, allocation: Int[Tensor, "#b G"]) -> None:
        """One more pass of a layer."""
        self._told[layer].append(torch.stack([allocation.float().mean(0), (allocation == 0).float().mean(0)]))

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return list(self.heads)

    def __getitem__(self, layer: str) -> Float[Tensor, "t G"]:
        """Query heads of each key/value head, pass by pass: the mean over the examples of a batch."""
        return self._of(layer)[:, 0]

    def shares(self, layer: str) -> Float[Tensor, "t G"]:
        """The same, as shares that sum to 1."""
        return self[layer] / self.heads[layer]

    def changes(self, layer: str) -> int:
        """How many passes had another allocation than the one before."""
        return int((self[layer].diff(dim=0) != 0).any(-1).sum())

    def unused(self, layer: str) -> Float[Tensor, "t G"]:
        """The share of examples for which a key/value head had no query head at all, pass by pass."""
        return self._of(layer)[:, 1]

    def __len__(self) -> int:
        return sum(each.numel() for each in map(self.__getitem__, self.layers))

    def __iter__(self) -> Iterator[Allotted]:
        """Layer by layer, pass by pass, group by group."""
        for layer in self.layers:
            for step, line in enumerate(self[layer].tolist()):
                for group, heads in enumerate(line):
                    yield Allotted(step, layer, group, heads, heads / self.heads[layer])

    def to_pandas(self) -> Any:
        """One line a pass, layer and group."""
        return require("pandas", "pandas").DataFrame(list(self), columns=list(Allotted._fields))

    def _of(self, layer: str) -> Float[Tensor, "t 2 G"]:
        if layer not in self._told:
            raise QueryError(f"no layer '{layer}' was watched: there are {self.layers}.")
        told = self._told[layer]
        return torch.stack(told).cpu() if told else torch.zeros(0, 2, 0)


@contextmanager
def allocations(model: nn.Module) -> Iterator[Allocations]:
    """Note the allocations of all ``kdgqa`` and ``dgqa`` layers of a model while it is trained; the loop stays yours.

    Passes in training count, those in evaluation do not. Nothing stays on the model.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Allocating)}
    if not layers:
        raise QueryError(f"this {type(model).__name__} has no layer with allocations, as 'kdgqa' and 'dgqa' have them.")
    history = Allocations({name: each.heads for name, each in layers.items()})
    watching = []
    for name, layer in layers.items():

        def tell(allocation: Tensor, name: str = name) -> None:
            history.note(name, allocation)

        layer.watchers.append(tell)
        watching.append((layer, tell))
    try:
        yield history
    finally:
        for layer, tell in watching:
            layer.watchers.remove(tell)
