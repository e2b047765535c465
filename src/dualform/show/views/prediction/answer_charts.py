"""The spotlight and the timeline of an answer as charts."""

from torch import Tensor

from dualform.explain import Hits, Timeline

from ..charts import Chart, bar_chart, stacked_chart
from ..explorer import Explorer
from ..numbers import number, signed
from .question import PredictionQuestion
from .sums import name_of

UNITS = {"example": "training example", "visit": "visit", "slot": "row"}


def spotlight_chart(explorer: Explorer, hits: Hits, question: PredictionQuestion) -> Chart:
    """The scores of the top hits in falling order: how sharp is the answer?"""
    values = hits.scores[0].tolist()
    told = signed if question.score == "contribution" else number
    shown, hrefs, says = [], [], []
    for hit, value in zip(hits, values, strict=True):
        index, label = hit.columns.get(explorer.index), hit.columns.get("label")
        if value != value:
            continue
        named = "" if label is None else f", {name_of(explorer, 'label', label)}"
        says.append(f"{hit.rank + 1}: example {index}{named}: {told(value)}" if index is not None else told(value))
        hrefs.append(f"/example/{index}" if isinstance(index, int) else "")
        shown.append(value)
    unit = UNITS[question.per or "example"]
    alt = (
        f"The {len(shown)} {unit}s that count most, from {told(shown[0])} to {told(shown[-1])}" if shown else "Nothing"
    )
    name = "adds" if question.score == "contribution" else "α"
    return bar_chart(shown, says, alt=alt, x_name=f"rank of the {unit}", y_name=name, hrefs=hrefs)


def time_chart(explorer: Explorer, line: Timeline, question: PredictionQuestion, explained: int) -> Chart:
    """The score over training, split into the explained class and all others if the groups are labels."""
    values, edges = line.values[0], [int(edge) for edge in line.edges]
    hrefs = [f"?step={edge}" for edge in edges[1:]]
    own = [line.column == "label" and name == explained for name in line.names]
    whole = _floats(values.sum(0))
    alt = f"What training added from step {edges[0]:,} to step {edges[-1]:,}"
    name = "adds" if question.score == "contribution" else "α"
    if not any(own):
        return stacked_chart(edges, [("", "", whole)], alt=alt, y_name=name, hrefs=hrefs)
    own_values = _floats(sum(values[i] for i, is_own in enumerate(own) if is_own))
    others = [a - b for a, b in zip(whole, own_values, strict=True)]
    groups = [
        ("own", f"examples of {name_of(explorer, 'label', explained)}", own_values),
        ("rest", "all others", others),
    ]
    return stacked_chart(edges, groups, alt=alt, y_name=name, hrefs=hrefs)


def _floats(values: Tensor | float) -> list[float]:
    assert isinstance(values, Tensor)
    return values.tolist()
