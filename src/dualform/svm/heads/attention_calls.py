"""Attention layers at work: what each of them was given in one forward pass, and what it made of it.

Our own layers and ``nn.MultiheadAttention`` are asked themselves. Any other module is seen as it calls torch's fused
attention: the queries and keys that arrive there are compared with what the linear layers inside it gave. So no list of
names is needed, and whatever happens between the two (rotary positions, say) shows.
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
from .layer_adapters import InnerLinear, of_fused, of_ours, of_torch

LossOfOutput = Callable[[Any], Tensor]
"""Of a model's output, one number."""


def look(
    model: nn.Module, inputs: Any, *, layers: Sequence[str] | None = None, loss: LossOfOutput | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, list[HeadInputs]]:  # fmt: skip
    """Run a model once. By the name of each attention layer what its heads saw: those of one scale together.

    ``layers`` are those that are wanted (None: all). ``weights`` stand in for the model's own. With a ``loss`` its
    gradient at the heads' outputs is there too. Of a layer that is called more than once it is the last call.
    """
    with outside_inference_mode(), torch.enable_grad() if loss else torch.no_grad():
        shadow = shadow_of(model, _fitting(model, weights or {}), differentiable=loss is not None)
        with _watching(shadow) as seen:
            output = run_model(shadow, inputs)
        if loss:
            parameters = [p for p in shadow.parameters() if p.is_floating_point()]
            torch.autograd.grad(_number(loss(output)), parameters, allow_unused=True)
        if unknown := [name for name in layers or () if name not in seen]:
            raise QueryError(f"no attention layer '{unknown[0]}' was seen: there are {list(seen)}.")
        with torch.no_grad():
            found = {name: call.sights(name) for name, call in seen.items() if layers is None or name in layers}
    if not found:
        raise QueryError(
            f"no attention layer was seen in this {type(model).__name__}: neither one of dualform.attention, nor "
            "nn.MultiheadAttention, nor a module that calls torch's scaled_dot_product_attention (as those of Hugging "
            "Face do with attn_implementation='sdpa')."
        )
    return found


def _fitting(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the types of a model that has all of them, by name and shape."""
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
    """The attention layers that a model uses for some inputs, by name."""
    with outside_inference_mode(), torch.no_grad(), _watching(shadow := shadow_of(model)) as seen:
        run_model(shadow, inputs)
    return list(seen)


def _number(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise QueryError("loss= takes the model's output and gives one number that depends on it, as a tensor.")
    return loss


# ------------------------------------------------------------------------------------------- watching


@dataclass
class AttentionCall:
    """One call of an attention layer: its arguments or, at the fused kernel, the kernel's; its output's gradient."""

    layer: nn.Module
    given: Mapping[str, Any]
    inside: Sequence[InnerLinear] = ()
    gradient: Tensor | None = None

    def sights(self, name: str) -> list[HeadInputs]:
        """What its heads saw; ``name`` is that of the layer in its model."""
        if isinstance(self.layer, Heads):
            return of_ours(self.layer, name, self.given, self.gradient)
        if isinstance(self.layer, nn.MultiheadAttention):
            return of_torch(self.layer, name, self.given, self.gradient)
        return of_fused(self.layer, self.given, self.inside, self.gradient)


def _noted(calls: dict[str, AttentionCall], name: str, call: AttentionCall, output: Tensor) -> None:
    """Keep a call, and what arrives at its output on the way back."""
    calls[name] = call
    if output.requires_grad:
        output.register_hook(lambda gradient: setattr(call, "gradient", gradient))


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, AttentionCall]]:
    """The calls of all attention layers of a shadow, as they come."""
    calls: dict[str, AttentionCall] = {}
    running: list[_Running] = []
    for name, module in model.named_modules():
        if isinstance(module, Heads | nn.MultiheadAttention):
            module.register_forward_hook(partial(_asked, calls, name), with_kwargs=True)
        module.register_forward_pre_hook(partial(_begin, running, name))
        module.register_forward_hook(partial(_end, running), always_call=True)
    with _Kernel(calls, running):
        yield calls


@dataclass
class _Running:
    """A module that is being called, and the linear layers right inside it that were."""

    name: str
    module: nn.Module
    inside: list[InnerLinear] = field(default_factory=list)


def _asked(
    calls: dict[str, AttentionCall], name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any
) -> None:
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    _noted(calls, name, AttentionCall(module, _kept(given)), output[0] if isinstance(output, tuple) else output)


def _begin(running: list[_Running], name: str, module: nn.Module, args: tuple) -> None:
    running.append(_Running(name, module))


def _end(running: list[_Running], module: nn.Module, args: tuple, output: Any) -> None:
    done = running.pop()
    if running and isinstance(output, Tensor) and args and InnerLinear.fits(module):
        running[-1].inside.append(InnerLinear(done.name, module, args[0].detach().clone(), output.detach().clone()))


def _kept(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they are now: the model may go on to change them in place. What is the same stays the same."""
    copies = {id(each): each.detach().clone() for each in given.values() if isinstance(each, Tensor)}
    return {name: copies.get(id(each), each) for name, each in given.items()}


class _Kernel(TorchFunctionMode):
    """Sees the calls of torch's fused attention by modules that cannot be asked themselves."""

    def __init__(self, calls: dict[str, AttentionCall], running: list[_Running]) -> None:
        super().__init__()
        self.calls, self.running = calls, running

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        known = any(isinstance(each.module, Heads | nn.MultiheadAttention) for each in self.running)
        if func is F.scaled_dot_product_attention and self.running and not known:
            given: dict[str, Any] = {**dict(zip(ARGUMENTS, args, strict=False)), **(kwargs or {})}
            now = self.running[-1]
            _noted(self.calls, now.name, AttentionCall(now.module, _kept(given), tuple(now.inside)), output)
        return output


ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
