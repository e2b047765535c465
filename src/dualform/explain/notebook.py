"""A spotlight as a notebook shows it: what the network says, and which training examples it is made of."""

from html import escape
from typing import TYPE_CHECKING

from dualform.errors import QueryError

from .query import examples_first, is_preconditioned, logits_of

if TYPE_CHECKING:
    from .spotlight import Spotlight

QUERIES, EXAMPLES, SLOTS = 8, 4, 2_000_000
"""Queries that are shown, training examples of each, and slots that are looked through for that."""


def spotlight_html(spot: "Spotlight") -> str:
    """A table: one line a query. Where looking for examples would take long, it says how to ask for them."""
    memory, layer = spot.memory, spot.memory.layers[-1]
    head = (
        f"<b>Spotlight</b> on {spot.examples} inputs: step {memory.step:,}, layers {escape(', '.join(memory.layers))}"
    )
    says = _says(spot)
    info, _ = memory.store.layer(layer)
    quick = (
        info.keep == "slots" and not is_preconditioned(memory.store, info) and memory.store.slots(info.name) <= SLOTS
    )
    if not quick:
        ask = f"<code>spot.top(10, layer={escape(repr(layer))})</code>"
        lines = [f"<tr><td>{i}</td><td>{escape(text)}</td></tr>" for i, text in enumerate(says)]
        return f"<p>{head}</p><table><tr><th>query</th><th>says</th></tr>{''.join(lines)}</table><p>Ask {ask}.</p>"
    hits = spot.top(EXAMPLES, layer=layer, progress=False)
    lines = []
    for i, text in enumerate(says):
        cells = []
        for hit in hits[i]:
            about = ", ".join(
                f"{name} {hit.columns[name]}" for name in ("index", "label", "source") if name in hit.columns
            )
            cells.append(f"<td>{hit.contribution:+.3g}<br><small>{escape(about)}, step {hit.step}</small></td>")
        lines.append(f"<tr><td>{i}</td><td>{escape(text)}</td>{''.join(cells)}</tr>")
    more = f"<p>… and {spot.examples - len(says)} more.</p>" if spot.examples > len(says) else ""
    adds = f"adds most to {escape(hits.target)}, through {escape(layer)}"
    names = f"<th>query</th><th>says</th><th colspan={EXAMPLES}>{adds}</th>"
    return f"<p>{head}</p><table><tr>{names}</tr>{''.join(lines)}</table>{more}"


def _says(spot: "Spotlight") -> list[str]:
    """What the network says of the first queries."""
    try:
        logits = examples_first(logits_of(spot.prediction), {}).detach()
    except QueryError:
        return ["?"] * min(QUERIES, spot.examples)
    if logits.shape[1] == 1:
        return [f"{float(value):.4g}" for value in logits.flatten()[:QUERIES]]
    best = logits[:QUERIES].double().softmax(1).max(1)
    return [f"class {int(k)} ({100 * float(p):.1f} %)" for p, k in zip(best.values, best.indices, strict=True)]
