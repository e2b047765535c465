"""Attention: where the heads of a layer look in an input, beside the training examples that its projections recall."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import QueryError
from dualform.explain import Memory

from .explorer import AtPlace, Explorer, Place
from .prediction import Prediction, Question, predict
from .work import Pending

MOST = 256
"""Tokens of an input whose attention can be looked at."""


@dataclass(frozen=True)
class Looking:
    """Which layer, which head (None: the mean of all), and from which token."""

    layer: str | None = None
    head: int | None = None
    token: int = -1
    recalled: str | None = None


@dataclass(frozen=True)
class Attention(AtPlace):
    """All that the page shows. ``weights`` is (token, key) of the chosen head; each line sums to 1."""

    layers: list[str]
    looking: Looking
    heads: int
    weights: list[list[float]]
    tokens: list[str]
    """What the keys stand for."""
    patches: int
    """The side of the grid of patches, for a picture; else 0."""
    projections: list[str]
    """The recorded layers inside this one."""
    recalled: Prediction | Pending | None


def attention_layers(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The layers whose heads can be seen."""
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.MultiheadAttention)}


def attention(explorer: Explorer, place: Place, looking: Looking) -> Attention:
    """Where the heads of a layer look when the network sees an example."""
    explorer.need(place)
    known = attention_layers(explorer.model)
    if not known:
        raise QueryError("this network has no attention layer (nn.MultiheadAttention) to look into.")
    layer = looking.layer or list(known)[-1]
    if layer not in known:
        raise QueryError(f"there is no attention layer '{layer}': there are {list(known)}.")
    with explorer.lock:
        heads = weights_of(explorer.model, known[layer], explorer.memory, explorer.input(place))
    count, n, m = heads.shape
    if max(n, m) > MOST:
        raise QueryError(f"attention over {max(n, m)} tokens is more than a page can show ({MOST}).")
    head, token = looking.head, looking.token
    if (head is not None and not 0 <= head < count) or not -n <= token < n:
        raise QueryError(f"there is no head {head} with token {token}: there are {count} heads and {n} tokens.")
    shown = explorer.shown(place)
    inside = [name for name in explorer.layers if name == layer or name.startswith(f"{layer}.")]
    recalled_of = looking.recalled or (inside[-1] if inside else None)
    if recalled_of is not None and recalled_of not in inside:
        raise QueryError(f"'{recalled_of}' is not recorded inside '{layer}': there are {inside}.")
    tokens = list(shown.tokens) if len(shown.tokens) == m else [str(i) for i in range(m)]
    return Attention(
        **explorer.about(place),
        layers=list(known),
        looking=Looking(layer, head, token % n, recalled_of),
        heads=count,
        weights=(heads.mean(0) if head is None else heads[head]).tolist(),
        tokens=tokens,
        patches=_side(m) if shown.kind == "image" else 0,
        projections=inside,
        recalled=None if recalled_of is None else predict(explorer, place, Question(layer=recalled_of, k=6)),
    )


def weights_of(model: nn.Module, layer: nn.MultiheadAttention, memory: Memory, x: Any) -> Float[Tensor, "H n m"]:
    """The attention of each head in one forward pass with the memory's weights."""
    seen: list[Tensor] = []

    def ask(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args[:3], {**_named(args[3:]), **kwargs, "need_weights": True, "average_attn_weights": False}

    def note(module: nn.Module, args: tuple, output: Any) -> None:
        seen.append(output[1].detach())

    handles = [layer.register_forward_pre_hook(ask, with_kwargs=True), layer.register_forward_hook(note)]
    try:
        memory.attend(model, x).prediction  # noqa: B018 # the pass is what is wanted
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise QueryError("this attention layer was not used in the forward pass.")
    return torch.nan_to_num(seen[-1][0].double())


def _named(rest: tuple) -> dict[str, Any]:
    """Arguments that were given by their place."""
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    return dict(zip(names, rest, strict=False))


def _side(count: int) -> int:
    for cells in (count, count - 1):
        side = round(cells**0.5)
        if side > 1 and side * side == cells:
            return side
    return 0
