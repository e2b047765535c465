"""Where hits speak: their contributions, split over the rows of the query and over their own rows."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dualform.engine import LayerQueries, LayerScan, RowSums, StoreView, row_sums_backwards
from dualform.errors import QueryError
from dualform.progress import Progress, bar
from dualform.store import Block, Store

from ..groups import GroupOfSlot, groups_of
from ..hits import INDEX, ExampleHits, HitPlaces, Hits, SlotHits, VisitHits
from ..query import Question, Target
from .asked import AskedQuestions
from .network_question import NetworkQuestion, is_swept, layer_scan, scan_layers
from .one_layer import AskLayer
from .whole_network import question_to_network


def ask_places(
    store: Store, ask: AskLayer, view: StoreView, hits: Hits, target: Target, progress: Progress
) -> HitPlaces:  # fmt: skip
    """Split the contributions of the hits of one query, in one pass over their slots."""
    _require_one_query(len(hits), hits)
    owners = HitSlots.of_hits(store, view, hits)
    view = replace(view, visible=owners.visible)
    asked = AskedQuestions(
        view, 1, None, (), 0, None, "example", "contribution", "largest", target, hits.origin.position, False,
        hits.origin.after,
    )  # fmt: skip
    network = question_to_network(store, ask, asked, hits.layer or None)
    _require_one_query(network.questions[0].examples, hits)
    if network.target != hits.target:
        raise QueryError(
            f"these hits add to {hits.target}, and this spotlight is on {network.target}. Pass the target that they "
            "were asked with: places(hits, target=…)."
        )
    rows = [_rows_of_calls(question) for question in network.questions]
    length = _usual_length([count for counts in rows for count in counts])
    of_layers = (
        [(network.questions[0], [_own_rows(network.questions[0])])]
        if isinstance(hits, SlotHits)
        else [(question, list(_row_queries(network, question))) for question in network.questions]
    )
    layers = dict.fromkeys(layer for _, asked_layers in of_layers for layer, _ in asked_layers)
    places = PlaceOfSlot.in_layers(store, list(layers), owners)
    sums: list[tuple[str, LayerQueries, RowSums, Int[np.ndarray, " r"]]] = []
    for (question, asked_layers), counts in zip(of_layers, rows, strict=True):
        positions = _positions(counts, length)
        if question.position is not None:
            positions = positions[question.position % len(positions)][None]
        for layer, queries in asked_layers:
            of_rows = RowSums(len(queries), owners.count + 1, owners.hit_of, places.count, places)
            sums.append((layer, queries, of_rows, positions))
    _add_up(store, view, [(layer, queries, of_rows) for layer, queries, of_rows, _ in sums], progress)
    of_query = torch.zeros(owners.count, length + 1, dtype=torch.float64)
    for _, _, of_rows, positions in sums:
        of_query.index_add_(1, torch.from_numpy(positions), of_rows.by_row[:, : owners.count].mT)
    of_training = (
        torch.stack([of_rows.by_place for _, _, of_rows, _ in sums])
        .sum(0)[:-1]
        .unflatten(0, (owners.count, places.length + 1))
    )
    _require_same_sums(store, hits, of_query)
    return HitPlaces(
        hits.layer, hits.target, of_query[:, :-1], of_query[:, -1], of_training[:, :-1], of_training[:, -1], hits
    )


def _require_one_query(queries: int, hits: Hits) -> None:
    """Raise unless contributions of hits of one query can be split."""
    if queries != 1:
        raise QueryError(
            f"places are about one query, not {queries}: take the hits of one, hits[i], and a spotlight on its input "
            "alone, memory.attend(model, x[i : i + 1])."
        )
    if hits.score != "contribution":
        raise QueryError(f"places split contributions, and these hits were chosen by score={hits.score!r}.")
    if not hits.contribution.shape[1]:
        raise QueryError("there are no hits here whose places could be told.")


def _require_same_sums(store: Store, hits: Hits, parts: Tensor) -> None:
    """Raise if the parts do not sum to the contributions of the hits, as those of another query would not."""
    difference = (parts.sum(1) - hits.contribution[0].double()).abs()
    size = parts.abs().sum(1) + hits.contribution[0].double().abs()
    if (difference > torch.finfo(store.compute).eps ** 0.5 * size).any():
        raise QueryError(
            "these hits are not what this spotlight recalls: their contributions are other ones. Pass hits of the same "
            "memory, step and mask, of the same input and with the same target: places(hits, target=…)."
        )


# ------------------------------------------------------------------------------------------------------ the query


def _rows_of_calls(question: Question) -> list[int]:
    """How many rows the query has in each call of a layer."""
    return [inputs.shape[:-1].numel() for inputs in question.calls.inputs]


def _usual_length(counts: Sequence[int]) -> int:
    """The number of rows that most calls have, of those with more than one; of equal ones the first."""
    several = Counter(count for count in counts if count > 1)
    return several.most_common(1)[0][0] if several else 1


def _positions(counts: Sequence[int], length: int) -> Int[np.ndarray, " r"]:
    """The position of each row of a layer's calls; ``length`` stands for elsewhere.

    A layer that is called once for each position, with one row, has them all.
    """
    if len(counts) == length and set(counts) == {1}:
        return np.arange(length)
    return np.concatenate([np.arange(length) if count == length else np.full(count, length) for count in counts])


def _row_queries(network: NetworkQuestion, question: Question) -> Iterator[tuple[str, LayerQueries]]:
    """What one use of a layer asks of each layer that feeds its parameters, every row as a query of its own."""
    directions = question.queries.directions
    assert directions is not None
    for layer, queries in replace(network, questions=[question]).asked:
        assert queries.directions is not None
        biases = dict.fromkeys(queries.biases, directions)
        rows, own = (tensor.expand(len(directions), -1) for tensor in (queries.rows, queries.directions))
        yield layer, LayerQueries(rows, own, 1, biases)


def _own_rows(question: Question) -> tuple[str, LayerQueries]:
    """The rows of a layer as queries to its own slots, for contributions through its weights alone."""
    return question.info.name, LayerQueries(question.queries.rows, question.queries.directions)


def _add_up(store: Store, view: StoreView, asked: Sequence[tuple[str, LayerQueries, RowSums]], progress: Progress):
    swept = [(layer, queries, sums) for layer, queries, sums in asked if is_swept(store, layer, queries)]
    scanned: list[Callable[[], LayerScan]] = [
        partial(layer_scan, store, view, layer, queries, [sums])
        for layer, queries, sums in asked
        if not is_swept(store, layer, queries)
    ]
    with bar("splitting contributions", sum(store.slots(layer) for layer, _, _ in asked), progress) as watch:
        scan_layers(store, view, scanned, watch)
        if swept:
            row_sums_backwards(store, swept, view, watch)


# ------------------------------------------------------------------------------------------------------- the hits


@dataclass(frozen=True)
class HitSlots:
    """Which slots belong to which hit of a query."""

    count: int
    """The number of hits; the number of a slot that belongs to none."""
    visible: Bool[np.ndarray, " V"]
    """The visits of the hits."""
    hit_of: Callable[[Block], Int[np.ndarray, " m"]]

    @classmethod
    def of_hits(cls, store: Store, view: StoreView, hits: Hits) -> "HitSlots":
        """The slots of hits in a view."""
        count = hits.contribution.shape[1]
        visible = np.zeros(len(store.visits), bool)
        if isinstance(hits, SlotHits):
            visits = hits.visits[0].numpy()
            visible[visits[visits >= 0]] = True
            slots = hits.slots[0].numpy()
            order = np.argsort(slots)
            return cls(count, visible, partial(_hit_of_slots, slots[order], order))
        of_visit = _hits_of_visits(store, view, hits)
        groups = GroupOfSlot.of_visits("", (*range(count), None), of_visit)
        return cls(count, of_visit < count, groups)


def _hit_of_slots(slots: Int[np.ndarray, " k"], hits: Int[np.ndarray, " k"], block: Block) -> Int[np.ndarray, " m"]:
    """The hit of each slot of a block, from the sorted slots of all hits."""
    place = np.searchsorted(slots, block.slots).clip(max=len(slots) - 1)
    return np.where(slots[place] == block.slots, hits[place], len(slots))


def _hits_of_visits(store: Store, view: StoreView, hits: Hits) -> Int[np.ndarray, " V"]:
    """The hit that each visit belongs to."""
    count = hits.contribution.shape[1]
    if isinstance(hits, VisitHits):
        of_visit = np.full(len(store.visits), count)
        of_visit[hits.visits[0].numpy()] = np.arange(count)
        return of_visit
    assert isinstance(hits, ExampleHits)
    names, ids = groups_of(store, INDEX)
    numbers: Mapping[object, int] = {name: number for number, name in enumerate(names)}
    hit_of_name = np.full(len(names) + 1, count)
    hit_of_name[[numbers[index] for index in hits.columns[INDEX].to_pylist()]] = np.arange(count)
    shown = store.visits["step"].to_numpy() <= view.horizon
    if view.visible is not None:
        shown &= view.visible
    if hits.origin.column is not None:
        groups, group_of_visit = groups_of(store, hits.origin.column)
        shown &= group_of_visit == groups.index(hits.origin.group)
    return np.where(shown, hit_of_name[ids], count)


@dataclass(frozen=True)
class PlaceOfSlot:
    """The hit of each slot and its position in its example, as one number; the last is for slots of no hit."""

    owners: HitSlots
    length: int
    """The most positions of an example; the number of those that are elsewhere."""
    begin_of_call: Mapping[str, Int[np.ndarray, " c"]]
    """For each layer and call the position of its first row; −1 where the rows are not those of most layers."""

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return self.owners.count * (self.length + 1) + 1

    def __call__(self, block: Block) -> Int[np.ndarray, " m"]:
        """The number of each slot of a block."""
        begin, hit = self.begin_of_call[block.layer.name][block.call], self.owners.hit_of(block)
        position = np.where(begin < 0, self.length, begin + block.calls.positions_of(block.slots))
        return np.where(hit == self.owners.count, self.count - 1, hit * (self.length + 1) + position)

    @classmethod
    def in_layers(cls, store: Store, layers: Sequence[str], owners: HitSlots) -> "PlaceOfSlot":
        """The positions of the slots of hits in some layers."""
        lengths = _lengths(store, layers, owners.visible)
        begins = {layer: _begins_of_calls(store, layer, owners.visible, lengths) for layer in layers}
        return cls(owners, int(lengths.max(initial=1)), begins)


def _lengths(store: Store, layers: Sequence[str], visible: Bool[np.ndarray, " V"]) -> Int[np.ndarray, " h"]:
    """The number of rows that most calls have of each visible visit, of those with more than one."""
    number = int(visible.sum())
    votes: dict[int, Int[np.ndarray, " h"]] = {}
    before = np.append(0, np.cumsum(visible))
    for layer in layers:
        first, last, rows = _calls_of_visible(store, layer, before)
        for count in dict.fromkeys(rows[(first < last) & (rows > 1)].tolist()):
            with_count = rows == count
            changes = np.zeros(number + 1, np.int64)
            np.add.at(changes, first[with_count], 1)
            np.add.at(changes, last[with_count], -1)
            votes[count] = votes.get(count, 0) + np.cumsum(changes)[:-1]
    if not votes:
        return np.ones(number, np.int64)
    tally = np.stack(list(votes.values()))
    return np.where(tally.any(0), np.array(list(votes))[tally.argmax(0)], 1)


def _begins_of_calls(
    store: Store, layer: str, visible: Bool[np.ndarray, " V"], lengths: Int[np.ndarray, " h"]
) -> Int[np.ndarray, " c"]:
    """The position of the first row of each call; −1 where its rows are not those of most layers."""
    calls = store.calls(layer)
    first, last, rows = _calls_of_visible(store, layer, np.append(0, np.cumsum(visible)))
    length = np.where(first < last, np.append(lengths, 0)[first], 0)
    begin = np.where(rows == length, 0, -1)
    single = np.flatnonzero((rows == 1) & (length > 1))  # a layer that is called once for each position
    order = single[np.lexsort((calls.call[single], calls.visit[single], calls.module[single]))]
    keys = np.stack([calls.module[order], calls.visit[order]])
    edges = [0, *(np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(0)) + 1).tolist(), len(order)]
    for start, end in pairwise(edges):
        if end > start and length[order[start]] == end - start:
            begin[order[start:end]] = np.arange(end - start)
    return begin


def _calls_of_visible(
    store: Store, layer: str, before: Int[np.ndarray, " V1"]
) -> tuple[Int[np.ndarray, " c"], Int[np.ndarray, " c"], Int[np.ndarray, " c"]]:
    """For each call its first visible visit and the end of these, counted among visible visits, and rows an example."""
    calls, visits = store.calls(layer), len(before) - 1
    first, last = (
        before[np.clip(end, 0, visits)]
        for end in (calls.visit, calls.visit + np.where(calls.visit < 0, 0, calls.batch))
    )
    return first, last, calls.rows // np.maximum(1, calls.batch)
