"""Every member against the specification, written out token by token: nothing here is shared with the library."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import close, layer, random
from torch import Tensor

from dualform.attention import ConvAttention, ScaledHeadAttention

NAMES = ["softmax", "bn", "sh", "bn+sh", "linear", "linear-bn", "linear-sh", "linear-bn+sh", "sparse", "sparse-bn",
         "sparse-sh", "sparse-bn+sh"]  # fmt: skip


def phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def projections(made: Any, head: int) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of the query, key and value of one head."""
    size, found = made.size, []
    for part in (made.query, made.key, made.value):
        at = head
        if isinstance(made, ScaledHeadAttention) and part is not made.query:
            scale = made.scales[head]
            at, part = list(made.scales[:head]).count(scale), part[str(scale)]
        found.append((part.weight[at * size : (at + 1) * size], part.bias[at * size : (at + 1) * size]))
    return found


def written_out(
    made: Any, name: str, x: Tensor, context: Tensor, gone: Tensor, causal: bool, options: dict[str, Any]
) -> Tensor:
    """One query of one head after the other."""
    out = torch.zeros(len(x), made.heads, x.shape[1], made.size, dtype=x.dtype)
    m, first = context.shape[1], options.get("class_tokens", 0)
    root = math.ceil(math.sqrt(m))
    window, stride = options.get("window", root), options.get("stride", root)
    for b in range(len(x)):
        for head in range(made.heads):
            q, k, v = (
                tokens @ w.T + c
                for (w, c), tokens in zip(projections(made, head), (x[b], context[b], context[b]), strict=True)
            )
            scale = made.scales[head] if isinstance(made, ScaledHeadAttention) else 1
            windows = [[j] for j in range(first)] + [list(range(j, min(j + scale, m))) for j in range(first, m, scale)]
            pairs = []
            for each in windows:
                there = [j for j in each if not gone[b, j]]
                there = there[:1] if options.get("pool") == "stride" else there
                if there:
                    pairs.append((k[there].mean(0), v[there].mean(0), each, each[0] + scale - 1))
            for i in range(x.shape[1]):
                seen = [(key, value, each) for key, value, each, end in pairs if not causal or end <= i]
                if causal and scale > 1:
                    seen.append((k[i], v[i], [i]))
                near = [any(abs(i - j) <= window or (j + 1) % stride == 0 for j in each) for _, _, each in seen]
                mine = (
                    [pair for pair, close_by in zip(seen, near, strict=True) if close_by] if "sparse" in name else seen
                )
                if mine:
                    out[b, head, i] = one(name, q[i], seen, mine, head, made, options)
    return out


def one(name: str, q: Tensor, seen: list, mine: list, head: int, made: Any, options: dict[str, Any]) -> Tensor:
    """What one query of one head gets."""
    keys, values = torch.stack([key for key, _, _ in mine]), torch.stack([value for _, value, _ in mine])
    if "bn" in name:
        of = mine if options.get("stats") == "subset" else seen
        measured = torch.stack([key for key, _, _ in of])
        mean, variance = measured.mean(0), measured.var(0, correction=0)
        beta = made.norm.beta[head, 0] if isinstance(made.norm.beta, Tensor) else options.get("beta", 1.0)
        scale = (variance + options.get("eps", 1e-5)).rsqrt() if options.get("use_var", True) else 1.0
        q, keys = (q - beta * mean) * scale, (keys - beta * mean) * scale
    if "linear" in name:
        weights = phi(keys) @ phi(q)
        return weights / weights.sum() @ values
    return (keys @ q / math.sqrt(len(q))).softmax(0) @ values


@st.composite
def configurations(draw, name: str):
    options: dict[str, Any] = {}
    if "bn" in name:
        options |= {"beta": draw(st.sampled_from([0.0, 0.4, 1.0])), "eps": draw(st.sampled_from([1e-5, 0.1]))}
        options["use_var"] = draw(st.booleans())
        if "sh" not in name:
            options["learnable_beta"] = draw(st.booleans())
    if "sh" in name:
        options["pool"] = draw(st.sampled_from(["avg", "stride"]))
        options["scales"] = draw(st.sampled_from([[1, 2, 4, 8], [2, 1, 3, 2], [5, 5, 1, 9]]))
    if "sparse" in name and draw(st.booleans()):
        options |= {"window": draw(st.integers(0, 5)), "stride": draw(st.integers(1, 9))}
    if name.startswith("sparse-bn"):
        options["stats"] = draw(st.sampled_from(["all", "subset"]))
    return options


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), n=st.integers(1, 12), m=st.integers(1, 12), seed=st.integers(0, 999))
def test_every_member_is_what_the_specification_says(name, data, n, m, seed):
    """Causal or not, to itself or to others, with any padding: on either side, in holes, or of everything."""
    options, kind = data.draw(configurations(name)), data.draw(st.sampled_from(["causal", "self", "cross"]))
    if "sh" in name and kind != "causal":
        options["class_tokens"] = data.draw(st.integers(0, min(2, n, m)))
    made = layer(name, **options)
    if options.get("learnable_beta"):
        torch.nn.init.normal_(made.norm.beta)
    x = random(2, n, 12, seed=seed)
    context = random(2, m, 12, seed=seed + 1) if kind == "cross" else x
    gone = torch.rand(context.shape[:2], generator=torch.Generator().manual_seed(seed)) < data.draw(
        st.sampled_from([0.0, 0.3, 0.8])
    )
    found = made.head_outputs(x, context if kind == "cross" else None, padding=gone, causal=kind == "causal")
    expected = written_out(made, name, x, context, gone, kind == "causal", options)
    valid = torch.ones(2, n, dtype=torch.bool) if kind == "cross" else ~gone
    found, expected = found.transpose(1, 2)[valid], expected.transpose(1, 2)[valid]
    known = expected.isfinite()  # where all of a key's features underflow, the specification divides zero by zero
    assert bool(found.isfinite().all())
    close(found[known], expected[known], 1e-7)  # variances near zero are divided by


@pytest.mark.parametrize("apply_to", ["qk", "k", "qkv"])
@given(
    n=st.integers(1, 9), side=st.sampled_from([1, 3, 5]), one_sided=st.booleans(), causal=st.booleans(),
    first=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_convolutions_are_sums_over_neighbours_that_are_there(apply_to, n, side, one_sided, causal, first, seed):
    """Of sequences, with any kernel, padding and class tokens."""
    causal, first = causal and one_sided, 0 if causal else min(first, n)
    made = layer("conv1d", kernel=side, one_sided=one_sided, apply_to=apply_to, class_tokens=first)
    assert isinstance(made, ConvAttention)
    for each in (made.conv, made.value_conv):
        if each is not None:
            torch.nn.init.normal_(each.weight)
    x = random(2, n, 12, seed=seed)
    gone = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.3
    parts = []
    for part, conv in ((made.query, made.conv), (made.key, made.conv), (made.value, made.value_conv)):
        before = part(x)
        if conv is not None and not (apply_to == "k" and part is made.query):
            before = before.masked_fill(gone.unsqueeze(-1), 0.0)
            after = before.clone()
            for i in range(first, n):
                reach = [(i + t - (side - 1 if one_sided else side // 2), t) for t in range(side)]
                after[:, i] = sum(before[:, j] * conv.weight[:, 0, t] for j, t in reach if first <= j < n)
            before = after
        parts.append(before.unflatten(-1, (4, 3)).transpose(1, 2))
    q, k, v = parts
    logits = (q @ k.mT / math.sqrt(3)).masked_fill(gone[:, None, None], -torch.inf)
    if causal:
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    expected = logits.softmax(-1).nan_to_num() @ v.masked_fill(gone[:, None, :, None], 0.0)
    found = made.head_outputs(x, padding=gone, causal=causal)
    close(found.transpose(1, 2)[~gone], expected.transpose(1, 2)[~gone])
