"""``nn.Linear``: the key is its input, the error the gradient at its output."""

import torch
from torch import Tensor


def key_of(args: tuple, kwargs: dict, output: Tensor, *, owned: bool) -> Tensor:
    """The input as the layer multiplies it; it must stay as it is until the layer's backward step.

    Autograd sees to that where it needs the input for the weight's gradient (``owned``). Under autocast the layer
    multiplies a cast of its input, in the precision of its output.
    """
    x: Tensor = (args[0] if args else kwargs["input"]).detach()
    if x.dtype is not output.dtype:
        return x.to(output.dtype)
    return x if owned else x.clone()


def node_of(output: Tensor) -> torch.autograd.graph.Node:
    """The step of the backward pass that turns the error into the weight's gradient.

    An output with several leading axes is a view, and an in-place activation after the layer rewrites the history of
    the view: its base keeps the one that counts.
    """
    base = output._base
    node = (output if base is None or base.numel() != output.numel() else base).grad_fn
    assert node is not None
    return node
