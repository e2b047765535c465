r"""Which tokens carry an attention layer: its support vectors, head by head.

A head is a support vector expansion over the tokens that it sees, with dual variables θ_j = v_j h(k_j), where
h(k_j) = Σ_i Φ(k_j)ᵀΦ(k_i). Three numbers measure the importance of a token (or of a window of pooled tokens):

- its dual weight ‖θ_j‖: its influence on the regression (stored as a logarithm, since h overflows);
- its mass: the attention weight it gets, averaged over the queries. The masses of a head sum to 1;
- its contribution α_ij v_j, averaged over the queries or for one query. These parts sum to the head's output.
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
    """One token, or window of tokens, of one head. ``log_dual`` is log ‖θ‖, ``adds`` is as in ``Support``."""

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
    """The support vectors of a layer: one row for each example, head and token (or window).

    ``parts`` is what each adds to its head's output. ``adds`` is the norm of that part after the output projection: how
    far it moves the layer's output. Both are means over the queries, or belong to the one query ``for_query``.
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
        """Iterate over the rows."""
        columns = (getattr(self, name).tolist() for name in SupportVector._fields)
        return (SupportVector(*line) for line in zip(*columns, strict=True))

    def of(self, *, head: int | None = None, example: int | None = None) -> "Support":
        """The rows of one head, of one example, or of one head in one example."""
        wanted = torch.ones_like(self.head, dtype=torch.bool)
        for name, value in (("head", head), ("example", example)):
            column = getattr(self, name)
            if value is not None and not bool((column == value).any()):
                raise QueryError(f"this answer has no {name} {value}; it has {column.unique().tolist()}.")
            wanted &= wanted if value is None else column == value
        return self._select(wanted.nonzero().squeeze(1))

    def top(self, k: int, by: By = "mass") -> "Support":
        """The k largest rows of each head and example, largest first: by mass, dual weight or ``adds``."""
        if k < 1 or by not in ("mass", "dual", "adds"):
            raise QueryError(f"top({k}, by={by!r}): k is 1 or more, and by is 'mass', 'dual' or 'adds'.")
        scores = self.log_dual if by == "dual" else getattr(self, by)
        order = scores.argsort(descending=True, stable=True)
        keys = torch.stack([self.example, self.head], 1)[order]
        _, group, counts = keys.unique(dim=0, return_inverse=True, return_counts=True)
        sorting = group.argsort(stable=True)
        rank = torch.cat([torch.arange(count) for count in counts.tolist()]) if len(keys) else sorting
        return self._select(order[sorting[rank < k]])

    def __str__(self) -> str:
        many = len(self.example.unique()) > 1
        return "\n".join(f"example {line.example}, {line}" if many else str(line) for line in self)

    def to_pandas(self) -> Any:
        """A table with one row for each support vector."""
        pd = require("pandas", "pandas")
        return pd.DataFrame({name: getattr(self, name).numpy() for name in SupportVector._fields})

    def _select(self, lines: Int[Tensor, " l"]) -> "Support":
        tensors = {field.name: getattr(self, field.name)[lines] for field in fields(self) if field.name != "for_query"}
        return replace(self, **tensors)


@torch.no_grad()
def support_vectors(
    layer: nn.Module, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *,
    padding: Padding = None, causal: bool = False, for_query: int | None = None,
) -> Support:  # fmt: skip
    """The tokens that carry a layer's output, for all queries or for one. Padded tokens have no row."""
    heads, n = require_expansions(layer, x, context), x.shape[1]
    if for_query is not None and not -n <= for_query < n:
        raise QueryError(f"there is no query {for_query}: the sequence has {n} tokens, counted from 0.")
    query_weights = torch.ones(x.shape[:2], dtype=torch.float64, device=x.device)
    if for_query is not None:
        query_weights = torch.zeros_like(query_weights)
        query_weights[:, for_query] = 1
    elif context is None and padding is not None:
        query_weights = (~padding).to(query_weights.dtype)
    query_weights = query_weights / query_weights.sum(1, keepdim=True).clamp(min=1)
    supports = [
        _support_of_expansion(heads, expansion, query_weights, for_query)
        for expansion in heads.expansions(x, context, padding=padding, causal=causal)
    ]  # fmt: skip
    columns = {
        name: torch.cat([getattr(part, name) for part in supports]) for name in (*SupportVector._fields, "parts")
    }
    support = Support(for_query, **columns)
    return support._select((support.example * heads.heads + support.head).argsort(stable=True))


def require_expansions(layer: nn.Module, x: Tensor, context: Tensor | None) -> Heads:
    """The layer, if it offers its expansions and its inputs are finite."""
    if not hasattr(layer, "expansions"):
        raise QueryError(f"a {type(layer).__name__} has no expansions: give a layer of dualform.attention.")
    if not all(bool(tensor.isfinite().all()) for tensor in (x, context) if tensor is not None):
        raise QueryError("the sequence holds NaN or infinity.")
    return cast(Heads, layer)


def _support_of_expansion(
    layer: Heads, expansion: Expansion, query_weights: Float[Tensor, "b n"], for_query: int | None
) -> Support:
    """The rows of the heads of one expansion, which all see the same pairs."""
    values, first, last = expansion.values.double(), expansion.pairs.first, expansion.pairs.last
    b, h, m, _ = values.shape
    mass = torch.einsum("bhnm,bn->bhm", expansion.weights().double(), query_weights)
    parts = mass.unsqueeze(-1) * values
    out = torch.stack([layer.out.weight[:, i * layer.size : (i + 1) * layer.size] for i in expansion.heads]).double()
    adds = torch.einsum("hDe,bhme->bhmD", out, parts).norm(dim=-1)
    visible = torch.ones(b, h, expansion.queries.shape[-2], m, dtype=torch.bool, device=values.device)
    visible = (visible if expansion.hidden is None else visible & ~expansion.hidden) & (query_weights > 0)[
        :, None, :, None
    ]
    log_dual = _log_normaliser(expansion, visible) + values.norm(dim=-1).log()
    example, head, window = (index.flatten() for index in torch.meshgrid(
        torch.arange(b), torch.tensor(expansion.heads), torch.arange(m), indexing="ij"
    ))  # fmt: skip
    lines = [tensor.flatten().cpu() for tensor in (mass, log_dual, adds)]
    support = Support(for_query, example, head, first[window], last[window], *lines, parts=parts.flatten(0, 2).cpu())
    return support._select(visible.any(2).flatten().cpu().nonzero().squeeze(1))


def _log_normaliser(expansion: Expansion, visible: Bool[Tensor, "b h n m"]) -> Float[Tensor, "b h m"]:
    """log h(k_j) over the visible keys; the log of the mean of h where each query has keys of its own."""
    keys = expansion.inputs.double()
    if keys.ndim == 4:
        return log_normaliser(keys, keys, expansion.kernel, ~visible.any(2, keepdim=True))
    logs = [
        log_normaliser(own, own, expansion.kernel, ~present.unsqueeze(2)).masked_fill(~present, -math.inf)
        for own, present in zip(keys.unbind(2), visible.unbind(2), strict=True)
    ]
    return torch.stack(logs).logsumexp(0) - visible.sum(2).clamp(min=1).log()


def power(log: float) -> str:
    """Format the number that has the given logarithm, even where the number itself would overflow."""
    if not math.isfinite(log) or abs(log) < 7:
        return f"{math.exp(log):.3g}"
    exponent = math.floor(log / math.log(10))
    return f"{math.exp(log - exponent * math.log(10)):.1f}e{exponent:+03d}"
