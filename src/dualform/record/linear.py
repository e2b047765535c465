"""``nn.Linear``: the key is its input, the error the gradient at its output."""

import torch
from torch import Tensor, nn


def key_of(module: nn.Linear, args: tuple, kwargs: dict) -> Tensor:
    """The input as the layer multiplies it; it must stay as it is until the layer's backward step.

    Autograd sees to that where it needs the input for the weight's gradient. Under autocast the layer multiplies a
    cast of its input, and the input itself may change afterwards.
    """
    x: Tensor = (args[0] if args else kwargs["input"]).detach()
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    return x if module.weight.requires_grad else x.clone()


def node_of(output: Tensor) -> torch.autograd.graph.Node:
    """The step of the backward pass that turns the error into the weight's gradient.

    An output with several leading axes is a view, and an in-place activation after the layer rewrites the history of
    the view: its base keeps the one that counts.
    """
    base = output._base
    node = (output if base is None or base.numel() != output.numel() else base).grad_fn
    assert node is not None
    return node
