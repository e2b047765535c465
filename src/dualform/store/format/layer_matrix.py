"""The matrix of a layer and the parameters it is made of: column ranges of the matrix, some of them transposed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class LayerMatrix:
    """Products with the matrix of a layer, for every kind of layer.

    The keys of an embedding are row numbers in place of one-hot vectors; a grouped convolution multiplies each part of
    the key with its own part of the matrix; a parameter may hold its columns transposed. Callers need not know.
    """

    layer: LayerInfo

    @cached_property
    def parts(self) -> list[tuple[slice, slice]]:
        """The columns of keys and of errors that belong together: one pair for each group of a convolution."""
        keys = np.linspace(0, self.layer.d_in, self.layer.parts + 1).astype(int).tolist()
        errors = np.linspace(0, self.layer.d_out, self.layer.parts + 1).astype(int).tolist()
        return [(slice(*k), slice(*e)) for k, e in zip(pairwise(keys), pairwise(errors), strict=True)]

    def piece_parts(self, piece: Piece) -> list[tuple[slice, slice]]:
        """The columns of stored keys and of errors that belong together in one piece of the matrix."""
        if self.layer.indexed:
            return [(slice(0, 1), slice(0, self.layer.d_out))]
        return [(slice(k.start + piece.begin, k.start + piece.end), e) for k, e in self.parts]

    def keys_in(self, keys: Shaped[Tensor, "m k"], dtype: torch.dtype) -> Shaped[Tensor, "m k"]:
        """Keys in another precision; row numbers stay as they are."""
        return keys if self.layer.indexed else keys.to(dtype)

    def key_columns(self, keys: Shaped[Tensor, "m k"], columns: Int[Tensor, " c"]) -> Float[Tensor, "m c"]:
        """Single columns of the keys in float64, one-hot keys written out."""
        return (keys == columns).double() if self.layer.indexed else keys[:, columns].double()

    def outer(self, keys: Shaped[Tensor, "n m k"], errors: Float[Tensor, "n m d_out"]) -> Float[Tensor, "n d_out w"]:
        """The gradient of the matrix, the sum of e kᵀ over the rows; one for each of n examples."""
        if self.layer.indexed and keys.shape[-1] == 1:
            out = errors.new_zeros(len(keys), self.layer.width, self.layer.d_out)
            for gradient, numbers, error in zip(out, keys, errors, strict=True):
                gradient.index_add_(0, numbers[:, 0].long(), error)
            return out.mT
        return torch.cat([errors[..., e].mT @ keys[..., k] for k, e in self.parts], 1)

    def gradient(
        self, parameter: str, keys: Shaped[Tensor, "m k"], errors: Float[Tensor, "m d_out"], shape: Sequence[int]
    ) -> Float[Tensor, "..."]:
        """The gradient of a weight or bias of the layer from rows of keys and errors, in the shape of the parameter."""
        if parameter not in self.layer.weights:
            return errors.sum(0)
        piece = piece_of(self.layer, parameter)
        if self.layer.indexed:
            out = errors.new_zeros(piece.end - piece.begin, self.layer.d_out)
            return out.index_add_(0, keys[:, 0].long(), errors).reshape(*shape)
        parts = [errors[:, e].mT @ keys[:, k] for k, e in self.piece_parts(piece)]
        return matrix_columns(piece, parts[0] if len(parts) == 1 else torch.cat(parts), shape)

    def weights(
        self, keys: Float[Tensor, "m k"], queries: Float[Tensor, "r k"], out: Float[Tensor, "r m"] | None = None
    ) -> Float[Tensor, "r m"]:
        r"""The attention weights :math:`\alpha = k \cdot q`; for one-hot keys 1 where the row number is the same, or
        the entry with that number where queries are written out.
        """
        if not self.layer.indexed:
            return torch.mm(queries, keys.mT, out=out)
        written_out = queries.shape[1] > 1
        weights = queries[:, keys[:, 0].long()] if written_out else (queries == keys.mT).to(queries.dtype)
        return weights if out is None else out.copy_(weights)

    def apply(
        self, matrix: Float[Tensor, "d_out w"], rows: Shaped[Tensor, "*r k"]
    ) -> Float[Tensor, "*r d_out"]:  # fmt: skip
        """The output of the layer for rows of inputs, without a bias."""
        if self.layer.indexed:
            return matrix.mT[rows[..., 0].long()]
        return torch.cat([rows[..., k].to(matrix.dtype) @ matrix[e].mT for k, e in self.parts], -1)

    def bilinear(
        self, matrices: Float[Tensor, "n d_out w"], keys: Shaped[Tensor, "m k"], errors: Float[Tensor, "m d_out"]
    ) -> Float[Tensor, "n m"]:
        r"""The products :math:`e^\top M k` of each row with each of several matrices."""
        if self.layer.indexed:
            return (matrices[:, :, keys[:, 0].long()] * errors.mT).sum(1)
        out = errors.new_zeros(len(matrices), len(errors))
        for k, e in self.parts:
            key, matrix = keys[:, k], matrices[:, e]
            if matrix.shape[1] <= matrix.shape[2]:
                out += torch.einsum("nmd,md->nm", key @ matrix.mT, errors[:, e])
            else:
                out += torch.einsum("nmw,mw->nm", errors[:, e] @ matrix, key)
        return out


def bytes_a_row(layer: LayerInfo, stored: torch.dtype) -> int:
    """The bytes that are stored for one row: its key, and its error if errors are stored."""
    if layer.keep in ("ledger", "nothing"):
        return 0
    key = INDEX.itemsize if layer.indexed else layer.d_in * stored.itemsize
    return key + (layer.d_out * stored.itemsize if layer.keep == "slots" else 0)
