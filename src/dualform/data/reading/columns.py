"""How the columns of a table become the numbers that a network takes: in which order, with which words and scale."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError


@dataclass(frozen=True)
class Columns:
    """The input columns of a table, in order. Everything in it is plain text and numbers.

    A column of words in ``categories`` becomes one number for each of its words, 1 for the word of the row and 0 for
    the others. A column in ``scale`` becomes (value − mean) / deviation. For a file of arrays ``names`` holds the
    name of one array.
    """

    names: tuple[str, ...] = ()
    label: str | None = None
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    """The names of the classes; if the label column holds words, class i is the i-th of them."""
    scale: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The mean and the deviation of scaled columns."""

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each number of a row: ``age``, and ``colour = red`` for a word."""
        words = {name: [f"{name} = {word}" for word in words] for name, words in self.categories.items()}
        return tuple(feature for name in self.names for feature in words.get(name, [name]))

    def chosen(self, names: Sequence[str] | None, label: str | None, classes: Sequence[str] | None) -> "Columns":
        """The same words and scales, with other columns, another label or other class names where they are given."""
        return replace(
            self,
            names=self.names if names is None else tuple(names),
            label=self.label if label is None else label,
            classes=self.classes if classes is None else tuple(classes),
        )

    def unscaled(self, row: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The numbers of a row in the unit of the table."""
        means, deviations = torch.zeros(len(row)), torch.ones(len(row))
        for place, feature in enumerate(self.features[: len(row)]):
            means[place], deviations[place] = self.scale.get(feature, (0.0, 1.0))
        return row * deviations.to(row) + means.to(row)

    def cells(self, row: Float[Tensor, " d"]) -> list[float | str]:
        """A row as it stands in the table: a number or a word for each column."""
        values, cells, place = self.unscaled(row).tolist(), [], 0
        for name in self.names:
            categories = self.categories.get(name)
            width = len(categories or [name])
            part = values[place : place + width]
            place += width
            cells.append(part[0] if categories is None else categories[max(range(width), key=part.__getitem__)])
        return cells

    def in_words(self, row: Float[Tensor, " d"]) -> list[str]:
        """A row in words, column by column: ``age 63``, ``colour red``."""
        return [f"{name} {in_table(cell)}" for name, cell in zip(self.names, self.cells(row), strict=True)]


def in_table(cell: float | str) -> str:
    """A cell of a table as text."""
    return cell if isinstance(cell, str) else f"{cell:.4g}"


def columns_of(value: Mapping[str, Any]) -> Columns:
    """Columns from their JSON; an error if it holds anything but text and numbers in the right places."""
    try:
        return Columns(
            _words(value["names"]),
            None if value.get("label") is None else _word(value["label"]),
            {_word(name): _words(words) for name, words in value.get("categories", {}).items()},
            _words(value.get("classes", ())),
            {_word(name): (float(mean), float(by)) for name, (mean, by) in value.get("scale", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QueryError(f"these are not the columns of a table: {value!r}.") from error


def _words(values: Iterable[Any]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError("a list of words was expected")
    return tuple(_word(value) for value in values)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a word was expected")
    return value
