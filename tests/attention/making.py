"""Layers and tokens for the tests of attention."""

from typing import Any

import torch
from torch import Tensor

from dualform.attention import GroupedQueryAttention, ScaledHeadAttention, build
from dualform.attention.allocation import repeat_for_query_heads


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(name: str, width: int = 12, heads: int = 4, **options) -> Any:
    """In evaluation where training has noise, or passes that count."""
    torch.manual_seed(0)
    return build(name, width, heads, **options).double().train(name not in ("dgqa", "pgqa"))


def named_by_timm(plain: Any) -> dict[str, Tensor]:
    """The weights of a softmax layer under the names of timm, without the bias of queries, keys and values."""
    fused = torch.cat([plain.query.weight, plain.key.weight, plain.value.weight])
    return {"qkv.weight": fused, "proj.weight": plain.out.weight, "proj.bias": plain.out.bias}


def ordered(name: str, width: int = 12, heads: int = 4, **options) -> Any:
    """The same, fit to be causal."""
    return layer(name, width, heads, **({"one_sided": True} if name.startswith("conv1d") else {}), **options)


def orders(name: str) -> tuple[bool, ...]:
    """Causal or not: an allocation of all tokens has no order, nor has a grid."""
    return (False,) if name == "kdgqa" or name.startswith("conv2d") else (False, True)


def steady(name: str, causal: bool = False) -> Any:
    """The same, with a pattern that does not follow the length of the sequence."""
    return (ordered if causal else layer)(name, **({"window": 2, "stride": 3} if "sparse" in name else {}))


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def values(made: Any, x: Tensor, causal: bool = False, padding: Tensor | None = None) -> Tensor:
    """The values of all tokens, unpooled, head by head; zero where a token is not there."""
    if isinstance(made, GroupedQueryAttention):
        found = made.value(x).unflatten(-1, (made.kv_heads, -1)).transpose(1, 2)
        found = repeat_for_query_heads(found, made.allocate(x, padding=padding), made.heads).transpose(1, 2).flatten(2)
    elif isinstance(made, ScaledHeadAttention):
        found = torch.cat([each(x) for each in made.value.values()], -1)
    else:
        found = made.projected(x, x, padding, causal)[2]
    found = found if padding is None else found.masked_fill(padding.unsqueeze(-1), 0.0)
    return found.unflatten(-1, (made.heads, -1)).transpose(1, 2)
