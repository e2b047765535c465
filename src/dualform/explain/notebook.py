"""A spotlight as a notebook shows it: the network's answers, and the training examples that contribute most."""

from html import escape
from typing import TYPE_CHECKING

from dualform.errors import QueryError

from .query import examples_first, is_preconditioned, logits_of

if TYPE_CHECKING:
    from .spotlight import Spotlight

QUERIES, EXAMPLES, SLOTS = 8, 4, 2_000_000
"""Queries that are shown, training examples of each, and the most slots that are scanned for them."""


def spotlight_html(spot: "Spotlight") -> str:
    """A table with one line per query. If finding examples would take long, it shows how to ask for them instead."""
    memory, layer = spot.memory, spot.memory.layers[-1]
    head = (
        f"<b>Spotlight</b> on {spot.examples} inputs: step {memory.step:,}, layers {escape(', '.join(memory.layers))}"
    )
    predictions = _predictions(spot)
    info, _ = memory.store.layer(layer)
    quick = (
        info.keep == "slots" and not is_preconditioned(memory.store, info) and memory.store.slots(info.name) <= SLOTS
    )
    if not quick:
        ask = f"<code>spot.top(10, layer={escape(repr(layer))})</code>"
        lines = [f"<tr><td>{i}</td><td>{escape(text)}</td></tr>" for i, text in enumerate(predictions)]
        return f"<p>{head}</p><table><tr><th>query</th><th>says</th></tr>{''.join(lines)}</table><p>Ask {ask}.</p>"
    hits = spot.top(EXAMPLES, layer=layer, progress=False, per="slot")
    lines = []
    for i, text in enumerate(predictions):
        cells = []
        for hit in hits[i]:
            about = ", ".join(
                f"{name} {hit.columns[name]}" for name in ("index", "label", "source") if name in hit.columns
            )
            cells.append(f"<td>{hit.contribution:+.3g}<br><small>{escape(about)}, step {hit.step}</small></td>")
        lines.append(f"<tr><td>{i}</td><td>{escape(text)}</td>{''.join(cells)}</tr>")
    more = f"<p>… and {spot.examples - len(predictions)} more.</p>" if spot.examples > len(predictions) else ""
    adds = f"adds most to {escape(hits.target)}, through {escape(layer)}"
    names = f"<th>query</th><th>says</th><th colspan={EXAMPLES}>{adds}</th>"
    return f"<p>{head}</p><table><tr>{names}</tr>{''.join(lines)}</table>{more}"


def _predictions(spot: "Spotlight") -> list[str]:
    """The network's answers to the first queries."""
    try:
        logits = examples_first(logits_of(spot.prediction), {}).detach()
    except QueryError:
        return ["?"] * min(QUERIES, spot.examples)
    if logits.shape[1] == 1:
        return [f"{float(value):.4g}" for value in logits.flatten()[:QUERIES]]
    best = logits[:QUERIES].double().softmax(1).max(1)
    return [f"class {int(k)} ({100 * float(p):.1f} %)" for p, k in zip(best.values, best.indices, strict=True)]
