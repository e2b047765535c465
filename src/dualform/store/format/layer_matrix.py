"""The matrix of a layer and the parameters it is made of: column ranges of the matrix, some of them transposed."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.types import LayerInfo, Piece

INDEX = torch.int32
"""The stored type of the keys of an embedding: row numbers."""


def piece_of(layer: LayerInfo, parameter: str) -> Piece:
    """The columns that a parameter has in the matrix of a layer."""
    return next(piece for piece in layer.pieces if piece.parameter == parameter)


def assemble_matrix(layer: LayerInfo, tensors: Mapping[str, Tensor]) -> Float[Tensor, "d_out w"]:
    """The matrix of a layer, from the parameters it is made of."""
    columns = [parameter_columns(layer, piece, tensors[piece.parameter]) for piece in layer.pieces]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def parameter_columns(layer: LayerInfo, piece: Piece, tensor: Tensor) -> Float[Tensor, "d_out c"]:
    """A parameter in the form of its columns of the matrix."""
    if piece.transposed:
        return tensor.reshape(piece.end - piece.begin, layer.d_out).mT
    return tensor.reshape(layer.d_out, piece.end - piece.begin)


def matrix_columns(piece: Piece, columns: Float[Tensor, "*g d_out c"], shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Columns of the matrix (or of several matrices) in the form of the parameter, with its shape."""
    return (columns.mT if piece.transposed else columns).reshape(*columns.shape[:-2], *shape)


def piece_slices(
    layer: LayerInfo, parameter: str, entries: Int[np.ndarray, " k"]
) -> tuple[Int[np.ndarray, " k"], Int[np.ndarray, " k"]]:
    """The columns of error and key whose product gives single entries of a weight.

    ``entries`` are indices into the flattened parameter.
    """
    piece = piece_of(layer, parameter)
    size = piece.end - piece.begin
    row, column = (
        (entries % layer.d_out, entries // layer.d_out) if piece.transposed else (entries // size, entries % size)
    )
    return row, piece.begin + column + row // (layer.d_out // layer.parts) * layer.width


def split_by_parameter(layer: LayerInfo) -> list[tuple[slice, slice]]:
    """The columns of keys and of errors that belong together: one pair of slices for each group of a convolution."""
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
    """The gradient of a parameter of a layer from rows of keys and errors, in the shape of the parameter."""
    if parameter not in layer.weights:
        return errors.sum(0)
    piece = piece_of(layer, parameter)
    if layer.indexed:
        out = errors.new_zeros(piece.end - piece.begin, layer.d_out)
        return out.index_add_(0, keys[:, 0].long(), errors).reshape(*shape)
    parts = [errors[:, e].mT @ keys[:, k][:, piece.begin : piece.end] for k, e in split_by_parameter(layer)]
    return matrix_columns(piece, parts[0] if len(parts) == 1 else torch.cat(parts), shape)


def bytes_a_row(layer: LayerInfo, stored: torch.dtype) -> int:
    """The bytes that are stored for one row: its key, and its error if errors are stored."""
    if layer.keep in ("ledger", "nothing"):
        return 0
    key = INDEX.itemsize if layer.indexed else layer.d_in * stored.itemsize
    return key + (layer.d_out * stored.itemsize if layer.keep == "slots" else 0)
