"""The history of allocations: the number of query heads of each key/value head, pass by pass of a training loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.errors import QueryError, require

from .allocating import Allocating


class Allotted(NamedTuple):
    """One key/value head in one pass: its query heads, averaged over the batch, and their share of all query heads."""

    step: int
    layer: str
    group: int
    heads: float
    share: float


class Allocations:
    """Query heads of each key/value head, layer by layer: ``history["blocks.0.attn"]`` is (pass, group)."""

    def __init__(self, heads: dict[str, int]) -> None:
        self.heads = heads
        """The number of query heads of each layer."""
        self._told: dict[str, list[Tensor]] = {name: [] for name in heads}

    def note(self, layer: str, allocation: Int[Tensor, "#b G"]) -> None:
        """Add one pass of a layer."""
        self._told[layer].append(torch.stack([allocation.float().mean(0), (allocation == 0).float().mean(0)]))

    @property
    def layers(self) -> list[str]:
        """The names of the layers."""
        return list(self.heads)

    def __getitem__(self, layer: str) -> Float[Tensor, "t G"]:
        """The query heads of each key/value head, pass by pass, averaged over the batch."""
        return self._of(layer)[:, 0]

    def shares(self, layer: str) -> Float[Tensor, "t G"]:
        """The share of query heads of each key/value head, pass by pass; the shares of a pass sum to 1."""
        return self[layer] / self.heads[layer]

    def changes(self, layer: str) -> int:
        """The number of passes with another allocation than the previous pass."""
        return int((self[layer].diff(dim=0) != 0).any(-1).sum())

    def unused(self, layer: str) -> Float[Tensor, "t G"]:
        """The share of examples for which a key/value head had no query head at all, pass by pass."""
        return self._of(layer)[:, 1]

    def __len__(self) -> int:
        return sum(counts.numel() for counts in map(self.__getitem__, self.layers))

    def __iter__(self) -> Iterator[Allotted]:
        """Iterate over layers, then passes, then groups."""
        for layer in self.layers:
            for step, line in enumerate(self[layer].tolist()):
                for group, heads in enumerate(line):
                    yield Allotted(step, layer, group, heads, heads / self.heads[layer])

    def to_pandas(self) -> Any:
        """A table with one row for each pass, layer and group."""
        return require("pandas", "pandas").DataFrame(list(self), columns=list(Allotted._fields))

    def _of(self, layer: str) -> Float[Tensor, "t 2 G"]:
        if layer not in self._told:
            raise QueryError(f"the history has no layer '{layer}'; it has {self.layers}.")
        passes = self._told[layer]
        return torch.stack(passes).cpu() if passes else torch.zeros(0, 2, 0)


@contextmanager
def allocations(model: nn.Module) -> Iterator[Allocations]:
    """Record the allocations of all ``kdgqa`` and ``dgqa`` layers of a model during your own training loop.

    Only passes in training mode are recorded. On exit the callbacks are removed from the model.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Allocating)}
    if not layers:
        raise QueryError(f"this {type(model).__name__} has no layer with allocations, such as 'kdgqa' or 'dgqa'.")
    history = Allocations({name: layer.heads for name, layer in layers.items()})
    watching = []
    for name, layer in layers.items():

        def watcher(allocation: Tensor, name: str = name) -> None:
            history.note(name, allocation)

        layer.watchers.append(watcher)
        watching.append((layer, watcher))
    try:
        yield history
    finally:
        for layer, watcher in watching:
            layer.watchers.remove(watcher)
