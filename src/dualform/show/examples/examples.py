"""Examples: as tensors for a network, and in a form that people can look at."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from dualform.data import Columns, Vocabulary, in_table
from dualform.errors import QueryError
from dualform.explain.notebook import data_address

from .series import SeriesLines, lines_of

SAMPLE = 1000
"""How many rows are sampled to find the numbers for black and white."""

WINDOW = 40
"""How many tokens of a long text are shown on either side of the marked one."""

CHARACTERS = 90
"""How many characters of a passage are shown on either side of the token that counts."""

NUMBERS = 24
"""The most numbers of an example that are shown."""


@runtime_checkable
class IndexableRows(Protocol):
    """Rows with a length and an index: a tensor, an array, a data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> Any: ...


ExampleKind = Literal["image", "text", "series", "numbers"]


@dataclass(frozen=True)
class ShownExample:
    """An example in the form that pages and terminals display."""

    kind: ExampleKind
    alt: str
    """A description in words, for screen readers."""
    picture: str = ""
    patch: tuple[float, float, float, float] | None = None
    """The marked part of the picture: left, top, width, height, as fractions of its size."""
    tokens: tuple[str, ...] = ()
    lines: SeriesLines | None = None
    mark: int | None = None
    """The first marked token, or step of a series."""
    span: int = 1
    """How many tokens or steps are marked."""
    taught: int | None = None
    """The token that was taught at the marked one: the one that follows it in a language model."""
    is_cut: tuple[bool, bool] = (False, False)
    """Whether tokens before, and after, are left out."""
    numbers: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    """The columns of a row of a table, as they stand there: ``age 63``, ``colour red``."""
    cells: tuple[tuple[str, str], ...] = ()
    """The same, name and value apart."""


@dataclass(frozen=True)
class Examples:
    """Rows as the model takes them, with their labels if they are known.

    A text is rows of tokens, or one long row, of which example i is the ``length`` tokens from i on. A ``series`` is
    (time, channels). ``others`` are further inputs by the names of the model's arguments; tokens and steps where
    ``padding`` is True are not shown.
    """

    inputs: Any
    labels: Any = None
    vocabulary: Vocabulary | None = None
    length: int = 0
    series: bool = False
    others: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Columns | None = None
    """The columns of the table that the rows are from."""
    padding: Tensor | None = None
    """True where a row has ended, if the model itself does not take ``padding``."""

    @cached_property
    def is_stream(self) -> bool:
        """Whether the examples are cut from one long text."""
        return _input_tensor(self.inputs[0]).ndim == 0

    def __len__(self) -> int:
        return max(0, len(self.inputs) - self.length + 1) if self.is_stream else len(self.inputs)

    @property
    def stride(self) -> int:
        """The distance to the next example that does not overlap this one."""
        return self.length if self.is_stream else 1

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of an example."""
        return (self.length,) if self.is_stream else tuple(_input_tensor(self.inputs[0]).shape)

    @cached_property
    def kind(self) -> ExampleKind:
        """How examples are shown: tokens as text, (time, channels) as a series, a square of numbers as a picture."""
        if self.is_stream or self.vocabulary is not None:
            return "text"
        if self.series:
            return "series"
        return "numbers" if self._layout is None else "image"

    def row(self, number: int) -> Shaped[Tensor, "1 ..."]:
        """One example as a batch that the model takes."""
        if not 0 <= number < len(self):
            raise QueryError(f"there is no example {number}: there are {len(self):,}, counted from 0.")
        if self.is_stream:
            return _input_tensor(self.inputs[number : number + self.length]).unsqueeze(0)
        return _input_tensor(self.inputs[number]).unsqueeze(0)

    def rows(self, numbers: Sequence[int]) -> Shaped[Tensor, "n ..."]:
        """Examples as one batch."""
        return torch.cat([self.row(number) for number in numbers])

    def beside(self, numbers: Sequence[int]) -> dict[str, Shaped[Tensor, "n ..."]]:
        """The further inputs of the same examples, by argument name."""
        return {name: values[list(numbers)] for name, values in self.others.items()}

    def only(self, numbers: Sequence[int] | slice) -> "Examples":
        """Some of the examples; negative numbers count from the end."""
        if isinstance(numbers, slice):
            numbers = range(len(self))[numbers]
        for number in numbers:
            if not -len(self) <= number < len(self):
                raise QueryError(f"the data has no row {number}: it holds {len(self):,} rows, counted from 0.")
        index = [number % len(self) for number in numbers]
        labels = None if self.labels is None or self.is_stream else [self.labels[number] for number in index]
        padding = None if self.padding is None else self.padding[index]
        return replace(self, inputs=self.rows(index), labels=labels, others=self.beside(index), padding=padding)

    def unpadded_length(self, number: int) -> int | None:
        """The number of tokens or steps before the padding of an example; None if examples have no padding."""
        padding = self.others.get("padding", self.padding)
        if padding is None:
            return None
        present = (padding[number] == 0).nonzero()
        return int(present[-1]) + 1 if len(present) else 0

    def label(self, number: int) -> int | None:
        """The true class of an example; None if it is not known."""
        if self.labels is None or self.is_stream or not 0 <= number < len(self.labels):
            return None
        value = self.labels[number]
        return int(value) if float(value) == int(value) else None

    # ------------------------------------------------------------------------------------------- display

    def shown(
        self, number: int, *, position: int | None = None, positions: int = 1, span: int = 1, name: str = "example"
    ) -> ShownExample:  # fmt: skip
        """An example in displayable form, with the tokens or the patch behind row ``position`` of a layer marked."""
        where = f"{name} {number}"
        if self.kind == "text":
            return self._text(number, position, span, where)
        x = self.row(number)[0]
        if self.kind == "image":
            patch = _patch(position, positions, self.grid) if span == 1 else None
            return ShownExample("image", f"{where}, a picture", self.address(x), patch=patch)
        return (
            self._series(x[: self.unpadded_length(number)], position, span, where)
            if self.series
            else _numbers(x, where, self.columns)
        )

    def passage(self, number: int, token: int, *, taught: bool, name: str = "example") -> ShownExample:
        """A text around the token that counts; ``taught`` marks the next one too."""
        shown = self._text(number, token, 1, f"{name} {number}")
        if shown.mark is None:
            return shown
        lengths = list(accumulate(map(len, shown.tokens), initial=0))
        begin = bisect_left(lengths, lengths[shown.mark] - CHARACTERS)
        end = bisect_right(lengths, lengths[shown.mark + 1] + CHARACTERS) - 1
        mark, tokens = shown.mark - begin, shown.tokens[begin:end]
        is_cut = (shown.is_cut[0] or begin > 0, shown.is_cut[1] or end < len(shown.tokens))
        after = mark + shown.span if taught and mark + shown.span < len(tokens) and tokens[mark + shown.span] else None
        return replace(shown, tokens=tokens, mark=mark, taught=after, is_cut=is_cut)

    def table_row(self, number: int) -> list[float | str]:
        """A row of a table, a number or a word for each column."""
        assert self.columns is not None
        return self.columns.cells(self.row(number)[0])

    @cached_property
    def spreads(self) -> list[float]:
        """The deviation of each column of numbers in a sample of the rows; 0 for columns of words."""
        sample = [self.table_row(i) for i in range(0, len(self), max(1, len(self) // SAMPLE))]
        columns = list(zip(*sample, strict=True))
        return [0.0 if isinstance(cells[0], str) else float(torch.tensor(cells).std(correction=0)) for cells in columns]

    def shown_input(self, x: Shaped[Tensor, "..."], name: str) -> ShownExample:
        """An uploaded input in displayable form."""
        if self.kind == "image":
            return ShownExample("image", f"{name}, a picture", self.address(x))
        if self.kind == "series":
            return self._series(x, None, 1, name)
        return Examples(x.unsqueeze(0), None, self.vocabulary, columns=self.columns).shown(0, name=name)

    def address(self, x: Shaped[Tensor, "..."]) -> str:
        """A picture as a data URL."""
        return data_address(self.pixels(x))

    def pixels(self, x: Shaped[Tensor, "..."]) -> UInt8[Tensor, "height width *channels"]:
        """A picture as bytes: 0 is the smallest number of each channel, 255 the largest."""
        low, high = self.range
        image = (self._to_channels_last(x.float()) - low) / (high - low).clamp(min=1e-12)
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
        return image[..., 0] if image.shape[-1] == 1 else image

    def from_pixels(self, image: Float[Tensor, "height width channels"]) -> Shaped[Tensor, "..."]:
        """The model's input for a picture between 0 and 1."""
        low, high = self.range
        scaled = low + image * (high - low)
        return scaled.movedim(-1, 0).reshape(self.shape) if self._layout == "first" else scaled.reshape(self.shape)

    @property
    def grid(self) -> tuple[int, int]:
        """The height and width of a picture."""
        return self._to_channels_last(_input_tensor(self.inputs[0])).shape[:2]  # type: ignore[return-value]

    @property
    def channels(self) -> int:
        """1 for grey pictures, 3 for coloured ones."""
        return self._to_channels_last(_input_tensor(self.inputs[0])).shape[2]

    @cached_property
    def range(self) -> tuple[Float[Tensor, " channels"], Float[Tensor, " channels"]]:
        """The smallest and the largest number of each channel in a sample of the examples."""
        sample = range(0, len(self), max(1, len(self) // SAMPLE))
        images = torch.stack([self._to_channels_last(self.row(i)[0].float()) for i in sample])
        flat = images.flatten(0, 2)
        return flat.amin(0), flat.amax(0)

    @cached_property
    def scale(self) -> tuple[float, float]:
        """The smallest and the largest number in a sample of the series."""
        sample = range(0, len(self), max(1, len(self) // SAMPLE))
        values = torch.cat([self.row(i)[0][: self.unpadded_length(i)] for i in sample])
        return float(values.min()), float(values.max())

    @cached_property
    def _layout(self) -> Literal["grey", "first", "last"] | None:
        """Which axis of a picture holds the channels; None if examples are not pictures."""
        shape = self.shape
        if len(shape) == 1:
            return "grey" if shape[0] == 784 else None
        if len(shape) == 2 and min(shape) >= 8:
            return "grey"
        if len(shape) == 3 and min(sorted(shape)[1:]) >= 8:
            return "first" if shape[0] in (1, 3) else "last" if shape[2] in (1, 3) else None
        return None

    def _to_channels_last(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "height width channels"]:
        if self._layout == "first":
            return x.movedim(0, -1)
        if self._layout == "last":
            return x
        side = math.isqrt(x.numel()) if x.ndim == 1 else 0
        return x.reshape(side, side, 1) if side else x.unsqueeze(-1)

    def _series(self, x: Float[Tensor, "n channels"], position: int | None, span: int, where: str) -> ShownExample:
        lines = lines_of(x, *self.scale)
        drawn = "" if len(lines.values) == lines.channels else f", of which {len(lines.values)} are drawn"
        description = f"{where}: a series of {lines.steps} steps in {lines.channels} channels{drawn}"
        mark = position if position is not None and position < lines.steps else None
        return ShownExample("series", description, lines=lines, mark=mark, span=span)

    def _text(self, number: int, position: int | None, span: int, where: str) -> ShownExample:
        if self.is_stream:
            middle = number + (position or 0)
            begin = number if position is None else max(0, middle - WINDOW)
            end = number + self.length if position is None else min(len(self.inputs), middle + WINDOW)
            ids, mark = self.inputs[begin:end], None if position is None else middle - begin
            is_cut = (begin > 0, end < len(self.inputs))
        else:
            ids, mark = self.inputs[number][: self.unpadded_length(number)], position
            begin = max(0, mark - WINDOW) if mark is not None and mark < len(ids) else 0
            end = len(ids) if mark is None else mark + span + WINDOW
            is_cut = (begin > 0, end < len(ids))
            ids, mark = ids[begin:end], None if mark is None else mark - begin
        ids = [int(i) for i in ids]
        tokens = self.vocabulary.decode(ids) if self.vocabulary is not None else [f"{i} " for i in ids]
        mark = mark if mark is not None and 0 <= mark < len(tokens) else None
        while mark and not tokens[mark]:  # one byte of a character, which stands at the first of them
            mark, span = mark - 1, span + 1
        return ShownExample("text", where, tokens=tuple(tokens), mark=mark, span=span, is_cut=is_cut)


def _numbers(x: Shaped[Tensor, "..."], where: str, columns: Columns | None) -> ShownExample:
    if columns is not None and x.shape == (len(columns.features),):
        words = tuple(columns.in_words(x)[:NUMBERS])
        values = columns.unscaled(x)[:NUMBERS].tolist()
        cells = tuple(zip(columns.names, map(in_table, columns.cells(x)), strict=True))[:NUMBERS]
        alt = f"{where}: {', '.join(words)}"
        return ShownExample("numbers", alt, numbers=tuple(values), words=words, cells=cells)
    values = x.flatten()[:NUMBERS].tolist()
    numbers = ", ".join(f"{value:.3g}" for value in values)
    more = " …" if x.numel() > NUMBERS else ""
    return ShownExample("numbers", f"{where}: {numbers}{more}", numbers=tuple(values))


def _patch(
    position: int | None, positions: int, grid: tuple[int, int]
) -> tuple[float, float, float, float] | None:  # fmt: skip
    """The patch of a picture behind a row of a layer; None unless the rows form a square grid.

    A class token may stand before the grid.
    """
    if position is None or positions < 4:
        return None
    for first in (0, 1):
        cells, side = positions - first, math.isqrt(positions - first)
        if side * side == cells and grid[0] == grid[1] and position >= first:
            top, left = divmod(position - first, side)
            return left / side, top / side, 1 / side, 1 / side
    return None


def _input_tensor(value: Any) -> Tensor:
    """A row as a tensor; of a pair (input, label), the input."""
    if isinstance(value, tuple | list) and len(value) == 2:
        value = value[0]
    return value if isinstance(value, Tensor) else torch.as_tensor(value)
