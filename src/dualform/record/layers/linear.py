"""``nn.Linear``, and the same with its weight turned as Hugging Face's ``Conv1D`` has it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .kind import AfterForward, Found, Key, Map, Pointed, argument, kept, point_of


class LinearCall:
    """The key is the input, the error the gradient at the output."""

    __slots__ = ("key",)

    def __init__(self, key: Tensor) -> None:
        self.key = key

    def inputs(self) -> Sequence[Key]:
        """The input."""
        return (Key(0, self.key),)

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[Found]:
        """The rows of the call."""
        return (Found(0, self.key, errors[0]),)

    def shape(self, output: Tensor) -> Tensor:
        """Rows are the last axis already."""
        return output.reshape(*self.key.shape[:-1], output.shape[-1])


class Linear(AfterForward):
    """A weight that multiplies the last axis."""

    name, batch_dim = "linear", None

    def maps(self, module: nn.Module) -> Sequence[Map]:
        """Its one map."""
        assert isinstance(module, nn.Linear)
        biases = () if module.bias is None else ("bias",)
        return (Map((("weight", module.in_features),), biases, module.in_features, module.out_features),)

    def refusal(self, module: nn.Module) -> str | None:
        """A lazy layer has no weights before its first batch."""
        if isinstance(module, nn.LazyLinear) and isinstance(module.weight, nn.UninitializedParameter):
            return "is a LazyLinear without weights yet. Run one batch through the model before recording."
        return None

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Pointed | None:
        """Its input and its output."""
        if not output.requires_grad:
            return None
        x: Tensor = args[0] if args else argument(args, kwargs, 0, "input")
        weight: Tensor = module._parameters["weight"]  # pyright: ignore[reportAssignmentType]
        return LinearCall(kept(x, output.dtype, weight.requires_grad)), (point_of(output),)


class TurnedLinear(Linear):
    """Hugging Face's ``Conv1D`` (GPT-2): a linear layer whose weight is (d_in, d_out)."""

    name = "linear-turned"

    def maps(self, module: nn.Module) -> Sequence[Map]:
        """Its one map."""
        d_in, d_out = module.weight.shape  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]
        return (Map((("weight", int(d_in)),), ("bias",), int(d_in), int(d_out), turned=True),)

    def refusal(self, module: nn.Module) -> str | None:
        """Nothing stands against it."""
        return None
