"""Between a layer's matrix and the parameters it is made of: columns side by side, some of them turned."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.types import LayerInfo, Piece

INDEX = torch.int32
"""What the keys of an embedding are kept as."""


def piece_of(layer: LayerInfo, parameter: str) -> Piece:
    """The piece that a parameter is in a layer's matrix."""
    return next(piece for piece in layer.pieces if piece.parameter == parameter)


def assemble_matrix(layer: LayerInfo, tensors: Mapping[str, Tensor]) -> Float[Tensor, "d_out w"]:
    """The matrix of a layer."""
    found = [parameter_columns(layer, piece, tensors[piece.parameter]) for piece in layer.pieces]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def parameter_columns(layer: LayerInfo, piece: Piece, tensor: Tensor) -> Float[Tensor, "d_out c"]:
    """A parameter as columns of the matrix."""
    if piece.transposed:
        return tensor.reshape(piece.end - piece.begin, layer.d_out).mT
    return tensor.reshape(layer.d_out, piece.end - piece.begin)


def matrix_columns(piece: Piece, columns: Float[Tensor, "*g d_out c"], shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Columns of the matrix (or of several) as a parameter, in its shape."""
    return (columns.mT if piece.transposed else columns).reshape(*columns.shape[:-2], *shape)


def piece_slices(
    layer: LayerInfo, parameter: str, entries: Int[np.ndarray, " k"]
) -> tuple[Int[np.ndarray, " k"], Int[np.ndarray, " k"]]:
    """Which columns of error and key make some entries of a weight (counted over the flat parameter)."""
    piece = piece_of(layer, parameter)
    size = piece.end - piece.begin
    row, column = (
        (entries % layer.d_out, entries // layer.d_out) if piece.transposed else (entries // size, entries % size)
    )
    return row, piece.begin + column + row // (layer.d_out // layer.parts) * layer.width


def split_by_parameter(layer: LayerInfo) -> list[tuple[slice, slice]]:
    """The columns of keys and of errors that belong together: all of them, or one part after the other."""
    keys = np.linspace(0, layer.d_in, layer.parts + 1).astype(int).tolist()
    errors = np.linspace(0, layer.d_out, layer.parts + 1).astype(int).tolist()
    return [(slice(*k), slice(*e)) for k, e in zip(pairwise(keys), pairwise(errors), strict=True)]


def gradient_from(
    layer: LayerInfo,
    parameter: str,
    keys: Shaped[Tensor, "m k"],
    errors: Float[Tensor, "m d_out"],
    shape: Sequence[int],
) -> Float[Tensor, "..."]:
    """What some rows put into the gradient of a parameter of their layer, in the parameter's shape."""
    if parameter not in layer.weights:
        return errors.sum(0)
    piece = piece_of(layer, parameter)
    if layer.indexed:
        out = errors.new_zeros(piece.end - piece.begin, layer.d_out)
        return out.index_add_(0, keys[:, 0].long(), errors).reshape(*shape)
    parts = [errors[:, e].mT @ keys[:, k][:, piece.begin : piece.end] for k, e in split_by_parameter(layer)]
    return matrix_columns(piece, parts[0] if len(parts) == 1 else torch.cat(parts), shape)


def bytes_a_row(layer: LayerInfo, stored: torch.dtype) -> int:
    """What is kept of one row that goes through a layer: its key, and its error if errors are kept."""
    if layer.keep in ("ledger", "nothing"):
        return 0
    key = INDEX.itemsize if layer.indexed else layer.d_in * stored.itemsize
    return key + (layer.d_out * stored.itemsize if layer.keep == "slots" else 0)
