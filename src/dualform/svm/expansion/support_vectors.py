r"""Which tokens carry an attention layer: its support vectors, head by head.

A head is a support vector expansion over the tokens that it sees, with dual variables θ_j = v_j h(k_j), where
h(k_j) = Σ_i Φ(k_j)ᵀΦ(k_i). Three numbers say what a token (or a window of pooled tokens) is worth:

- its dual weight ‖θ_j‖: how hard it pulls at the regression (kept as a logarithm, since h overflows);
- its mass: the attention weight it gets, mean over the queries. The masses of a head sum to 1;
- what it adds: α_ij v_j, mean over the queries or of one query. These parts sum to the head's output.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dualform.attention import Expansion, Heads, Padding
from dualform.errors import QueryError, require

from .expansion import log_normaliser

By = Literal["mass", "dual", "adds"]


class SupportVector(NamedTuple):
    """One token, or window of tokens, of one head. ``log_dual`` is log ‖θ‖, ``adds`` in the layer's output."""

    example: int
    head: int
    first: int
    last: int
    mass: float
    log_dual: float
    adds: float

    def __str__(self) -> str:
        tokens = f"token {self.first} carries" if self.first == self.last else f"tokens {self.first}–{self.last} carry"
        share, dual = f"{100 * self.mass:.0f} %", power(self.log_dual)
        return f"head {self.head}: {tokens} {share} (dual weight {dual}, adds {self.adds:.3g})"


@dataclass(frozen=True)
class Support:
    """The support vectors of a layer, one line a token (or window) and head of each example.

    ``parts`` is what each adds to its head's output, ``adds`` how far that moves the layer's output: the norm behind
    the last projection. Both are means over the queries, or of the one query ``for_query``.
    """

    for_query: int | None
    example: Int[Tensor, " r"]
    head: Int[Tensor, " r"]
    first: Int[Tensor, " r"]
    last: Int[Tensor, " r"]
    mass: Float[Tensor, " r"]
    log_dual: Float[Tensor, " r"]
    adds: Float[Tensor, " r"]
    parts: Float[Tensor, "r e"]

    def __len__(self) -> int:
        return len(self.head)

    def __iter__(self) -> Iterator[SupportVector]:
        """One line after the other."""
        columns = (getattr(self, name).tolist() for name in SupportVector._fields)
        return (SupportVector(*line) for line in zip(*columns, strict=True))

    def of(self, *, head: int | None = None, example: int | None = None) -> "Support":
        """The lines of one head, of one example, or both."""
        wanted = torch.ones_like(self.head, dtype=torch.bool)
        for name, value in (("head", head), ("example", example)):
            column = getattr(self, name)
            if value is not None and not bool((column == value).any()):
                raise QueryError(f"no {name} {value} is in this answer: there are {column.unique().tolist()}.")
            wanted &= wanted if value is None else column == value
        return self._only(wanted.nonzero().squeeze(1))

    def top(self, k: int, by: By = "mass") -> "Support":
        """The k largest lines of each head and example, largest first: by mass, dual weight or what they add."""
        if k < 1 or by not in ("mass", "dual", "adds"):
            raise QueryError(f"top({k}, by={by!r}): k is 1 or more, and by is 'mass', 'dual' or 'adds'.")
        scores = self.log_dual if by == "dual" else getattr(self, by)
        order = scores.argsort(descending=True, stable=True)
        keys = torch.stack([self.example, self.head], 1)[order]
        _, group, counts = keys.unique(dim=0, return_inverse=True, return_counts=True)
        sorting = group.argsort(stable=True)
        rank = torch.cat([torch.arange(count) for count in counts.tolist()]) if len(keys) else sorting
        return self._only(order[sorting[rank < k]])

    def __str__(self) -> str:
        many = len(self.example.unique()) > 1
        return "\n".join(f"example {line.example}, {line}" if many else str(line) for line in self)

    def to_pandas(self) -> Any:
        """One line a support vector."""
        pd = require("pandas", "pandas")
        return pd.DataFrame({name: getattr(self, name).numpy() for name in SupportVector._fields})

    def _only(self, lines: Int[Tensor, " l"]) -> "Support":
        tensors = {each.name: getattr(self, each.name)[lines] for each in fields(self) if each.name != "for_query"}
        return replace(self, **tensors)


@torch.no_grad()
def support_vectors(
    layer: nn.Module, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *,
    padding: Padding = None, causal: bool = False, for_query: int | None = None,
) -> Support:  # fmt: skip
    """The tokens that carry a layer's output, for all queries or for one. Padded tokens have no line."""
    heads, n = askable(layer, x, context), x.shape[1]
    if for_query is not None and not -n <= for_query < n:
        raise QueryError(f"query {for_query} is not there: the sequence has {n} tokens, counted from 0.")
    asked = torch.ones(x.shape[:2], dtype=torch.float64, device=x.device)
    if for_query is not None:
        asked = torch.zeros_like(asked)
        asked[:, for_query] = 1
    elif context is None and padding is not None:
        asked = (~padding).to(asked.dtype)
    asked = asked / asked.sum(1, keepdim=True).clamp(min=1)
    found = [
        _support(heads, each, asked, for_query)
        for each in heads.expansions(x, context, padding=padding, causal=causal)
    ]  # fmt: skip
    whole = {name: torch.cat([getattr(each, name) for each in found]) for name in (*SupportVector._fields, "parts")}
    support = Support(for_query, **whole)
    return support._only((support.example * heads.heads + support.head).argsort(stable=True))


def askable(layer: nn.Module, x: Tensor, context: Tensor | None) -> Heads:
    """The layer, if it knows its expansions and is asked about numbers."""
    if not hasattr(layer, "expansions"):
        raise QueryError(f"a {type(layer).__name__} has no expansions: give a layer of dualform.attention.")
    if not all(bool(each.isfinite().all()) for each in (x, context) if each is not None):
        raise QueryError("the sequence holds NaN or infinity.")
    return cast(Heads, layer)


def _support(layer: Heads, each: Expansion, asked: Float[Tensor, "b n"], for_query: int | None) -> Support:
    """The lines of some heads that see the same pairs."""
    values, first, last = each.values.double(), each.pairs.first, each.pairs.last
    b, h, m, _ = values.shape
    mass = torch.einsum("bhnm,bn->bhm", each.weights().double(), asked)
    parts = mass.unsqueeze(-1) * values
    out = torch.stack([layer.out.weight[:, i * layer.size : (i + 1) * layer.size] for i in each.heads]).double()
    adds = torch.einsum("hDe,bhme->bhmD", out, parts).norm(dim=-1)
    seen = torch.ones(b, h, each.queries.shape[-2], m, dtype=torch.bool, device=values.device)
    seen = (seen if each.hidden is None else seen & ~each.hidden) & (asked > 0)[:, None, :, None]
    log_dual = _log_normaliser(each, seen) + values.norm(dim=-1).log()
    example, head, window = (index.flatten() for index in torch.meshgrid(
        torch.arange(b), torch.tensor(each.heads), torch.arange(m), indexing="ij"
    ))  # fmt: skip
    lines = [tensor.flatten().cpu() for tensor in (mass, log_dual, adds)]
    made = Support(for_query, example, head, first[window], last[window], *lines, parts=parts.flatten(0, 2).cpu())
    return made._only(seen.any(2).flatten().cpu().nonzero().squeeze(1))


def _log_normaliser(each: Expansion, seen: Bool[Tensor, "b h n m"]) -> Float[Tensor, "b h m"]:
    """log h(k_j) over the keys that are there. Where each query has keys of its own, the mean of its h."""
    keys = each.inputs.double()
    if keys.ndim == 4:
        return log_normaliser(keys, keys, each.kernel, ~seen.any(2, keepdim=True))
    found = [
        log_normaliser(own, own, each.kernel, ~there.unsqueeze(2)).masked_fill(~there, -math.inf)
        for own, there in zip(keys.unbind(2), seen.unbind(2), strict=True)
    ]
    return torch.stack(found).logsumexp(0) - seen.sum(2).clamp(min=1).log()


def power(log: float) -> str:
    """A number of which the logarithm is known, however large it is."""
    if not math.isfinite(log) or abs(log) < 7:
        return f"{math.exp(log):.3g}"
    exponent = math.floor(log / math.log(10))
    return f"{math.exp(log - exponent * math.log(10)):.1f}e{exponent:+03d}"
