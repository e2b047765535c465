"""How much each training example speaks for its own label: its contribution to its own margin or loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.engine import LayerQueries, StoreView
from dualform.errors import QueryError
from dualform.progress import OnProgress, Progress, bar
from dualform.store import Store
from dualform.types import LayerInfo, ModuleInfo

from ..query import Question, capture, examples_first, labelled, logits_of
from .answers import SelfInfluence
from .own_contributions import own_contributions
from .training_set import TrainingSet

HELD = 1 << 27
"""How many numbers of queries are held at a time; for more the slots are read again."""

Weights = Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Portion:
    """Some consecutive rows of a training set, as the network and its layers see them."""

    rows: slice
    logits: Float[Tensor, "n classes"]
    queries: dict[str, LayerQueries]
    """By the name of the layer's use."""


def self_influence(
    store: Store, view: StoreView, training: TrainingSet, model: nn.Module, weights: Weights, layer: str | int | None,
    target: str, progress: Progress,
) -> SelfInfluence:  # fmt: skip
    """The contribution of each example to its own target, through one layer or through all that have slots."""
    uses, left_out = layers_with_slots(store)
    if layer is not None:
        uses = [store.layer(layer)]
    if not uses:
        raise QueryError(f"no layer can be asked: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}.")
    total = sum(store.slots(info.name) for info, _ in uses)
    with bar("self-influence", total, progress) as watch:
        _, values = asked_about_themselves(store, view, training, model, weights, uses, target, watch)
    names = tuple(use.name for _, use in uses)
    return SelfInfluence(
        training.index, values, training.visits, names, target, left_out if layer is None else {},
        folder=str(store.path),
    )  # fmt: skip


def asked_about_themselves(
    store: Store, view: StoreView, training: TrainingSet, model: nn.Module, weights: Weights,
    uses: Sequence[tuple[LayerInfo, ModuleInfo]], target: str, watch: OnProgress | None = None,
) -> tuple[Float[Tensor, "n classes"], Float[Tensor, " n"]]:  # fmt: skip
    """The logits of every example, and its contribution to its own target through some layers."""
    logits, values, waiting = [], torch.zeros(len(training), dtype=torch.float64), []

    def add() -> None:
        if waiting:
            values[waiting[0].rows.start : waiting[-1].rows.stop] = _summed(store, view, training, uses, waiting, watch)
            waiting.clear()

    for portion in _portions(store, view, training, model, weights, uses, target):
        logits.append(portion.logits)
        if uses:
            waiting.append(portion)
        if sum(_numbers_of(queries) for held in waiting for queries in held.queries.values()) > HELD:
            add()
    add()
    return torch.cat(logits), values


def layers_with_slots(store: Store) -> tuple[list[tuple[LayerInfo, ModuleInfo]], dict[str, str]]:
    """The uses of layers that have slots and a rule; and the names of the other layers, with reasons."""
    uses, left_out = [], {}
    for info in store.manifest.layers:
        if info.keep != "slots":
            left_out[info.name] = f"of it {info.keep} was kept"
        elif not all(store.parameters[name].by_slots for name in info.weights):
            left_out[info.name] = "no rule explains its weights"
        else:
            uses += [(info, use) for use in info.modules]
    return uses, left_out


def _portions(
    store: Store, view: StoreView, training: TrainingSet, model: nn.Module, weights: Weights,
    uses: Sequence[tuple[LayerInfo, ModuleInfo]], target: str,
) -> Iterator[Portion]:  # fmt: skip
    """Run the network on some examples at a time."""
    every_use = {use.name: (info, use) for info in store.manifest.layers for use in info.modules}
    for rows, inputs in training.batches():
        shown = capture(model, inputs, every_use, weights, labelled(target, training.labels[rows]), store)
        queries = {
            use.name: Question(
                store, view, info, use, shown.target, shown.examples, shown.calls[use.name], "contribution"
            ).queries
            for info, use in uses
        }
        yield Portion(rows, examples_first(logits_of(shown.output), {}).detach().cpu(), queries)


def _summed(
    store: Store, view: StoreView, training: TrainingSet, uses: Sequence[tuple[LayerInfo, ModuleInfo]],
    portions: Sequence[Portion], watch: OnProgress | None,
) -> Float[Tensor, " n"]:  # fmt: skip
    """The contributions of the examples of some portions, one pass over each layer's slots."""
    begin, end = portions[0].rows.start, portions[-1].rows.stop
    among = (training.row_of_visit >= begin) & (training.row_of_visit < end)
    own_row = training.row_of_visit - begin
    own_row[~among] = -1
    values = torch.zeros(end - begin, dtype=torch.float64)
    for info, use in uses:
        parts = [portion.queries[use.name] for portion in portions]
        longest = max(part.per_example for part in parts)
        rows = torch.cat([_padded(part.rows, part.per_example, longest) for part in parts])
        directions = torch.cat([_padded(part.directions, part.per_example, longest) for part in parts])
        values += own_contributions(store, view, info, LayerQueries(rows, directions, longest), own_row, watch)
    return values


def _padded(rows: Tensor | None, per_example: int, longest: int) -> Float[Tensor, "r d"]:
    """Query rows with rows of zeros after those of each example; their direction is zero, so they add nothing."""
    assert rows is not None
    if per_example == longest:
        return rows
    by_example = rows.unflatten(0, (-1, per_example))
    return nn.functional.pad(by_example, (0, 0, 0, longest - per_example)).flatten(0, 1)


def _numbers_of(queries: LayerQueries) -> int:
    return queries.rows.numel() + (0 if queries.directions is None else queries.directions.numel())
