"""Attention: what the heads of a layer select from an input, and which training examples its projections recall."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dualform.errors import QueryError
from dualform.svm.expansion import By

from ...examples import ShownExample
from ..explorer import ExampleHeader, ExamplePlace, Explorer, visible
from ..prediction import PredictionQuestion, PredictionView, predict
from ..work import PendingWork
from .allocation import AllocationView, allocation
from .heads import SeenCall, attention_layers, call_of_layer
from .support import SupportTokens, support_tokens

MOST = 256
"""The most tokens whose attention a page can show."""

RECALLED, MOST_WORDS = 6, 24
"""Training examples shown, and the most characters shown of a window of text."""


@dataclass(frozen=True)
class AttentionQuestion:
    """The controls of the page: layer, head (None for the mean of all), query token, and the order of support tokens.

    If ``token`` is None the explorer chooses: the class token if there is one, the last token if attention is causal,
    else all tokens.
    """

    layer: str | None = None
    head: int | None = None
    token: int | Literal["all"] | None = None
    recalled: str | None = None
    by: By = "adds"
    call: int | None = None
    """Which call, if a layer is called more than once in a forward pass; None for the last."""


@dataclass(frozen=True)
class AttentionView(ExampleHeader):
    """Everything the page shows. ``weights`` is (query, key) of the chosen head; each row sums to 1."""

    layers: list[str]
    looking: AttentionQuestion
    calls: list[str]
    """A description of each call of the layer; a tuned backbone calls it for its tokens and for its query tokens."""
    heads: int
    weights: list[list[float]]
    looks: list[float]
    """The attention weights of the chosen query, or their mean over all queries."""
    tokens: list[str]
    """The names of the keys."""
    queries: list[str]
    """The names of the queries."""
    itself: bool
    """Whether the queries are the keys (self-attention)."""
    patches: int
    """The side of the grid of patches for a picture, else 0."""
    support: SupportTokens | None
    """The tokens that carry the output of the heads; None if the layer has no known support vector expansion."""
    allocation: AllocationView | None
    """Which query heads share keys and values; None if each head has its own."""
    projections: list[str]
    """The recorded layers inside this one."""
    recalled: PredictionView | PendingWork | None


def attention(explorer: Explorer, place: ExamplePlace, looking: AttentionQuestion) -> AttentionView:
    """What the heads of a layer select from an example, and which training examples its projections recall."""
    explorer.need(place)
    layer = _layer(explorer, looking.layer)
    with explorer.lock:
        module = attention_layers(explorer.model)[layer]
        seen_call = call_of_layer(explorer.model, module, explorer.memory, explorer.input(place), looking.call)
    count, n, m = seen_call.weights.shape
    if max(n, m) > MOST:
        raise QueryError(f"attention over {max(n, m)} tokens is more than a page can show ({MOST}).")
    shown, head = explorer.shown(place), looking.head
    side = side_of(m) if shown.kind == "image" else 0
    itself = seen_call.context is None
    token = _token(looking.token, seen_call, itself and m > side * side > 0)
    if (head is not None and not 0 <= head < count) or not (token == "all" or -n <= token < n):
        raise QueryError(f"there is no head {head} with token {token}: there are {count} heads and {n} tokens.")
    token = token if token == "all" else token % n
    names = TokenNames(shown, m, side)
    weights = seen_call.weights.mean(0) if head is None else seen_call.weights[head]
    recalled, inside = _recalled(explorer, layer, looking.recalled)
    return AttentionView(
        **explorer.about(place),
        layers=list(attention_layers(explorer.model)),
        looking=AttentionQuestion(layer, head, token, recalled, looking.by, seen_call.call),
        calls=list(seen_call.calls),
        heads=count,
        weights=weights.tolist(),
        looks=(weights[seen_call.present_queries].mean(0) if token == "all" else weights[token]).tolist(),
        tokens=[names.key(i) for i in range(m)],
        queries=[names([i]) if itself else f"query token {i}" for i in range(n)],
        itself=itself,
        patches=side,
        support=_support(seen_call, head, token, looking.by, names),
        allocation=allocation(explorer, layer, place, seen_call),
        projections=inside,
        recalled=None if recalled is None else predict(explorer, place, _question(explorer, recalled)),
    )


@dataclass(frozen=True)
class TokenNames:
    """Names of tokens: patches by their place, time steps by their number, words by their text."""

    shown: ShownExample
    count: int
    side: int

    def __call__(self, tokens: Sequence[int]) -> str:
        """The name of one token, or of a window of tokens."""
        first, last = tokens[0], tokens[-1]
        numbers = f"{first}–{last}" if last > first else str(first)
        if self.side:
            return self._patch(tokens)
        if self._steps:
            return f"t = {numbers}"
        words = visible("".join(self.shown.tokens[first : last + 1])) if self._words else ""
        words = words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]}…"
        return f"token{'s' if last > first else ''} {numbers}" + (f" ‘{words}’" if words else "")

    def key(self, token: int) -> str:
        """The text of a token in the input, or its name if the input is not text."""
        return self.shown.tokens[token] if self._words else self([token])

    @property
    def _steps(self) -> bool:
        return self.shown.lines is not None and self.shown.lines.steps == self.count

    @property
    def _words(self) -> bool:
        return len(self.shown.tokens) == self.count

    def _patch(self, tokens: Sequence[int]) -> str:
        before = self.count - self.side * self.side
        if tokens[0] < before:
            return "the class token"
        row, column = divmod(tokens[0] - before, self.side)
        place = f"row {row + 1}, column {column + 1}"
        return place if len(tokens) == 1 else f"{len(tokens)} patches from {place}"


def _layer(explorer: Explorer, name: str | None) -> str:
    layers = list(attention_layers(explorer.model))
    if not layers:
        raise QueryError(
            "this network has no attention layer, neither from dualform.attention nor nn.MultiheadAttention."
        )
    if name is not None and name not in layers:
        raise QueryError(f"there is no attention layer '{name}': there are {layers}.")
    return name or layers[-1]


def _token(token: int | Literal["all"] | None, seen_call: SeenCall, class_token: bool) -> int | Literal["all"]:
    if token is not None:
        return token
    return 0 if class_token else -1 if seen_call.causal else "all"


def _support(
    seen_call: SeenCall, head: int | None, token: int | Literal["all"], by: By, names: TokenNames
) -> SupportTokens | None:
    support = seen_call.support(None if token == "all" else token)
    return (
        None
        if support is None or seen_call.layer is None
        else support_tokens(seen_call.layer, support, head, by, names.count, names)
    )


def _recalled(explorer: Explorer, layer: str, wanted: str | None) -> tuple[str | None, list[str]]:
    """The projection to ask for training examples, by default the one that merges the heads, and all candidates.

    If no projection of the layer was recorded, as in a frozen backbone, the last recorded layer is asked.
    """
    inside = [name for name in explorer.layers if name == layer or name.startswith(f"{layer}.")]
    inside = inside or list(explorer.layers)[-1:]
    if wanted is not None and wanted not in inside:
        raise QueryError(f"'{wanted}' is not recorded inside '{layer}': there are {inside}.")
    merging = [name for name in inside if name.endswith((".out", ".out_proj"))]
    return wanted or next(iter([*merging, *reversed(inside)]), None), inside


def _question(explorer: Explorer, layer: str) -> PredictionQuestion:
    """The question about what a projection recalls."""
    return PredictionQuestion(layer=layer, k=RECALLED)


def side_of(count: int) -> int:
    """The side of a square grid of patches, with or without a class token before it; 0 if the count is no square."""
    for cells in (count, count - 1):
        side = round(cells**0.5)
        if side > 1 and side * side == cells:
            return side
    return 0
