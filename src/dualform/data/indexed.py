"""A data set whose items come with their index, so that a loop can note which examples a batch holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dualform.errors import QueryError


def indexed(dataset: Any, name: str = "index") -> Any:
    """A data set with the items of another one and the index of each: ``for x, y, index in DataLoader(indexed(data))``.

    An item ``(x, y)`` becomes ``(x, y, index)``, a dict gets the key ``name``, and any other item becomes
    ``(item, index)``. The index is the place in ``dataset``, whatever a sampler, a ``Subset`` or shuffling do with the
    order. A data set of Hugging Face gets a column ``name``, and stays what it is. A ``collate_fn`` of your own gets
    the items with their index; :func:`indexed_collate` hides the index from one that does not expect it.
    """
    if isinstance(dataset, DataLoader):
        raise QueryError(
            "indexed takes the data set, not the loader: DataLoader(dualform.data.indexed(dataset), batch_size=…)."
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise QueryError(
            f"a {type(dataset).__name__} gives its items in a stream, where none has a place, so there is no index to "
            "give. Let the stream yield a number of its own with each item, or pass a data set with __getitem__ and "
            "__len__, such as a list of its items."
        )
    if hasattr(dataset, "add_column") and hasattr(dataset, "column_names"):
        return _with_column(dataset, name)
    return IndexedDataset(dataset, name)


@dataclass(frozen=True, eq=False)
class IndexedDataset(Dataset):
    """The items of ``dataset``, each with its place in it. Made by :func:`indexed`."""

    dataset: Any
    name: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Any) -> Any:
        count, place = len(self.dataset), int(place)
        if not -count <= place < count:
            raise IndexError(f"there is no item {place}: the data set holds {count}.")
        return self._with_index(self.dataset[place], place % count)

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        """Several items at once, which a loader asks for: the data set may be faster at that."""
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return [self[place] for place in places]
        return [self._with_index(item, int(place)) for item, place in zip(many(places), places, strict=True)]

    def _with_index(self, item: Any, place: int) -> Any:
        if isinstance(item, Mapping):
            if self.name in item:
                raise QueryError(_taken(self.name))
            return {**item, self.name: place}
        return (*item, place) if isinstance(item, tuple | list) else (item, place)


@dataclass(frozen=True)
class IndexedCollate:
    """Makes a batch of items with their index: ``collate`` makes it of the items alone, then come the indices."""

    collate: Callable[[list[Any]], Any]
    name: str

    def __call__(self, items: list[Any]) -> Any:
        mappings = isinstance(items[0], Mapping)
        places = torch.tensor([int(item[self.name] if mappings else item[-1]) for item in items])
        batch = self.collate([self._without_index(item) for item in items])
        if isinstance(batch, Mapping):
            return {**batch, self.name: places}
        return (*batch, places) if isinstance(batch, tuple | list) else (batch, places)

    def _without_index(self, item: Any) -> Any:
        if isinstance(item, Mapping):
            return {name: value for name, value in item.items() if name != self.name}
        return item[0] if len(item) == 2 else item[:-1]


def indexed_collate(collate: Callable[[list[Any]], Any] = default_collate, name: str = "index") -> IndexedCollate:
    """A ``collate_fn`` for :func:`indexed` data from one that knows nothing of an index.

    It gets the items as they are in the data set; the batch that it makes is followed by the indices, or has them under
    the key ``name``.
    """
    return IndexedCollate(collate, name)


def _with_column(dataset: Any, name: str) -> Any:
    """A data set of Hugging Face with one more column."""
    if name in dataset.column_names:
        raise QueryError(_taken(name))
    shown = dataset.format
    numbered = dataset.with_format(None).add_column(name, np.arange(len(dataset)))
    columns = [*shown["columns"], name]
    return numbered.with_format(shown["type"], columns=columns, **shown["format_kwargs"])


def _taken(name: str) -> str:
    return (
        f"the items have a '{name}' of their own already. Note that, if it tells the examples apart, or choose another "
        "name: indexed(dataset, name='place')."
    )
