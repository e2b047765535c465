r"""A gradient seen whole: in a random direction, or entry by entry where it is small.

Of a weight's gradient G (rows, columns) the probe is :math:`G u` with one random vector u, so every entry counts. What
slots put into it costs two products with a vector, :math:`\sum_t e_t (x_t \cdot u)`, where the gradient itself is a
product of matrices. A bias, and a weight of few entries, is its own probe.

Whether two gradients differ shows in their probes unless the difference D has :math:`D u \approx 0`: entries of u lie
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
"""A probe of more numbers is folded to so many."""


SQUARE = 13 / 12
"""The mean square of an entry of a random direction."""


class GradientProbe:
    """How the gradient of one parameter is seen: in at most so many ``numbers``."""

    def __init__(self, name: str, parameter: Tensor, layers: Iterable[LayerInfo], numbers: int = NUMBERS) -> None:
        self.name, self.shape, self.numbers = name, parameter.shape, numbers
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        whole = parameter.numel() <= WHOLE or not any(name in layer.weights for layer in layers)
        rows = parameter.numel() if whole else len(parameter)
        self.size = min(rows, numbers)
        """How many numbers are seen."""
        self.entrywise = whole and rows <= numbers
        """Whether it shows every entry by itself."""
        self.device = parameter.device
        random, like = torch.Generator().manual_seed(parameter.numel()), (parameter.device, self.dtype)
        self._direction = None if whole else _direction(parameter.numel() // rows, random).to(*like)
        self._signs = _direction(rows, random).to(*like) if rows > numbers else None

    def of_gradient(self, gradient: Shaped[Tensor, "..."], out: Float[Tensor, " p"]) -> None:
        """A gradient; what is seen of it goes to ``out``."""
        gradient = gradient.detach().to(self.dtype)
        if self._signs is not None:
            out.copy_(self._of(gradient, self._direction))
        elif self._direction is None:
            out.copy_(gradient.reshape(-1))
        else:
            torch.mv(gradient.reshape(len(gradient), -1), self._direction, out=out)

    def of(self, tensor: Shaped[Tensor, "..."]) -> Float[Tensor, " p"]:
        """The parameter itself, or anything of its shape, in float64."""
        direction = None if self._direction is None else self._direction.to("cpu", torch.float64)
        return self._of(tensor.detach().to("cpu", torch.float64), direction)

    def _of(self, tensor: Float[Tensor, "..."], direction: Float[Tensor, " c"] | None) -> Float[Tensor, " p"]:
        if direction is None:
            return self._folded(tensor.reshape(-1).clone())
        return self._folded(torch.mv(tensor.reshape(len(tensor), -1), direction))

    def of_slots(
        self, layer: LayerInfo, key: Shaped[Tensor, "m k"], error: Float[Tensor, "m d_out"]
    ) -> Float[Tensor, " p"]:
        """What some rows put into the gradient."""
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
        """Whether it sees a sum of errors, each multiplied with one number."""
        weight = self.name in layer.weights
        if self._direction is None:
            return not weight
        return weight and layer.parts == 1 and not layer.indexed and not piece_of(layer, self.name).transposed

    def _factors(self, layer: LayerInfo, key: Float[Tensor, "m k"], out: Float[Tensor, " m"]) -> None:
        """These numbers, where they are not 1."""
        if self._direction is not None:
            piece = piece_of(layer, self.name)
            torch.mv(key[:, piece.begin : piece.end], self._direction, out=out)

    def share(self, size: int) -> float:
        """What the square of an entry counts for, on average."""
        return (1.0 if self._direction is None else SQUARE) * (1.0 if self._signs is None else SQUARE)

    def nothing(self) -> Float[Tensor, " p"]:
        """What is seen of a gradient of zeros."""
        return torch.zeros(self.size, dtype=self.dtype)

    def _folded(self, numbers: Float[Tensor, " r"]) -> Float[Tensor, " p"]:
        """Sums of them, where they are too many: each number is in one of the sums."""
        if self._signs is None:
            return numbers
        signed, rows = numbers * self._signs.to(numbers), math.ceil(len(numbers) / self.numbers)
        return nn.functional.pad(signed, (0, rows * self.numbers - len(signed))).view(rows, -1).sum(0)


def probe_call(
    probes: Sequence[GradientProbe], layer: LayerInfo, key: Shaped[Tensor, "m k"], error: Float[Tensor, "m d_out"]
) -> list[Tensor]:
    """What some rows put into the gradients of parameters of their layer: of a weight and a bias in one product."""
    plain = all(probe.dtype is error.dtype is key.dtype for probe in probes)
    if len(probes) == 1 or not plain or not all(probe._sums_errors(layer) for probe in probes):
        return [probe.of_slots(layer, key, error) for probe in probes]
    factors = error.new_ones(len(probes), len(error))
    for probe, own in zip(probes, factors, strict=True):
        probe._factors(layer, key, own)
    return [probe._folded(sums) for probe, sums in zip(probes, factors @ error, strict=True)]


def probe_gradients(probes: Sequence[GradientProbe], gradients: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """What is seen of several gradients, and whether all of it is finite."""
    alike = {(probe.dtype, probe.device) for probe in probes}
    if len(alike) > 1:
        each = [probe_gradients([probe], [gradient]) for probe, gradient in zip(probes, gradients, strict=True)]
        return [seen for (seen,), _ in each], all(finite for _, finite in each)
    room = torch.empty(sum(probe.size for probe in probes), dtype=probes[0].dtype, device=probes[0].device)
    places = list(room.split([probe.size for probe in probes]))
    for probe, gradient, place in zip(probes, gradients, places, strict=True):
        probe.of_gradient(gradient, place)
    return places, all_finite(room)


def _direction(size: int, random: torch.Generator) -> Float[Tensor, " c"]:
    """Numbers between 0.5 and 1.5, of either sign."""
    signs = torch.randint(2, (size,), generator=random) * 2 - 1
    return (0.5 + torch.rand(size, generator=random, dtype=torch.float64)) * signs
