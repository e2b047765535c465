"""One call of an attention layer: what its heads weigh, and the tokens that carry them."""

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
"""How far the weights of torch's attention may be from those of ours that stands for it."""


@dataclass(frozen=True)
class SeenCall:
    """One call of an attention layer in a forward pass.

    ``layer`` is the layer with the weights of that pass; None for one of torch that ours cannot stand for. ``calls``
    says what each call in the pass was, ``call`` which of them this is.
    """

    weights: Float[Tensor, "H k l"]
    """Between tokens up to the last one that is not padded; lines sum to 1."""
    layer: Heads | None
    x: Float[Tensor, "1 n D"]
    context: Float[Tensor, "1 m D"] | None = None
    padding: Bool[Tensor, "1 _"] | None = None
    causal: bool = False
    calls: tuple[str, ...] = ()
    call: int = 0

    @property
    def asked(self) -> Bool[Tensor, " k"]:
        """Which queries are tokens that are there."""
        count = self.weights.shape[1]
        if self.padding is None or self.context is not None:
            return torch.ones(count, dtype=torch.bool)
        return ~self.padding[0, :count].cpu()

    def support(self, query: int | None) -> Support | None:
        """The tokens that carry the layer for one query, or for all of them on average."""
        if self.layer is None:
            return None
        given = {"padding": self.padding, "causal": self.causal}
        return support_vectors(self.layer, self.x, self.context, **given, for_query=query)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose heads can be seen."""
    return {name: each for name, each in model.named_modules() if isinstance(each, Heads | nn.MultiheadAttention)}


def see(model: nn.Module, layer: nn.Module, memory: Memory, x: Any, call: int | None = None) -> SeenCall:
    """A call of a layer, by default the last, in one forward pass with the memory's weights."""
    calls: list[tuple[Mapping[str, Any], Any]] = []

    def note(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls.append((inspect.signature(module.forward).bind(*args, **kwargs).arguments, output))

    with (
        outside_inference_mode(),
        torch.enable_grad(),
    ):  # without gradients torch's encoder passes its attention layers by
        shadow = shadow_of(model, memory.weights_for(model), differentiable=True)
        twin = shadow.get_submodule(next(name for name, each in model.named_modules() if each is layer))
        twin.register_forward_hook(note, with_kwargs=True)
        if isinstance(twin, nn.MultiheadAttention):
            twin.register_forward_pre_hook(_ask_for_weights, with_kwargs=True)
        run_model(shadow, x)
    if not calls:
        raise QueryError("this attention layer was not used in the forward pass.")
    call = len(calls) - 1 if call is None else call
    if not 0 <= call < len(calls):
        times = "once" if len(calls) == 1 else f"{len(calls)} times"
        raise QueryError(f"call {call} of this attention layer is not there: it was called {times}.")
    with torch.no_grad():
        given, output = calls[call]
        of_torch = isinstance(twin, nn.MultiheadAttention)
        seen = _of_torch(twin, given, output) if of_torch else _of_ours(twin, given)
    return replace(seen, calls=tuple(_told(layer, each) for each, _ in calls), call=call)


def _told(layer: nn.Module, given: Mapping[str, Any]) -> str:
    """What a call was: which tokens asked which."""
    asking = given["query"] if "query" in given else given["x"]
    other = given.get("key", given.get("context"))
    other = asking if other is None else other
    first = getattr(layer, "batch_first", True)
    asked, others = (_first(each, first).shape[1] for each in (asking, other))
    tokens, those = f"{asked} token{'s' * (asked != 1)}", f"{others} other{'s' * (others != 1)}"
    return f"{tokens}, {'themselves' if other is asking else those}"


def _of_ours(layer: nn.Module, given: Mapping[str, Any]) -> SeenCall:
    """Of the first example of a batch."""
    heads = cast(Heads, copy.deepcopy(layer).eval())
    x, context, padding = (None if (each := given.get(name)) is None else each[:1].detach() for name in NAMES)
    assert x is not None
    causal = given.get("causal", False)
    weights = heads.weights(x, context, padding=padding, causal=causal)[0]
    return SeenCall(_there(weights, context, padding), heads, x, context, padding, causal)


NAMES = ("x", "context", "padding")


def _of_torch(layer: nn.MultiheadAttention, given: Mapping[str, Any], output: Any) -> SeenCall:
    """What torch's own attention says, and ours in its place if it says the same."""
    weights = torch.nan_to_num(output[1] if output[1].ndim == 3 else output[1][0]).detach()
    query, key, value = (given[name] for name in ("query", "key", "value"))
    x, other = (_first(each.detach(), layer.batch_first) for each in (query, key))
    context, padding = None if key is query else other, given.get("key_padding_mask")
    padding = None if padding is None or padding.dtype != torch.bool else padding.reshape(-1, padding.shape[-1])[:1]
    causal = given.get("attn_mask") is not None or given.get("is_causal", False)
    heads = _twin(layer) if value is key and (not causal or x.shape[1] == other.shape[1]) else None
    if heads is not None:
        same = heads.weights(x, context, padding=padding, causal=causal)[0]
        heads = heads if torch.allclose(same, weights, atol=AGREE, rtol=0) else None
    return SeenCall(_there(weights, context, padding), heads, x, context, padding, causal)


def _twin(layer: nn.MultiheadAttention) -> Heads | None:
    """Our softmax attention with the weights of torch's, where it has nothing beside them."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        return None
    made = build("softmax", layer.embed_dim, layer.num_heads, bias=layer.in_proj_bias is not None)
    return cast(Heads, load_from(made.to(layer.in_proj_weight), layer).eval())


def _there(weights: Float[Tensor, "H n m"], context: Tensor | None, padding: Tensor | None) -> Float[Tensor, "H k l"]:
    """The weights between tokens up to the last one that is there."""
    if padding is None or bool(padding.all()):
        return weights.double().cpu()
    last = int((~padding[0]).nonzero()[-1]) + 1
    return (weights[:, :last, :last] if context is None else weights[:, :, :last]).double().cpu()


def _first(x: Float[Tensor, "..."], batch_first: bool) -> Float[Tensor, "1 n D"]:
    """The first sequence of a batch, wherever its axis is."""
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x[:1] if batch_first else x[:, :1].transpose(0, 1)


def _ask_for_weights(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Let torch's attention tell its weights, head by head."""
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    named = dict(zip(names, args[3:], strict=False))
    return args[:3], {**named, **kwargs, "need_weights": True, "average_attn_weights": False}
