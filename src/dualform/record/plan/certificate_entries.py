"""The few entries of each parameter that the certificate follows: some rows and columns of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor

from dualform.types import LayerInfo, Piece

SIDE = 8
"""Rows and columns that are followed."""

TOKENS = 256
"""Rows of an embedding that is also an output layer; of any other embedding all are followed."""


@dataclass(frozen=True)
class CertificateEntries:
    """Some rows and columns of a weight (its first axis, and all others as one), or some rows of a bias."""

    rows: slice
    columns: slice | None

    def of(self, tensor: Tensor) -> Shaped[Tensor, "r c"]:
        """Those of a tensor."""
        tensor = tensor.detach().cpu()
        if self.columns is None:
            return tensor[self.rows].unsqueeze(1)
        return tensor.reshape(len(tensor), -1)[self.rows, self.columns]

    def share(self, size: int) -> float:
        """The part of a parameter's squares that is seen, of a parameter of some size."""
        columns = 1 if self.columns is None else self.columns.stop - self.columns.start
        return (self.rows.stop - self.rows.start) * columns / size


@dataclass(frozen=True)
class CertificateColumns:
    """What a layer's slots must bring for the patches of its parameters: columns of its errors and of its keys.

    There is one stretch of key columns for each piece; none where keys are indices.
    """

    errors: slice
    keys: tuple[slice, ...]


def spread_indices(size: int, parts: int = 1) -> slice:
    """A few of so many: side by side in one cache line, inside one of equal parts, away from where pictures are
    empty.
    """
    part = size // parts
    first = int(0.618 * parts) * part
    begin = first + int(0.618 * max(0, part - SIDE)) // SIDE * SIDE
    return slice(begin, min(first + part, begin + SIDE))


def choose_entries(layers: Sequence[LayerInfo], shapes: Mapping[str, Sequence[int]]) -> dict[str, CertificateEntries]:
    """The patch of each parameter. Layers that share one agree on it."""
    patches: dict[str, CertificateEntries] = {}
    tokens = {name for layer in layers if layer.indexed for name in layer.weights}
    others = {name for layer in layers if not layer.indexed for name in layer.weights}
    for layer in layers:
        for piece in layer.pieces:
            name = piece.parameter
            rows, columns = shapes[name][0], (piece.end - piece.begin if not piece.transposed else layer.d_out)
            if name in tokens:
                first = slice(0, min(rows, TOKENS) if name in others else rows)
            else:
                first = spread_indices(rows, layer.parts)
            patches.setdefault(name, CertificateEntries(first, spread_indices(columns)))
        for bias in layer.biases:
            patches.setdefault(bias, CertificateEntries(columns_for(layer, patches).errors, None))
    return patches


def columns_for(layer: LayerInfo, patches: Mapping[str, CertificateEntries]) -> CertificateColumns:
    """The columns of a layer's errors and keys that its parameters' patches are made of."""
    found = [_for_piece(layer, piece, patches[piece.parameter]) for piece in layer.pieces]
    return CertificateColumns(found[0][0], () if layer.indexed else tuple(keys for _, keys in found))


def _for_piece(layer: LayerInfo, piece: Piece, patch: CertificateEntries) -> tuple[slice, slice]:
    assert patch.columns is not None
    errors, columns = (patch.columns, patch.rows) if piece.transposed else (patch.rows, patch.columns)
    begin = piece.begin + errors.start // (layer.d_out // layer.parts) * layer.width
    return errors, slice(begin + columns.start, begin + columns.stop)


def sizes_of(slices: Iterable[slice]) -> list[int]:
    """How many columns each stretch has."""
    return [each.stop - each.start for each in slices]
