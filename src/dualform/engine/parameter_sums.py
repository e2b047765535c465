r"""Sums over slots that need no query: weights, biases and projections of them, in total or by group.

All of them are :math:`\sum_t c_t\, e_t\, f(k_t)^\top` for features f of the key: the key itself (a weight), 1 (a bias),
or a few random projections of the key (a certificate that costs one pass). They are added up in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import Block, LayerMatrix, Store, matrix_columns, piece_of
from dualform.types import LayerInfo

from .scan import QUERY_ROWS
from .stream import DecodedSlots, StoreView, stream, stream_together

STRETCH = 512
"""The number of slots that are added up in the computing precision before they are added in float64."""

WAITING_BYTES = 64 << 20
"""The most bytes of slots that wait for more slots of their group: a product of few slots costs as much as one of
many."""


@dataclass
class ParameterSum:
    """A sum over the slots of a layer that rebuilds one of its parameters.

    ``project`` (columns, f) maps the keys of a weight to features; None uses the keys themselves. ``group_of`` splits
    the sum into ``groups``. The result is ``total`` (groups, d_out, f).
    """

    layer: LayerInfo
    parameter: str
    of_step: Float[np.ndarray, " T1"]
    project: Float[Tensor, "c f"] | None = None
    group_of: Callable[[Block], Int[np.ndarray, " m"]] | None = None
    groups: int = 1
    total: Tensor = field(init=False, default_factory=lambda: torch.zeros(0))
    _waiting: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = field(init=False, default_factory=dict)
    _waiting_bytes: int = field(init=False, default=0)

    def start(self) -> None:
        """Allocate the result."""
        features = 1 if self.bias else self._size if self.project is None else self.project.shape[1]
        self.total = torch.zeros(
            self.groups, features, self.layer.d_out, dtype=torch.float64
        )  # transposed: faster to add to

    def add(self, slots: DecodedSlots) -> None:
        """Add the slots of a block."""
        assert slots.errors is not None
        value = slots.values(self.of_step, self.bias)
        if self._modules is not None:
            value = value * torch.from_numpy(slots.modules_among(self._modules))
        if not self.bias and slots.block.key_scale is not None:
            value = value * slots.block.key_scale
        value = value.unsqueeze(1)
        if self.group_of is None:
            self._add(0, slots.keys, slots.errors, value)
            return
        group = self.group_of(slots.block)
        if self.bias:
            terms = (slots.errors * value).double()
            self.total.view(self.groups, -1).index_add_(0, torch.from_numpy(group).long(), terms)
            return
        for name in np.unique(group):
            rows = torch.from_numpy(np.flatnonzero(group == name))
            self._wait(int(name), slots.keys[rows], slots.errors[rows], value[rows])
        if self._waiting_bytes > WAITING_BYTES:
            self._add_waiting(list(self._waiting))

    def finish(self) -> None:
        """Add what still waits, and transpose the result to (groups, d_out, f)."""
        self._add_waiting(list(self._waiting))
        self.total = self.total.mT

    def _wait(
        self, group: int, keys: Float[Tensor, "m k"], errors: Float[Tensor, "m d"], value: Float[Tensor, "m 1"]
    ) -> None:
        """Let slots wait for more slots of their group."""
        waiting = self._waiting.setdefault(group, [])
        waiting.append((keys, errors, value))
        self._waiting_bytes += keys.nbytes + errors.nbytes
        if sum(len(rows) for rows, _, _ in waiting) >= STRETCH:
            self._add_waiting([group])

    def _add_waiting(self, groups: Sequence[int]) -> None:
        """Add the slots of these groups that wait."""
        for group in groups:
            keys, errors, value = (torch.cat(tensors) for tensors in zip(*self._waiting.pop(group), strict=True))
            self._waiting_bytes -= keys.nbytes + errors.nbytes
            self._add(group, keys, errors, value)

    def as_parameter(self, shape: Sequence[int]) -> Float[Tensor, "..."]:
        """The result (without projection) in the shape of the parameter: (groups, *shape)."""
        return (
            self.total[..., 0] if self.bias else matrix_columns(piece_of(self.layer, self.parameter), self.total, shape)
        )

    @cached_property
    def _matrix(self) -> LayerMatrix:
        return LayerMatrix(self.layer)

    @cached_property
    def bias(self) -> bool:
        """Whether the parameter is a bias, whose keys are 1."""
        return self.parameter not in self.layer.weights

    @property
    def _size(self) -> int:
        piece = piece_of(self.layer, self.parameter)
        return piece.end - piece.begin

    @cached_property
    def _modules(self) -> list[int] | None:
        """The modules whose calls count; None if all do. A bias belongs to some modules, a weight to all of them."""
        modules = self.layer.modules
        users = [i for i, module in enumerate(modules) if not self.bias or self.parameter in module.biases]
        return None if len(users) == len(modules) else users

    def _add(
        self, group: int, keys: Float[Tensor, "m k"], errors: Float[Tensor, "m d"], value: Float[Tensor, "m 1"]
    ) -> None:
        total = self.total[group]
        if self.bias:
            _add_product(total, value, errors)
        elif self.layer.indexed and self.project is None:
            total.index_add_(0, keys[:, 0].long(), (errors * value).double())
        elif self.layer.indexed:
            assert self.project is not None
            _add_product(total, self.project[keys[:, 0].long()] * value, errors)
        else:
            piece = piece_of(self.layer, self.parameter)
            for k, e in self._matrix.piece_parts(piece):
                features = keys[:, k]
                if self.project is not None:
                    features = features @ self.project.to(keys.dtype)
                _add_product(total[:, e], features * value, errors[:, e])


def _add_product(total: Float[Tensor, "f d"], features: Float[Tensor, "m f"], errors: Float[Tensor, "m d"]) -> None:
    """Add the sum over m of outer products: stretches of slots in the computing precision, their total in float64."""
    for f, e in zip(features.split(STRETCH), errors.split(STRETCH), strict=True):
        total += f.mT @ e


def parameter_sum(
    store: Store, sums: Mapping[str, Sequence[ParameterSum]], view: StoreView, watch: OnProgress | None = None
) -> None:
    """Fill several sums of each layer in one pass over its slots."""
    for term in chain.from_iterable(sums.values()):
        term.start()
    if store.is_supplied:
        for layer, slots in stream_together(store, list(sums), view, watch):
            for term in sums[layer]:
                term.add(slots)
    else:
        for layer, terms in sums.items():
            for slots in stream(store, layer, view, errors=True, watch=watch):
                for term in terms:
                    term.add(slots)
    for term in chain.from_iterable(sums.values()):
        term.finish()


def dual_output(
    store: Store,
    layer: str,
    view: StoreView,
    queries: Float[Tensor, "r k"],
    of_step: Sequence[Float[np.ndarray, " T1"]],
    watch: OnProgress | None = None,
) -> Float[Tensor, "r d_out"]:
    r"""The part of a layer's output that comes from its slots: :math:`\sum_t c_t\, e_t\,(k_t\cdot q)`.

    Attention weights come first, values after. ``of_step`` are the coefficients of each piece of the layer. Large terms
    cancel here, again in every layer, so everything is computed in float64.
    """
    info, _ = store.layer(layer)
    matrix = LayerMatrix(info)
    queries = queries.double()
    total = torch.zeros(queries.shape[0], info.d_out, dtype=torch.float64)
    for slots in stream(store, layer, view, errors=True, watch=watch):
        assert slots.errors is not None
        keys, errors = slots.keys.double(), slots.errors.double()
        for piece, of_piece in zip(info.pieces, of_step, strict=True):
            value = slots.values(of_piece).double().unsqueeze(1)
            if slots.block.key_scale is not None:
                value = value * slots.block.key_scale.unsqueeze(1)
            for columns, e in matrix.piece_parts(piece):
                values = errors[:, e] * value
                for q, out in zip(queries.split(QUERY_ROWS), total.split(QUERY_ROWS), strict=True):
                    out[:, e] += matrix.weights(keys[:, columns], q[:, columns]) @ values
    return total
