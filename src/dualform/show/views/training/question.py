"""The question of the page *Training set*: what is weighed, which examples are shown, how, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dualform.errors import QueryError

from ..explorer import Explorer

Correctness = Literal["all", "right", "wrong"]
Showing = Literal["gallery", "table"]
Subset = Literal["all", "selected", "suspects", "unseen"]
SortOrder = Literal["up", "down"]

MOST, PAGE = 5000, 48
"""The most test examples that training examples are weighed over, and how many training examples a page shows."""

LONGEST_FILTER = 500
"""The most characters of a condition or of a text that is searched for."""

SORTS = {
    "adds": "what it adds to the right answers",
    "size": "how much it matters",
    "against": "what it takes from other labels",
    "suspicion": "suspicion",
    "own": "what it adds to its own label",
    "visits": "number of visits",
    "label": "label",
    "index": "index",
}
"""What examples can be sorted by, beside the noted columns, which are called ``noted.`` and their name."""

ASCENDING = ("label", "index")
"""What is sorted with the smallest first unless something else is asked for; noted columns are too."""


@dataclass(frozen=True)
class TrainingSetQuestion:
    """The controls of the page. None leaves a choice to the explorer; without a layer the whole network counts."""

    layer: str | None = None
    which: Correctness = "all"
    rows: int = 200
    show: Showing | None = None
    sort: str | None = None
    order: SortOrder | None = None
    label: int | None = None
    column: str | None = None
    value: str | None = None
    """Only examples with this value in a noted column."""
    filter: str = ""
    """Only examples with a visit for which this condition holds."""
    text: str = ""
    """Only texts that contain this."""
    only: Subset = "all"
    page: int = 1


def settle_choice(explorer: Explorer, choice: TrainingSetQuestion) -> TrainingSetQuestion:
    """The question with every open choice made, limited to the test examples that exist."""
    if choice.rows < 1:
        raise QueryError(f"training examples cannot be weighed over {choice.rows} test examples: choose 1 or more.")
    if choice.layer is not None:
        explorer.info(choice.layer)
    columns = noted_columns(explorer)
    for name, known in (("sort", sorts_of(explorer)), ("column", columns)):
        if (value := getattr(choice, name)) is not None and value not in known:
            raise QueryError(f"{name}={value!r} is not known; choose one of {list(known)}.")
    if len(choice.filter) > LONGEST_FILTER or len(choice.text) > LONGEST_FILTER:
        raise QueryError(f"a condition or a text to search for has at most {LONGEST_FILTER} characters.")
    like = explorer.train or explorer.test
    sort = choice.sort or ("adds" if explorer.test is not None else "index")
    rows = min(choice.rows, MOST, len(explorer.test)) if explorer.test is not None else choice.rows
    down = sort not in ASCENDING and not sort.startswith("noted.")
    return replace(
        choice,
        rows=rows,
        sort=sort,
        order=choice.order or ("down" if down else "up"),
        show=choice.show or ("table" if like is None or like.kind == "numbers" else "gallery"),
        page=max(1, choice.page),
    )


def sorts_of(explorer: Explorer) -> dict[str, str]:
    """What examples can be sorted by, with its description."""
    return {**SORTS, **{f"noted.{name}": name for name in noted_columns(explorer)}}


def noted_columns(explorer: Explorer) -> list[str]:
    """The columns that were noted beside the index and the label."""
    return [name for name in explorer.columns if name not in (explorer.index, "label", "step")]


def subsets() -> Sequence[str]:
    """Which examples can be shown alone."""
    return get_args(Subset)
