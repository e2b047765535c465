"""Attention: what the heads of a layer select from an input, beside the training that its projections recall."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dualform.errors import QueryError
from dualform.svm.expansion import By

from ..examples import ShownExample
from .allocation import AllocationView, allocation
from .explorer import ExampleHeader, ExamplePlace, Explorer, visible
from .heads import SeenCall, attention_layers, see
from .prediction import PredictionQuestion, PredictionView, eachs_of, predict
from .support import SupportTokens, carried
from .work import PendingWork

MOST = 256
"""Tokens of an input whose attention can be looked at."""

RECALLED, MOST_WORDS = 6, 24
"""Training examples that are shown, and characters of a window of a text."""


@dataclass(frozen=True)
class AttentionQuestion:
    """Which layer, which head (None: the mean of all), from which token, and what makes a support token large.

    A token of None leaves the choice to the explorer: the class token if there is one, the last one of a text that is
    read from left to right, else all of them.
    """

    layer: str | None = None
    head: int | None = None
    token: int | Literal["all"] | None = None
    recalled: str | None = None
    by: By = "adds"
    call: int | None = None
    """Which call of a layer that is called more than once in a pass; None for the last."""


@dataclass(frozen=True)
class AttentionView(ExampleHeader):
    """All that the page shows. ``weights`` is (token, key) of the chosen head; each line sums to 1."""

    layers: list[str]
    looking: AttentionQuestion
    calls: list[str]
    """What each call of the layer was: query tokens of a tuned backbone ask beside the tokens themselves."""
    heads: int
    weights: list[list[float]]
    looks: list[float]
    """What the chosen token looks at; of all tokens the mean."""
    tokens: list[str]
    """What the keys stand for."""
    queries: list[str]
    """What tokens are called that one can look from."""
    itself: bool
    """Whether these are the keys."""
    patches: int
    """The side of the grid of patches, for a picture; else 0."""
    support: SupportTokens | None
    """The tokens that carry what the heads give; None where the layer is no expansion that we know."""
    allocation: AllocationView | None
    """Which query heads share which keys and values; None where each has its own."""
    projections: list[str]
    """The recorded layers inside this one."""
    recalled: PredictionView | PendingWork | None


def attention(explorer: Explorer, place: ExamplePlace, looking: AttentionQuestion) -> AttentionView:
    """What the heads of a layer select when the network sees an example, and what its projections recall."""
    explorer.need(place)
    layer = _layer(explorer, looking.layer)
    with explorer.lock:
        module = attention_layers(explorer.model)[layer]
        seen = see(explorer.model, module, explorer.memory, explorer.input(place), looking.call)
    count, n, m = seen.weights.shape
    if max(n, m) > MOST:
        raise QueryError(f"attention over {max(n, m)} tokens is more than a page can show ({MOST}).")
    shown, head = explorer.shown(place), looking.head
    side = side_of(m) if shown.kind == "image" else 0
    itself = seen.context is None
    token = _token(looking.token, seen, itself and m > side * side > 0)
    if (head is not None and not 0 <= head < count) or not (token == "all" or -n <= token < n):
        raise QueryError(f"there is no head {head} with token {token}: there are {count} heads and {n} tokens.")
    token = token if token == "all" else token % n
    names = TokenNames(shown, m, side)
    weights = seen.weights.mean(0) if head is None else seen.weights[head]
    recalled, inside = _recalled(explorer, layer, looking.recalled)
    return AttentionView(
        **explorer.about(place),
        layers=list(attention_layers(explorer.model)),
        looking=AttentionQuestion(layer, head, token, recalled, looking.by, seen.call),
        calls=list(seen.calls),
        heads=count,
        weights=weights.tolist(),
        looks=(weights[seen.asked].mean(0) if token == "all" else weights[token]).tolist(),
        tokens=[names.key(i) for i in range(m)],
        queries=[names([i]) if itself else f"query token {i}" for i in range(n)],
        itself=itself,
        patches=side,
        support=_support(seen, head, token, looking.by, names),
        allocation=allocation(explorer, layer, place, seen),
        projections=inside,
        recalled=None if recalled is None else predict(explorer, place, _question(explorer, recalled)),
    )


@dataclass(frozen=True)
class TokenNames:
    """What tokens are called: patches by their place, steps by their time, words by themselves."""

    shown: ShownExample
    count: int
    side: int

    def __call__(self, tokens: Sequence[int]) -> str:
        """The name of a token, or of a window of tokens."""
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
        """What stands in the input itself."""
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
    known = list(attention_layers(explorer.model))
    if not known:
        raise QueryError("this network has no attention layer (of dualform, or nn.MultiheadAttention) to look into.")
    if name is not None and name not in known:
        raise QueryError(f"there is no attention layer '{name}': there are {known}.")
    return name or known[-1]


def _token(token: int | Literal["all"] | None, seen: SeenCall, class_token: bool) -> int | Literal["all"]:
    if token is not None:
        return token
    return 0 if class_token else -1 if seen.causal else "all"


def _support(
    seen: SeenCall, head: int | None, token: int | Literal["all"], by: By, names: TokenNames
) -> SupportTokens | None:
    found = seen.support(None if token == "all" else token)
    return None if found is None or seen.layer is None else carried(seen.layer, found, head, by, names.count, names)


def _recalled(explorer: Explorer, layer: str, wanted: str | None) -> tuple[str | None, list[str]]:
    """The projection that recalls, by default the one that merges the heads, and all that could.

    Where none inside the layer was recorded, as in a frozen backbone, the last layer of the network does.
    """
    inside = [name for name in explorer.layers if name == layer or name.startswith(f"{layer}.")]
    inside = inside or list(explorer.layers)[-1:]
    if wanted is not None and wanted not in inside:
        raise QueryError(f"'{wanted}' is not recorded inside '{layer}': there are {inside}.")
    merging = [name for name in inside if name.endswith((".out", ".out_proj"))]
    return wanted or next(iter([*merging, *reversed(inside)]), None), inside


def _question(explorer: Explorer, layer: str) -> PredictionQuestion:
    """Examples with all their visits, where they can be had: the best single rows may all be of the same visit."""
    return PredictionQuestion(
        layer=layer, k=RECALLED, each="example" if "example" in eachs_of(explorer, layer) else "visit"
    )


def side_of(count: int) -> int:
    """The side of a square grid of patches, with or without a class token before them; 0 where there is none."""
    for cells in (count, count - 1):
        side = round(cells**0.5)
        if side > 1 and side * side == cells:
            return side
    return 0
