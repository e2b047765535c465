"""A spotlight as people see it: the network's answers, and the training examples that add most to each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dualform.errors import DualformError, QueryError
from dualform.types import LayerInfo

from ..query import examples_first, is_preconditioned, logits_of
from .hits import example_table, example_tiles
from .illustrations import Illustrations, illustrations_of
from .markup import Markup, card, joined, table, tag
from .text import same_digits, visible_text

if TYPE_CHECKING:
    from ..hits import Hits
    from ..spotlight import Spotlight

QUERIES, EXAMPLES, SLOTS = 8, 6, 2_000_000
"""Queries that are shown, training examples of each, and the most slots that are scanned for them."""


def spotlight_html(spot: "Spotlight") -> str:
    """Each input, what the network says, and the examples behind it; if that takes long, how to ask for them."""
    looks, predictions = illustrations_of(str(spot.memory.path)), _predictions(spot)
    pictures = [_picture(spot, query, looks) for query in range(len(predictions))]
    hits = _quick_hits(spot)
    more = f"… and {spot.examples - len(predictions)} more." if spot.examples > len(predictions) else ""
    if hits is None:
        heads = ["query", *([""] if any(pictures) else []), "says"]
        lines = [
            [query, *([picture] if any(pictures) else []), says]
            for query, (picture, says) in enumerate(zip(pictures, predictions, strict=True))
        ]
        ask = tag("div", "Ask ", tag("code", "spot.top(10)"), " for the training examples behind them.")
        return card(_heading(spot), table(heads, lines, left=(0, 1, 2)), ask, notes=(more,))
    parts = []
    for query, (picture, says) in enumerate(zip(pictures, predictions, strict=True)):
        title = tag("div", f"query {query}: {says}", style="font-weight:600;margin:.5em 0 .2em")
        parts.append(joined(title, _behind(hits, query, picture, looks)))
    adds = f"What adds most to {visible_text(hits.target)}, over the whole network."
    return card(_heading(spot), *parts, notes=(more, adds, hits.remark))


def spotlight_lines(spot: "Spotlight") -> Iterator[str]:
    """The network's answers as lines of text."""
    yield f"{_heading(spot)}:"
    predictions = _predictions(spot)
    yield from (f"  query {query}: {says}" for query, says in enumerate(predictions))
    if spot.examples > len(predictions):
        yield f"  … and {spot.examples - len(predictions)} more"


def _heading(spot: "Spotlight") -> str:
    names = spot.memory.layers
    layers = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"Spotlight on {spot.examples} inputs: step {spot.memory.step:,}, layers {layers}"


def _behind(hits: "Hits", query: int, picture: Markup | str, looks: Illustrations | None) -> Markup:
    """The examples behind one answer."""
    rows = hits[query].to_show()
    noted = [
        {name: hit.columns[name] for name in ("index", "label", "source") if hit.columns.get(name) is not None}
        for hit in rows
    ]
    if looks is not None and looks.kind == "pictures":
        numbers = same_digits(hit.contribution for hit in rows)
        examples = [
            (hit.columns.get("index"), number, columns, "")
            for hit, number, columns in zip(rows, numbers, noted, strict=True)
        ]
        side = tag("div", picture, style="padding:0 .8em 0 0;border-right:1px solid rgba(128,128,128,.35)")
        return tag("div", side, example_tiles(looks, examples), style="display:flex;gap:.8em;align-items:flex-start")
    lines: list[Any] = [
        (hit.columns.get("index"), hit.contribution, columns, hits.when(hit))
        for hit, columns in zip(rows, noted, strict=True)
    ]
    return example_table(lines, looks, "adds")


def _quick_hits(spot: "Spotlight") -> "Hits | None":
    """The best examples of the first queries over the whole network; None where finding them would take long."""
    store = spot.memory.store

    def is_quick(layer: LayerInfo) -> bool:
        return layer.keep == "slots" and not is_preconditioned(store, layer)

    layers = store.manifest.layers
    if not all(map(is_quick, layers)) or sum(store.slots(layer.name) for layer in layers) > SLOTS:
        return None
    try:
        return spot.top(EXAMPLES, progress=False)
    except DualformError:
        return None


def _picture(spot: "Spotlight", query: int, looks: Illustrations | None) -> Markup | str:
    """The input of a query, if it looks like the pictures of the training set."""
    if looks is None or looks.kind != "pictures" or not isinstance(spot.inputs, Tensor):
        return ""
    inputs = spot.inputs.detach().float()  # scaled in another way than the pictures, often
    return looks.image(inputs[query], f"query {query}", (float(inputs.min()), float(inputs.max()))) or ""


def _predictions(spot: "Spotlight") -> list[str]:
    """The network's answers to the first queries."""
    try:
        logits = examples_first(logits_of(spot.prediction), {}).detach()
    except QueryError:
        return ["?"] * min(QUERIES, spot.examples)
    if logits.shape[1] == 1:
        return [f"{float(value):.4g}" for value in logits.flatten()[:QUERIES]]
    best = logits[:QUERIES].double().softmax(1).max(1)
    names = spot.memory.class_names
    says = [names.named("label", k) for k in best.indices.tolist()]
    says = [f"class {name}" if isinstance(name, int) else visible_text(name) for name in says]
    return [f"{name} ({100 * float(p):.1f} %)" for name, p in zip(says, best.values, strict=True)]
