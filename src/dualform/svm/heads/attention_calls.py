"""Record the calls of attention layers in one forward pass: their arguments, and the gradients of their outputs.

Layers of ``dualform.attention`` and ``nn.MultiheadAttention`` are recorded by forward hooks. Any other module is
recorded when it calls torch's fused attention: the queries and keys of that call are compared with the outputs of the
linear layers inside the module. So no list of architectures is needed, and anything that happens in between (rotary
positions, for example) is detected.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualform.attention import Heads
from dualform.errors import ModelMismatch, QueryError
from dualform.explain.query import run_model, shadow_of
from dualform.store import outside_inference_mode

from .head_inputs import HeadInputs
from .layer_adapters import InnerLinear, inputs_of_dualform_layer, inputs_of_fused_call, inputs_of_torch_layer

LossOfOutput = Callable[[Any], Tensor]
"""A function from a model's output to one number."""


def look(
    model: nn.Module, inputs: Any, *, layers: Sequence[str] | None = None, loss: LossOfOutput | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, list[HeadInputs]]:  # fmt: skip
    """Run a model once and return the inputs of all heads, by attention layer; heads of one window size are together.

    ``layers`` restricts the result to these names. ``weights`` replace the model's own. With a ``loss``, its gradient
    at the heads' outputs is included. If a layer is called more than once, the last call counts.
    """
    with outside_inference_mode(), torch.enable_grad() if loss else torch.no_grad():
        shadow = shadow_of(model, _checked_weights(model, weights or {}), differentiable=loss is not None)
        with _recording_calls(shadow) as calls:
            output = run_model(shadow, inputs)
        if loss:
            parameters = [p for p in shadow.parameters() if p.is_floating_point()]
            torch.autograd.grad(_require_scalar(loss(output)), parameters, allow_unused=True)
        if unknown := [name for name in layers or () if name not in calls]:
            raise QueryError(f"no attention layer '{unknown[0]}' was seen: there are {list(calls)}.")
        with torch.no_grad():
            head_inputs = {
                name: call.head_inputs(name) for name, call in calls.items() if layers is None or name in layers
            }
    if not head_inputs:
        raise QueryError(
            f"no attention layer was seen in this {type(model).__name__}: neither one of dualform.attention, nor "
            "nn.MultiheadAttention, nor a module that calls torch's scaled_dot_product_attention (as those of Hugging "
            "Face do with attn_implementation='sdpa')."
        )
    return head_inputs


def _checked_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in the model's dtypes, after a check that the model has each name with that shape."""
    own, names = {**dict(model.named_parameters()), **dict(model.named_buffers())}, model.state_dict().keys()
    for name, tensor in weights.items():
        if name not in own and name not in names:
            raise ModelMismatch(f"this {type(model).__name__} has no '{name}', which the weights have.")
        if name in own and tensor.shape != own[name].shape:
            raise ModelMismatch(
                f"'{name}' is {tuple(tensor.shape)} in the weights, and {tuple(own[name].shape)} in this "
                f"{type(model).__name__}."
            )
    return {name: tensor.to(own[name].dtype) for name, tensor in weights.items() if name in own}


def seen_layers(model: nn.Module, inputs: Any) -> list[str]:
    """The names of the attention layers that a model calls on given inputs."""
    with outside_inference_mode(), torch.no_grad(), _recording_calls(shadow := shadow_of(model)) as calls:
        run_model(shadow, inputs)
    return list(calls)


def _require_scalar(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise QueryError("loss= must map the model's output to a tensor with one number that depends on it.")
    return loss


# ------------------------------------------------------------------------------------------- watching


@dataclass
class AttentionCall:
    """One call of an attention layer: its arguments, or those of the fused kernel, and the gradient of its output."""

    layer: nn.Module
    arguments: Mapping[str, Any]
    inside: Sequence[InnerLinear] = ()
    gradient: Tensor | None = None

    def head_inputs(self, name: str) -> list[HeadInputs]:
        """The inputs of its heads; ``name`` is the layer's name in the model."""
        if isinstance(self.layer, Heads):
            return inputs_of_dualform_layer(self.layer, name, self.arguments, self.gradient)
        if isinstance(self.layer, nn.MultiheadAttention):
            return inputs_of_torch_layer(self.layer, name, self.arguments, self.gradient)
        return inputs_of_fused_call(self.layer, self.arguments, self.inside, self.gradient)


def _store_call(calls: dict[str, AttentionCall], name: str, call: AttentionCall, output: Tensor) -> None:
    """Store a call, and the gradient of its output once the backward pass computes it."""
    calls[name] = call
    if output.requires_grad:
        output.register_hook(lambda gradient: setattr(call, "gradient", gradient))


@contextmanager
def _recording_calls(model: nn.Module) -> Iterator[dict[str, AttentionCall]]:
    """Record the calls of all attention layers of a model shadow, by layer name, while the context is open."""
    calls: dict[str, AttentionCall] = {}
    running: list[_RunningModule] = []
    for name, module in model.named_modules():
        if isinstance(module, Heads | nn.MultiheadAttention):
            module.register_forward_hook(partial(_record_call, calls, name), with_kwargs=True)
        module.register_forward_pre_hook(partial(_push_module, running, name))
        module.register_forward_hook(partial(_pop_module, running), always_call=True)
    with _FusedAttentionRecorder(calls, running):
        yield calls


@dataclass
class _RunningModule:
    """A module that is being called, and the linear layers directly inside it that have been called."""

    name: str
    module: nn.Module
    inside: list[InnerLinear] = field(default_factory=list)


def _record_call(
    calls: dict[str, AttentionCall], name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any
) -> None:
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    _store_call(
        calls,
        name,
        AttentionCall(module, _detached_copies(arguments)),
        output[0] if isinstance(output, tuple) else output,
    )


def _push_module(running: list[_RunningModule], name: str, module: nn.Module, args: tuple) -> None:
    running.append(_RunningModule(name, module))


def _pop_module(running: list[_RunningModule], module: nn.Module, args: tuple, output: Any) -> None:
    done = running.pop()
    if running and isinstance(output, Tensor) and args and InnerLinear.fits(module):
        running[-1].inside.append(InnerLinear(done.name, module, args[0].detach().clone(), output.detach().clone()))


def _detached_copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors, which the model may change in place later; arguments that were one tensor remain one."""
    copies = {id(value): value.detach().clone() for value in arguments.values() if isinstance(value, Tensor)}
    return {name: copies.get(id(value), value) for name, value in arguments.items()}


class _FusedAttentionRecorder(TorchFunctionMode):
    """Records calls of torch's fused attention by modules that are neither ours nor ``nn.MultiheadAttention``."""

    def __init__(self, calls: dict[str, AttentionCall], running: list[_RunningModule]) -> None:
        super().__init__()
        self.calls, self.running = calls, running

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        handled = any(isinstance(call.module, Heads | nn.MultiheadAttention) for call in self.running)
        if func is F.scaled_dot_product_attention and self.running and not handled:
            arguments: dict[str, Any] = {**dict(zip(ARGUMENTS, args, strict=False)), **(kwargs or {})}
            now = self.running[-1]
            _store_call(
                self.calls, now.name, AttentionCall(now.module, _detached_copies(arguments), tuple(now.inside)), output
            )
        return output


ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
