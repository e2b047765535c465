"""``nn.Conv1d`` and ``nn.Conv2d``: a linear map of the patch under the kernel, at every position of the output."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .inner_map import InnerCall, InnerMapKind, owner_of_forward
from .protocol import CallAndPoints, LinearMap, MapInputs, MapRows, argument, keep_input, point_of

OWN = {
    (cls, name): vars(cls)[name] for cls in (nn.Conv1d, nn.Conv2d) for name in ("forward", "_conv_forward")
}  # fmt: skip
"""The methods that a plain convolution runs, read at import time, before anybody can have replaced them."""

FUNCTIONS: dict[Callable, int] = {torch.conv1d: 1, torch.conv2d: 2}


class KernelGeometry(NamedTuple):
    """How a kernel moves over its input: sizes along each axis, and the padding (in the form of ``F.pad``)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    mode: str
    channels: int


class ConvCall:
    """The key of a position is its unfolded patch; the error is the gradient at that position of the output."""

    def __init__(self, kernel: KernelGeometry, x: Tensor, size: torch.Size) -> None:
        self.kernel, self.x, self.size = kernel, x, size

    def inputs(self) -> Sequence[MapInputs]:
        """One patch per position."""
        return (MapInputs(0, patches(self.kernel, self.x)),)

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """One row per position: (examples, positions, …)."""
        error = errors[0]
        if error is not None:
            error = error.reshape(-1, self.kernel.channels, self._positions).mT
        return (MapRows(0, self.inputs()[0].rows, error),)

    @property
    def _positions(self) -> int:
        return self.size[-1] if len(self.kernel.size) == 1 else self.size[-1] * self.size[-2]

    def shape(self, output: Tensor) -> Tensor:
        """Move the channels before the positions."""
        return output.unflatten(0, (-1, self._positions)).mT.reshape(self.size)


def patches(kernel: KernelGeometry, x: Tensor) -> Tensor:
    """The entries under the kernel at each position: (examples, positions, channels × kernel)."""
    flat = len(kernel.size) == 1
    x = x.unsqueeze(0) if x.ndim == (2 if flat else 3) else x
    x = F.pad(x, kernel.padding, kernel.mode) if any(kernel.padding) else x
    if not flat:
        return F.unfold(x, kernel.size, kernel.dilation, 0, kernel.stride).mT
    size, dilation, stride = ((1, *extent) for extent in (kernel.size, kernel.dilation, kernel.stride))
    return F.unfold(x.unsqueeze(2), size, dilation, 0, stride).mT


class ConvolutionKind(InnerMapKind):
    """A convolution. Its groups are the parts of one layer."""

    name, batch_dim = "convolution", 0

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """A convolution has one map."""
        assert isinstance(module, nn.Conv1d | nn.Conv2d)
        width = module.in_channels // module.groups * int(torch.tensor(module.kernel_size).prod())
        biases = () if module.bias is None else ("bias",)
        return (
            LinearMap((("weight", width),), biases, width * module.groups, module.out_channels, parts=module.groups),
        )  # fmt: skip

    def refusal(self, module: nn.Module) -> str | None:
        """A lazy layer has no weights before its first batch, so it is rejected."""
        if isinstance(module.weight, nn.UninitializedParameter):
            return (
                f"is a {type(module).__name__} without weights yet. Run one batch through the model before recording."
            )
        return None

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> CallAndPoints | None:
        """Capture a call from its input and its output."""
        if not output.requires_grad:
            return None
        assert isinstance(module, nn.Conv1d | nn.Conv2d)
        x = keep_input(argument(args, kwargs, 0, "input"), output.dtype, module.weight.requires_grad)
        return ConvCall(_kernel_of(module), x, output.shape), (point_of(output),)

    def is_plain(self, module: nn.Module) -> bool:
        """Whether a module runs the ``forward`` of its torch class and the method that this calls."""
        assert isinstance(module, nn.Conv1d | nn.Conv2d)
        cls = nn.Conv1d if isinstance(module, nn.Conv1d) else nn.Conv2d
        names = ("forward", "_conv_forward")
        return all(owner_of_forward(module, name) is cls and vars(cls)[name] is OWN[cls, name] for name in names)

    def inner(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict, output: Any) -> InnerCall | None:
        """``F.conv1d`` or ``F.conv2d`` with as many groups as the layer has parts."""
        if FUNCTIONS.get(function) is None or not output.requires_grad:
            return None
        weight, bias = argument(args, kwargs, 1, "weight"), argument(args, kwargs, 2, "bias")
        groups = argument(args, kwargs, 6, "groups")
        groups = 1 if groups is None else groups
        if weight is not module._parameters["weight"] or groups != module.groups:
            return None
        x = keep_input(argument(args, kwargs, 0, "input"), output.dtype, weight.requires_grad)
        call = ConvCall(_kernel_in(weight, args, kwargs), x, output.shape)
        return InnerCall(call, point_of(output), bias is not None and bias is module._parameters.get("bias"))


def _kernel_of(module: nn.Conv1d | nn.Conv2d) -> KernelGeometry:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    around: Sequence[int] = module._reversed_padding_repeated_twice  # pyright: ignore[reportAttributeAccessIssue]
    sizes = module.kernel_size, module.stride, module.dilation
    return KernelGeometry(*sizes, tuple(around), mode, module.out_channels)


def _kernel_in(weight: Tensor, args: tuple, kwargs: dict) -> KernelGeometry:
    """The kernel of a functional call."""
    size = tuple(weight.shape[2:])
    stride, dilation = (
        _per_axis(argument(args, kwargs, i, name), size) for i, name in ((3, "stride"), (5, "dilation"))
    )
    padding = argument(args, kwargs, 4, "padding")
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(side, side) for side in _per_axis(0 if padding in (None, "valid") else padding, size)]
    return KernelGeometry(size, stride, dilation, sum(reversed(sides), ()), "constant", len(weight))


def _per_axis(value: int | Sequence[int] | None, size: tuple[int, ...]) -> tuple[int, ...]:
    """Repeat a single number for each axis of the kernel."""
    numbers = (1,) if value is None else (value,) if isinstance(value, int) else tuple(value)
    return numbers * len(size) if len(numbers) == 1 else numbers
