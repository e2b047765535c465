"""``nn.Conv1d`` and ``nn.Conv2d``: a linear map of the patch under the kernel, at every position of the output."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kind import AfterForward, Found, Key, Map, Pointed, argument, kept, point_of


class ConvCall:
    """The key of a position is its patch, unfolded; the error the gradient at that position of the output."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d, x: Tensor, size: torch.Size) -> None:
        self.module, self.x, self.size = module, x, size

    def inputs(self) -> Sequence[Key]:
        """One patch a position."""
        return (Key(0, patches(self.module, self.x)),)

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[Found]:
        """One row a position: (examples, positions, …)."""
        error = errors[0]
        if error is not None:
            error = error.reshape(-1, self.module.out_channels, self._positions).mT
        return (Found(0, self.inputs()[0].rows, error),)

    @property
    def _positions(self) -> int:
        return self.size[-1] if isinstance(self.module, nn.Conv1d) else self.size[-1] * self.size[-2]

    def shape(self, output: Tensor) -> Tensor:
        """Channels come before positions."""
        return output.unflatten(0, (-1, self._positions)).mT.reshape(self.size)


def patches(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """What lies under the kernel at each position: (examples, positions, channels × kernel)."""
    flat = isinstance(module, nn.Conv1d)
    x = x.unsqueeze(0) if x.ndim == (2 if flat else 3) else x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    around: list[int] = module._reversed_padding_repeated_twice  # pyright: ignore[reportAttributeAccessIssue]
    x = F.pad(x, around, mode) if any(around) else x
    if not flat:
        return F.unfold(x, module.kernel_size, module.dilation, 0, module.stride).mT  # pyright: ignore
    (kernel,), (dilation,), (stride,) = module.kernel_size, module.dilation, module.stride
    return F.unfold(x.unsqueeze(2), (1, kernel), (1, dilation), 0, (1, stride)).mT


class Convolution(AfterForward):
    """Groups are parts of one layer."""

    name, batch_dim = "convolution", 0

    def maps(self, module: nn.Module) -> Sequence[Map]:
        """Its one map."""
        assert isinstance(module, nn.Conv1d | nn.Conv2d)
        width = module.in_channels // module.groups * int(torch.tensor(module.kernel_size).prod())
        biases = () if module.bias is None else ("bias",)
        return (
            Map((("weight", width),), biases, width * module.groups, module.out_channels, parts=module.groups),
        )  # fmt: skip

    def refusal(self, module: nn.Module) -> str | None:
        """A lazy layer has no weights before its first batch."""
        if isinstance(module.weight, nn.UninitializedParameter):
            return (
                f"is a {type(module).__name__} without weights yet. Run one batch through the model before recording."
            )
        return None

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Pointed | None:
        """Its input and its output."""
        if not output.requires_grad:
            return None
        assert isinstance(module, nn.Conv1d | nn.Conv2d)
        x = kept(argument(args, kwargs, 0, "input"), output.dtype, module.weight.requires_grad)
        return ConvCall(module, x, output.shape), (point_of(output),)
