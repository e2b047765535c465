"""What each example contributes to the loss of a loop, in such a way that its gradient is that of the loop bit for bit.

The sum of shares is the loop's loss as a number, but its gradient may round otherwise. In float32, the gradients of
``F.cross_entropy(z, y)`` and of ``(F.cross_entropy(z, y, reduction="none") / n).sum()`` are the same bits whatever the
batch size; with class weights or with label smoothing many batches differ in the last bit. Therefore the loss of the
loop comes along with its shares, and takes their place in a backward pass where all examples count fully.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import QueryError


class Task(NamedTuple):
    """The two arguments of ``memory.replay`` after the model."""

    losses: Callable[[nn.Module, Any], Float[Tensor, " b"]]
    """Of a model and a batch: each example's share of the loss that the loop backpropagated."""
    data: Callable[[Tensor], Any]
    """The batch with these noted indices, as the loop saw it."""


def shares_of(total: Float[Tensor, ""], shares: Float[Tensor, " b"], how: str) -> Float[Tensor, " b"]:
    """The shares; where each counts once, their gradient is that of ``total``, the loss as the loop computed it.

    They must sum to it. ``how`` says in an error message what to do if they do not.
    """
    eps = max(torch.finfo(total.dtype).eps, torch.finfo(torch.float32).eps)
    numbers, loss = shares.detach(), float(total.detach())
    summed = float(numbers.sum())
    if abs(summed - loss) > eps**0.5 * (float(numbers.abs().sum()) + abs(loss)):
        raise QueryError(
            f"the shares of the {len(shares)} examples of a batch sum to {summed:.6g}, but the loss of the loop is "
            f"{loss:.6g}. {how}"
        )
    attached = _SharesOfLoss.apply(shares, total)
    assert isinstance(attached, Tensor)
    return attached


class _SharesOfLoss(torch.autograd.Function):
    """Gives the shares. Where all have weight 1, and nobody differentiates twice, the gradient goes to the total."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, total: Tensor) -> Tensor:
        ctx.dtype = total.dtype
        ctx.set_materialize_grads(False)
        return shares.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        (weights,) = grad_outputs
        if weights is None:
            return None, None
        if torch.is_grad_enabled() or not bool((weights == 1).all()):
            return weights, None
        return None, weights.new_ones((), dtype=ctx.dtype)
