"""The batches of a loop, made again from the indices that were noted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from dualform.data import IndexedCollate, IndexedDataset
from dualform.errors import QueryError

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class TensorRows:
    """The rows of inputs (a tensor, or a tuple or mapping of tensors) and of labels."""

    inputs: Any
    labels: Tensor

    def __post_init__(self) -> None:
        for tensor in _tensors_of(self.inputs):
            if len(tensor) != len(self.labels):
                raise QueryError(
                    f"there are {len(tensor)} inputs and {len(self.labels)} labels: each example needs one of both."
                )

    def __call__(self, index: Int[Tensor, " b"]) -> tuple[Any, Tensor]:
        _require_range(index, len(self.labels))
        return _mapped(lambda tensor: tensor[index], self.inputs), self.labels[index]


@dataclass(frozen=True)
class CollatedRows:
    """The examples of a data set, collated into one batch as they were in the loop.

    Padding depends on the examples of a batch, so each pass is collated as a whole.
    """

    dataset: Any
    collate: Collate
    places: Mapping[int, int] | None = None
    """Where the example with an index stands in the data set; None if its index is its place."""

    def __call__(self, index: Int[Tensor, " b"]) -> Any:
        return self.collate([self.dataset[place] for place in self._places(index)])

    def _places(self, index: Int[Tensor, " b"]) -> list[int]:
        if self.places is None:
            _require_range(index, len(self.dataset))
            return index.tolist()
        missing = [number for number in index.tolist() if number not in self.places]
        if missing:
            raise QueryError(
                f"the memory noted index {missing[0]}, and no example of the data set has it in its column: pass the "
                "data set that was trained on."
            )
        return [self.places[number] for number in index.tolist()]


@dataclass(frozen=True)
class StepBatch:
    """The batch of one pass, beside those of all passes of its step."""

    inputs: Any
    all_inputs: Sequence[Any]


@dataclass
class RowsOfStep:
    """Batches with the other batches of the same step: some loops divide a loss by the tokens of the whole step."""

    rows: CollatedRows
    _last: dict[tuple[tuple[int, ...], ...], list[Any]] = field(default_factory=dict)
    """The batches of the step that was asked for last: its passes follow each other."""

    def __call__(self, index: Int[Tensor, " b"]) -> StepBatch:
        return self.in_step((index,), 0)

    def in_step(self, passes: Sequence[Tensor], place: int) -> StepBatch:
        key = tuple(tuple(index.tolist()) for index in passes)
        if key not in self._last:
            self._last = {key: [self.rows(index) for index in passes]}
        batches = self._last[key]
        return StepBatch(batches[place], batches)


def rows_of_dataset(
    dataset: Any, collate: Collate | None, index: str | None = None, default: Collate = default_collate
) -> CollatedRows:
    """The examples of a map-style data set (or of a loader's) by their index.

    If the data set has a column with the name ``index``, that column holds the indices, else they are places.
    """
    if isinstance(dataset, DataLoader):
        collate = dataset.collate_fn if collate is None else collate
        dataset = dataset.dataset
    if isinstance(collate, IndexedCollate):
        collate = collate.collate
    elif collate is not None and collate is not default_collate:
        return _rows_of(dataset, collate, index)  # the loop's own function may want the index too
    return _rows_of(dataset.dataset if isinstance(dataset, IndexedDataset) else dataset, collate or default, index)


def _rows_of(dataset: Any, collate: Collate, index: str | None) -> CollatedRows:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise QueryError(
            f"a {type(dataset).__name__} gives its examples in a stream, without a length; examples are run again by "
            "their index. Pass a data set with __getitem__ and __len__, such as a list of its examples."
        )
    return CollatedRows(dataset, collate, _places_of(dataset, index))


def to_device(batch: Any, model: nn.Module) -> Any:
    """The tensors of a batch on the device of the model."""
    parameter = next(model.parameters(), None)
    return batch if parameter is None else _mapped(lambda tensor: tensor.to(parameter.device), batch)


def _places_of(dataset: Any, index: str | None) -> dict[int, int] | None:
    if index is None or not len(dataset):
        return None
    names = getattr(dataset, "column_names", None)
    if names is None:
        example = dataset[0]
        names = list(example) if isinstance(example, Mapping) else []
    if index not in names:
        return None
    numbers = (
        dataset[index] if hasattr(dataset, "column_names") else [dataset[place][index] for place in range(len(dataset))]
    )
    numbers = [int(number) for number in numbers]
    if numbers == list(range(len(numbers))):
        return None
    places = {number: place for place, number in enumerate(numbers)}
    if len(places) < len(numbers):
        raise QueryError(
            f"the column {index!r} of the data set has {len(places)} numbers for {len(numbers)} examples: it must "
            "tell them apart."
        )
    return places


def _require_range(index: Int[Tensor, " b"], size: int) -> None:
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
        outside = next(number for number in index.tolist() if not 0 <= number < size)
        raise QueryError(
            f"the memory noted index {outside}, but the data have {size} examples, 0 to {size - 1}: the index must be "
            "an example's place in the data. Pass the data that were trained on."
        )


def _tensors_of(inputs: Any) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return [value for value in values if isinstance(value, Tensor)]


def _mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with a function of each of its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _mapped(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_mapped(function, value) for value in batch)
    return batch


def split_batch(batch: Any) -> tuple[Any, Tensor]:
    """Inputs and labels of a batch that begins with them; what follows (an index) is left out."""
    if isinstance(batch, tuple | list) and len(batch) >= 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    kind = f"a mapping of {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise QueryError(
        f"a batch is {kind}, so its labels are missing: examples must be (input, label). Otherwise say which is which: "
        'split=lambda batch: (batch["input"], batch["label"]).'
    )


def on_batch(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's output; a tuple or list holds positional arguments, a mapping holds keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
