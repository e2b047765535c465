"""``nn.Linear``, and Hugging Face's ``Conv1D``, which has the transposed weight."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .inner_map import InnerCall, InnerMapKind, owner_of_forward, transposed
from .protocol import CallAndPoints, LinearMap, MapInputs, MapRows, argument, keep_input, point_of

FORWARD, LINEAR = nn.Linear.forward, torch._C._nn.linear  # pyright: ignore[reportAttributeAccessIssue]
PRODUCTS = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
SUMS = frozenset({torch.addmm, Tensor.addmm})


class LinearCall:
    """The key is the input, the error is the gradient at the output."""

    __slots__ = ("key",)

    def __init__(self, key: Tensor) -> None:
        self.key = key

    def inputs(self) -> Sequence[MapInputs]:
        """The keys are the input itself."""
        return (MapInputs(0, self.key),)

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """One row per vector of the input."""
        return (MapRows(0, self.key, errors[0]),)

    def shape(self, output: Tensor) -> Tensor:
        """Give the output the leading axes of the input."""
        return output.reshape(*self.key.shape[:-1], output.shape[-1])


class LinearKind(InnerMapKind):
    """A linear layer: its weight multiplies the last axis."""

    name, batch_dim = "linear", None

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """A linear layer has one map."""
        assert isinstance(module, nn.Linear)
        biases = () if module.bias is None else ("bias",)
        return (LinearMap((("weight", module.in_features),), biases, module.in_features, module.out_features),)

    def refusal(self, module: nn.Module) -> str | None:
        """A lazy layer has no weights before its first batch, so it is rejected."""
        if isinstance(module, nn.LazyLinear) and isinstance(module.weight, nn.UninitializedParameter):
            return "is a LazyLinear without weights yet. Run one batch through the model before recording."
        return None

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> CallAndPoints | None:
        """Capture a call from its input and its output."""
        if not output.requires_grad:
            return None
        x: Tensor = args[0] if args else argument(args, kwargs, 0, "input")
        weight: Tensor = module._parameters["weight"]  # pyright: ignore[reportAssignmentType]
        return LinearCall(keep_input(x, output.dtype, weight.requires_grad)), (point_of(output),)

    def is_plain(self, module: nn.Module) -> bool:
        """Whether a module runs ``nn.Linear.forward``."""
        return owner_of_forward(module) is nn.Linear and nn.Linear.forward is FORWARD

    def inner(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict, output: Any) -> InnerCall | None:
        """Capture ``F.linear(x, W)``, ``x @ W.T`` or ``torch.addmm(b, x, W.T)``."""
        product = self._product(function, args, kwargs)
        if product is None or product[1] is not module._parameters["weight"] or not output.requires_grad:
            return None
        x, weight, bias = product
        key = keep_input(x, output.dtype, weight.requires_grad)
        return InnerCall(LinearCall(key), point_of(output), bias is not None and bias is module._parameters.get("bias"))

    def _product(self, function: Callable, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Input, weight and bias of a matrix product; None for any other function."""
        if function is LINEAR:
            x, weight, bias = (argument(args, kwargs, i, name) for i, name in enumerate(("input", "weight", "bias")))
        elif function in PRODUCTS and len(args) == 2:
            x, weight, bias = args[0], self._right_factor(args[1]), None
        elif function in SUMS and len(args) == 3 and not kwargs:
            bias, x, weight = args[0], args[1], self._right_factor(args[2])
        else:
            return None
        return None if weight is None else (x, weight, bias)

    def _right_factor(self, matrix: Tensor) -> Tensor | None:
        """The weight that multiplies an input if this matrix is the right factor of the product."""
        return transposed(matrix)


class TransposedLinearKind(LinearKind):
    """Hugging Face's ``Conv1D`` (GPT-2): a linear layer whose weight is (d_in, d_out)."""

    CLASS = "transformers.pytorch_utils.Conv1D"

    name = "linear-turned"

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """A linear layer has one map."""
        d_in, d_out = module.weight.shape  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]
        return (LinearMap((("weight", int(d_in)),), ("bias",), int(d_in), int(d_out), transposed=True),)

    def refusal(self, module: nn.Module) -> str | None:
        """Every module of this class can be recorded."""
        return None

    def is_plain(self, module: nn.Module) -> bool:
        """Whether a module runs the forward pass of ``Conv1D``."""
        owner = owner_of_forward(module)
        return owner is not None and f"{owner.__module__}.{owner.__qualname__}" == self.CLASS

    def _right_factor(self, matrix: Tensor) -> Tensor | None:
        return matrix
