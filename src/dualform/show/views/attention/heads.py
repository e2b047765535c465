"""One call of an attention layer: its attention weights, and the tokens that carry its output."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dualform.attention import Heads, build, load_from
from dualform.errors import QueryError
from dualform.explain import Memory
from dualform.explain.query import run_model, shadow_of
from dualform.store import outside_inference_mode
from dualform.svm import Support, support_vectors

AGREE = 1e-4
"""The largest difference between the weights of torch's attention and of our layer that stands in for it."""


@dataclass(frozen=True)
class SeenCall:
    """One call of an attention layer in a forward pass.

    ``layer`` is the layer with the weights of that pass; None for a layer of torch that none of ours can replace.
    ``calls`` describes all calls of the layer in the pass, ``call`` is the number of this one.
    """

    weights: Float[Tensor, "H k l"]
    """Attention weights between tokens, up to the last token that is not padding; each row sums to 1."""
    layer: Heads | None
    x: Float[Tensor, "1 n D"]
    context: Float[Tensor, "1 m D"] | None = None
    padding: Bool[Tensor, "1 _"] | None = None
    causal: bool = False
    calls: tuple[str, ...] = ()
    call: int = 0

    @property
    def present_queries(self) -> Bool[Tensor, " k"]:
        """Which queries are not padding."""
        count = self.weights.shape[1]
        if self.padding is None or self.context is not None:
            return torch.ones(count, dtype=torch.bool)
        return ~self.padding[0, :count].cpu()

    def support(self, query: int | None) -> Support | None:
        """The support tokens of the layer's output for one query, or for all queries on average."""
        if self.layer is None:
            return None
        options = {"padding": self.padding, "causal": self.causal}
        return support_vectors(self.layer, self.x, self.context, **options, for_query=query)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a network, ours and torch's, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Heads | nn.MultiheadAttention)}


def call_of_layer(model: nn.Module, layer: nn.Module, memory: Memory, x: Any, call: int | None = None) -> SeenCall:
    """One call of a layer, by default the last, in a forward pass with the memory's weights."""
    calls: list[tuple[Mapping[str, Any], Any]] = []

    def note_call(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls.append((inspect.signature(module.forward).bind(*args, **kwargs).arguments, output))

    with (
        outside_inference_mode(),
        torch.enable_grad(),
    ):  # without gradients torch's encoder passes its attention layers by
        shadow = shadow_of(model, memory.weights_for(model), differentiable=True)
        twin = shadow.get_submodule(next(name for name, module in model.named_modules() if module is layer))
        twin.register_forward_hook(note_call, with_kwargs=True)
        if isinstance(twin, nn.MultiheadAttention):
            twin.register_forward_pre_hook(_request_weights, with_kwargs=True)
        run_model(shadow, x)
    if not calls:
        raise QueryError("this attention layer was not used in the forward pass.")
    call = len(calls) - 1 if call is None else call
    if not 0 <= call < len(calls):
        times = "once" if len(calls) == 1 else f"{len(calls)} times"
        raise QueryError(f"there is no call {call} of this attention layer: it was called {times}.")
    with torch.no_grad():
        arguments, output = calls[call]
        of_torch = isinstance(twin, nn.MultiheadAttention)
        seen_call = _call_of_torch(twin, arguments, output) if of_torch else _call_of_ours(twin, arguments)
    return replace(seen_call, calls=tuple(_call_description(layer, arguments) for arguments, _ in calls), call=call)


def _call_description(layer: nn.Module, arguments: Mapping[str, Any]) -> str:
    """How many tokens attended to which tokens in a call."""
    queries = arguments["query"] if "query" in arguments else arguments["x"]
    keys = arguments.get("key", arguments.get("context"))
    keys = queries if keys is None else keys
    batch_first = getattr(layer, "batch_first", True)
    query_count, key_count = (_first_sequence(tensor, batch_first).shape[1] for tensor in (queries, keys))
    query_text, key_text = (
        f"{query_count} token{'s' * (query_count != 1)}",
        f"{key_count} other{'s' * (key_count != 1)}",
    )
    return f"{query_text}, {'themselves' if keys is queries else key_text}"


def _call_of_ours(layer: nn.Module, arguments: Mapping[str, Any]) -> SeenCall:
    """The call for the first example of the batch."""
    heads = cast(Heads, copy.deepcopy(layer).eval())
    x, context, padding = (None if (tensor := arguments.get(name)) is None else tensor[:1].detach() for name in NAMES)
    assert x is not None
    causal = arguments.get("causal", False)
    weights = heads.weights(x, context, padding=padding, causal=causal)[0]
    return SeenCall(_without_padding(weights, context, padding), heads, x, context, padding, causal)


NAMES = ("x", "context", "padding")


def _call_of_torch(layer: nn.MultiheadAttention, arguments: Mapping[str, Any], output: Any) -> SeenCall:
    """The weights of torch's own attention, with our layer in its place if both agree."""
    weights = torch.nan_to_num(output[1] if output[1].ndim == 3 else output[1][0]).detach()
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    x, keys = (_first_sequence(tensor.detach(), layer.batch_first) for tensor in (query, key))
    context, padding = None if key is query else keys, arguments.get("key_padding_mask")
    padding = None if padding is None or padding.dtype != torch.bool else padding.reshape(-1, padding.shape[-1])[:1]
    causal = arguments.get("attn_mask") is not None or arguments.get("is_causal", False)
    heads = _softmax_twin(layer) if value is key and (not causal or x.shape[1] == keys.shape[1]) else None
    if heads is not None:
        same = heads.weights(x, context, padding=padding, causal=causal)[0]
        heads = heads if torch.allclose(same, weights, atol=AGREE, rtol=0) else None
    return SeenCall(_without_padding(weights, context, padding), heads, x, context, padding, causal)


def _softmax_twin(layer: nn.MultiheadAttention) -> Heads | None:
    """Our softmax attention with the weights of torch's; None if torch's has options that ours lacks."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        return None
    twin = build("softmax", layer.embed_dim, layer.num_heads, bias=layer.in_proj_bias is not None)
    return cast(Heads, load_from(twin.to(layer.in_proj_weight), layer).eval())


def _without_padding(
    weights: Float[Tensor, "H n m"], context: Tensor | None, padding: Tensor | None
) -> Float[Tensor, "H k l"]:
    """The weights between tokens, up to the last token that is not padding."""
    if padding is None or bool(padding.all()):
        return weights.double().cpu()
    last = int((~padding[0]).nonzero()[-1]) + 1
    return (weights[:, :last, :last] if context is None else weights[:, :, :last]).double().cpu()


def _first_sequence(x: Float[Tensor, "..."], batch_first: bool) -> Float[Tensor, "1 n D"]:
    """The first sequence of a batch, wherever the batch axis is."""
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x[:1] if batch_first else x[:, :1].transpose(0, 1)


def _request_weights(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Make torch's attention return its weights, head by head."""
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    named = dict(zip(names, args[3:], strict=False))
    return args[:3], {**named, **kwargs, "need_weights": True, "average_attn_weights": False}
