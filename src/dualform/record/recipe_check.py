"""What can be seen of a recipe without importing anything: whether it can be that of the network which is recorded."""

from collections.abc import Collection
from pathlib import Path

from dualform.data.reading import column_names
from dualform.errors import QueryError
from dualform.store import Recipe, RecipeSource

from .plan import RecordingPlan
from .slots import RESERVED

NAMED = 12
"""The most names that an error lists."""


def require_fitting(recipe: Recipe, memory: Path, plan: RecordingPlan, noted: Collection[str] | None = None) -> None:
    """Raise an error if a recipe cannot be that of a network: its classes, its columns, or its column of indices.

    ``noted`` are the columns of the visits; None as long as no step has used any.
    """
    _require_classes(recipe, plan)
    for role, source in (("train", recipe.train), ("test", recipe.test)):
        if source is not None and source.file is not None:
            _require_columns(recipe, role, source, memory)
    if recipe.index is not None and noted is not None and recipe.index not in (*noted, *RESERVED):
        raise QueryError(
            f"describe(index={recipe.index!r}) names a column that is not noted: the columns are {_listed(noted)}."
        )


def _require_classes(recipe: Recipe, plan: RecordingPlan) -> None:
    """Every class needs an output. Which layer is the last to run is not known, so any may have as many outputs."""
    count = len(recipe.classes)
    sizes = {size for tensor in plan.tensors.values() for size in tensor.shape}
    if not count or not plan.layers or count in sizes or (count == 2 and 1 in sizes):
        return
    last = plan.layers[-1]
    raise QueryError(
        f"describe(classes=…) names {count:,} classes, but no layer of this {type(plan.model).__name__} has as many "
        f"outputs ('{last.name}', the last recorded one, has {last.d_out:,}): name one class for each output."
    )


def _require_columns(recipe: Recipe, role: str, source: RecipeSource, memory: Path) -> None:
    """The input columns must be in a table, and the label in that of the training examples."""
    columns = recipe.columns
    available = None if columns is None else column_names(source.at(memory))
    if columns is None or available is None:
        return
    label = [columns.label] if columns.label is not None and role == "train" else []
    for name in (*columns.names, *label):
        if name not in available:
            raise QueryError(
                f"describe(columns=…) names '{name}', but {source}, which describe({role}=…) names, has no such "
                f"column: it has {_listed(available)}."
            )


def _listed(names: Collection[str]) -> str:
    shown = [f"'{name}'" for name in names][:NAMED]
    return ", ".join([*shown, *(["…"] if len(names) > NAMED else [])]) or "none"
