r"""Probes of whole gradients: a product with a random vector, or a small gradient itself.

Of a weight's gradient G (rows, columns) the probe is :math:`G u` with one random vector u, so every entry counts. What
slots put into it costs two products with a vector, :math:`\sum_t e_t (x_t \cdot u)`, where the gradient itself is a
product of matrices. A bias, and a weight of few entries, is its own probe.

Whether two gradients differ shows in their probes unless the difference D has :math:`D u \approx 0`: entries of u are
between 0.5 and 1.5, of either sign, so a change of one entry always shows, and a change of many entries of one row is
hidden below a threshold τ with a probability of about 0.8 τ / |D|.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from dualform.store import LayerMatrix, all_finite, piece_of
from dualform.types import LayerInfo

WHOLE = 1 << 12
"""A weight of up to so many entries is its own probe."""

NUMBERS = 1 << 12
"""A probe of more numbers is folded to this size."""


SQUARE = 13 / 12
"""The mean square of an entry of a random direction."""


class GradientProbe:
    """The probe of one parameter's gradient, of at most so many ``numbers``."""

    def __init__(self, name: str, parameter: Tensor, layers: Iterable[LayerInfo], numbers: int = NUMBERS) -> None:
        self.name, self.shape, self.numbers = name, parameter.shape, numbers
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        is_itself = parameter.numel() <= WHOLE or not any(name in layer.weights for layer in layers)
        rows = parameter.numel() if is_itself else len(parameter)
        self.size = min(rows, numbers)
        """How many numbers the probe has."""
        self.entrywise = is_itself and rows <= numbers
        """Whether the probe holds every entry by itself."""
        self.device = parameter.device
        random, like = torch.Generator().manual_seed(parameter.numel()), (parameter.device, self.dtype)
        self._direction = None if is_itself else _direction(parameter.numel() // rows, random).to(*like)
        self._signs = _direction(rows, random).to(*like) if rows > numbers else None

    def of_gradient(self, gradient: Shaped[Tensor, "..."], out: Float[Tensor, " p"]) -> None:
        """Write the probe of a gradient to ``out``."""
        gradient = gradient.detach().to(self.dtype)
        if self._signs is not None:
            out.copy_(self._of(gradient, self._direction))
        elif self._direction is None:
            out.copy_(gradient.reshape(-1))
        else:
            torch.mv(gradient.reshape(len(gradient), -1), self._direction, out=out)

    def of(self, tensor: Shaped[Tensor, "..."]) -> Float[Tensor, " p"]:
        """The probe of the parameter itself, or of any tensor of its shape, in float64."""
        direction = None if self._direction is None else self._direction.to("cpu", torch.float64)
        return self._of(tensor.detach().to("cpu", torch.float64), direction)

    def _of(self, tensor: Float[Tensor, "..."], direction: Float[Tensor, " c"] | None) -> Float[Tensor, " p"]:
        if direction is None:
            return self._folded(tensor.reshape(-1).clone())
        return self._folded(torch.mv(tensor.reshape(len(tensor), -1), direction))

    def of_slots(
        self, layer: LayerInfo, key: Shaped[Tensor, "m k"], error: Float[Tensor, "m d_out"]
    ) -> Float[Tensor, " p"]:
        """The probe of what some rows put into the gradient."""
        error = error.to(self.dtype)
        key = LayerMatrix(layer).keys_in(key, self.dtype)
        if self._direction is None:
            return self._folded(LayerMatrix(layer).gradient(self.name, key, error, self.shape).reshape(-1))
        u, piece = self._direction, piece_of(layer, self.name)
        if layer.indexed:
            rows = error.new_zeros(self.shape[0]).index_add_(0, key[:, 0].long(), torch.mv(error, u))
            return self._folded(rows)
        if piece.transposed:
            return self._folded(torch.mv(key[:, piece.begin : piece.end].mT, torch.mv(error, u)))
        if layer.parts == 1:
            return self._folded(torch.mv(error.mT, torch.mv(key[:, piece.begin : piece.end], u)))
        weights = key.unflatten(1, (layer.parts, -1))[..., piece.begin : piece.end] @ u  # m parts
        return self._folded(torch.einsum("mpo,mp->po", error.unflatten(1, (layer.parts, -1)), weights).flatten())

    def _sums_errors(self, layer: LayerInfo) -> bool:
        """Whether the probe of slots is a sum of their errors, each with one factor."""
        weight = self.name in layer.weights
        if self._direction is None:
            return not weight
        return weight and layer.parts == 1 and not layer.indexed and not piece_of(layer, self.name).transposed

    def _factors(self, layer: LayerInfo, key: Float[Tensor, "m k"], out: Float[Tensor, " m"]) -> None:
        """Write these factors to ``out``, where they are not 1."""
        if self._direction is not None:
            piece = piece_of(layer, self.name)
            torch.mv(key[:, piece.begin : piece.end], self._direction, out=out)

    def share(self, size: int) -> float:
        """The factor of the square of an entry in the square of the probe, on average."""
        return (1.0 if self._direction is None else SQUARE) * (1.0 if self._signs is None else SQUARE)

    def nothing(self) -> Float[Tensor, " p"]:
        """The probe of a gradient of zeros."""
        return torch.zeros(self.size, dtype=self.dtype)

    def _folded(self, numbers: Float[Tensor, " r"]) -> Float[Tensor, " p"]:
        """Numbers folded to sums of them, if they are too many: each number is in one of the sums."""
        if self._signs is None:
            return numbers
        signed, rows = numbers * self._signs.to(numbers), math.ceil(len(numbers) / self.numbers)
        return nn.functional.pad(signed, (0, rows * self.numbers - len(signed))).view(rows, -1).sum(0)


def probe_call(
    probes: Sequence[GradientProbe], layer: LayerInfo, key: Shaped[Tensor, "m k"], error: Float[Tensor, "m d_out"]
) -> list[Tensor]:
    """The probes of what some rows put into the gradients of their layer; a weight and a bias take one product."""
    plain = all(probe.dtype is error.dtype is key.dtype for probe in probes)
    if len(probes) == 1 or not plain or not all(probe._sums_errors(layer) for probe in probes):
        return [probe.of_slots(layer, key, error) for probe in probes]
    factors = error.new_ones(len(probes), len(error))
    for probe, row in zip(probes, factors, strict=True):
        probe._factors(layer, key, row)
    return [probe._folded(sums) for probe, sums in zip(probes, factors @ error, strict=True)]


def probe_gradients(probes: Sequence[GradientProbe], gradients: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """The probes of several gradients, and whether all of them are finite."""
    formats = {(probe.dtype, probe.device) for probe in probes}
    if len(formats) > 1:
        results = [probe_gradients([probe], [gradient]) for probe, gradient in zip(probes, gradients, strict=True)]
        return [probed for (probed,), _ in results], all(finite for _, finite in results)
    buffer = torch.empty(sum(probe.size for probe in probes), dtype=probes[0].dtype, device=probes[0].device)
    parts = list(buffer.split([probe.size for probe in probes]))
    for probe, gradient, part in zip(probes, gradients, parts, strict=True):
        probe.of_gradient(gradient, part)
    return parts, all_finite(buffer)


def _direction(size: int, random: torch.Generator) -> Float[Tensor, " c"]:
    """Numbers between 0.5 and 1.5, of either sign."""
    signs = torch.randint(2, (size,), generator=random) * 2 - 1
    return (0.5 + torch.rand(size, generator=random, dtype=torch.float64)) * signs
