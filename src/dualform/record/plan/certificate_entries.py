"""Chooses the entries of each parameter that the live certificate follows: a few rows and columns (a patch)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor

from dualform.types import LayerInfo, Piece

SIDE = 8
"""How many rows and columns are followed."""

TOKENS = 256
"""How many rows are followed of an embedding that is also an output layer; of any other embedding all rows are."""


@dataclass(frozen=True)
class CertificateEntries:
    """Some rows and columns of a weight (its first axis, and all others as one), or some rows of a bias."""

    rows: slice
    columns: slice | None

    def of(self, tensor: Tensor) -> Shaped[Tensor, "r c"]:
        """The followed entries of a tensor."""
        tensor = tensor.detach().cpu()
        if self.columns is None:
            return tensor[self.rows].unsqueeze(1)
        return tensor.reshape(len(tensor), -1)[self.rows, self.columns]

    def share(self, size: int) -> float:
        """The share of a parameter's entries that is followed, if the parameter has ``size`` entries."""
        columns = 1 if self.columns is None else self.columns.stop - self.columns.start
        return (self.rows.stop - self.rows.start) * columns / size


@dataclass(frozen=True)
class CertificateColumns:
    """The columns of a layer's errors and keys that determine the patches of its parameters.

    There is one slice of key columns for each piece; none where keys are indices.
    """

    errors: slice
    keys: tuple[slice, ...]


def spread_indices(size: int, parts: int = 1) -> slice:
    """Choose a few of ``size`` indices: neighbours in one cache line, inside one of ``parts`` equal parts, and not at
    the border, where images are empty.
    """
    part = size // parts
    first = int(0.618 * parts) * part
    begin = first + int(0.618 * max(0, part - SIDE)) // SIDE * SIDE
    return slice(begin, min(first + part, begin + SIDE))


def choose_entries(layers: Sequence[LayerInfo], shapes: Mapping[str, Sequence[int]]) -> dict[str, CertificateEntries]:
    """Choose the patch of each parameter. Layers that share a parameter share its patch."""
    patches: dict[str, CertificateEntries] = {}
    tokens = {name for layer in layers if layer.indexed for name in layer.weights}
    outputs = {name for layer in layers if not layer.indexed for name in layer.weights}
    for layer in layers:
        for piece in layer.pieces:
            name = piece.parameter
            rows, columns = shapes[name][0], (piece.end - piece.begin if not piece.transposed else layer.d_out)
            if name in tokens:
                first = slice(0, min(rows, TOKENS) if name in outputs else rows)
            else:
                first = spread_indices(rows, layer.parts)
            patches.setdefault(name, CertificateEntries(first, spread_indices(columns)))
        for bias in layer.biases:
            patches.setdefault(bias, CertificateEntries(columns_for(layer, patches).errors, None))
    return patches


def columns_for(layer: LayerInfo, patches: Mapping[str, CertificateEntries]) -> CertificateColumns:
    """The columns of a layer's errors and keys that determine its parameters' patches."""
    columns = [_columns_for_piece(layer, piece, patches[piece.parameter]) for piece in layer.pieces]
    return CertificateColumns(columns[0][0], () if layer.indexed else tuple(keys for _, keys in columns))


def _columns_for_piece(layer: LayerInfo, piece: Piece, patch: CertificateEntries) -> tuple[slice, slice]:
    assert patch.columns is not None
    errors, columns = (patch.columns, patch.rows) if piece.transposed else (patch.rows, patch.columns)
    begin = piece.begin + errors.start // (layer.d_out // layer.parts) * layer.width
    return errors, slice(begin + columns.start, begin + columns.stop)


def sizes_of(slices: Iterable[slice]) -> list[int]:
    """The length of each slice."""
    return [columns.stop - columns.start for columns in slices]
