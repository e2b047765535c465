"""Fast == naive: the reductions of a scan, block by block, against the full matrix of scores."""

import importlib
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import Naive, close, mlp, naive_scores, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import dualform
from dualform.engine import GroupSums, LayerQueries, StoreView, TopSlots, coefficients, scan
from dualform.store import Store
from dualform.types import DType, Order, Score

SCORES: tuple[Score, ...] = ("weight", "abs", "contribution")
ORDERS: tuple[Order, ...] = ("largest", "smallest", "magnitude")


def random_memory(path, sizes, seed, *, coarse=False, shards=True, dtype: DType = "float64") -> Store:
    """One layer and random slots. ``coarse``: small whole numbers, so that many scores are equal."""
    random = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.0 if coarse else 0.9)
    with dualform.record(model, optimizer, path, dtype=dtype, progress=False) as tape:
        for step, size in enumerate(sizes):
            x, e = (
                torch.randint(-1, 2, (size, d), generator=random).double()
                if coarse
                else torch.randn(size, d, generator=random, dtype=torch.float64)
                for d in (3, 2)
            )
            tape.note(label=torch.randint(4, (size,), generator=random))
            model(x).backward(e)
            optimizer.step()
            optimizer.zero_grad()
            if shards and step % 2:
                tape.flush()
    return Store(path)


def cut(entries: int, rows: int, stretch: int) -> ExitStack:
    """Scores that are reduced at a time, rows of a block and slots of a stretch: all of them small."""
    stack = ExitStack()
    for module, name, size in (
        ("engine.scan", "ENTRIES", entries),
        ("store.store", "BLOCK_ROWS", rows),
        ("engine.top_slots", "STRETCH", stretch),
    ):
        stack.enter_context(mock.patch.object(importlib.import_module(f"dualform.{module}"), name, size))
    return stack


def ordered(score: np.ndarray, order: str, k: int) -> list[int]:
    """The k best slots; equal scores keep the earlier one first."""
    key = {"largest": score, "smallest": -score, "magnitude": np.abs(score)}[order]
    shown = [i for i in range(len(key)) if not np.isnan(key[i])]
    return sorted(shown, key=lambda i: (-key[i], i))[:k]


def queries_of(seed, examples, rows, coarse) -> LayerQueries:
    random = torch.Generator().manual_seed(seed + 1)
    parts = [
        torch.randint(-1, 2, (examples * rows, d), generator=random).double()
        if coarse
        else torch.randn(examples * rows, d, generator=random, dtype=torch.float64)
        for d in (3, 2)
    ]
    return LayerQueries(parts[0], parts[1], rows)


def full(store: Store, queries: LayerQueries, view: StoreView):
    naive = Naive(store.path)
    assert queries.directions is not None
    rows, directions = (t.unflatten(0, (-1, queries.per_example)) for t in (queries.rows, queries.directions))
    return naive_scores(naive, "0", "0.weight", rows, directions, view.horizon, view.visible)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    k=st.integers(1, 12),
    examples=st.integers(1, 3),
    rows=st.integers(1, 3),
    coarse=st.booleans(),
    masked=st.booleans(),
    parts=st.tuples(st.sampled_from([1, 30, 1 << 20]), st.sampled_from([2, 4096]), st.sampled_from([2, 3, 256])),
    data=st.data(),
    seed=seeds,
)
def test_the_best_slots_are_those_of_the_full_matrix(
    sizes, k, examples, rows, coarse, masked, parts, data, seed, tmp_path_factory
):
    store = random_memory(tmp_path_factory.mktemp("memory"), sizes, seed, coarse=coarse)
    visible = np.random.default_rng(seed).random(sum(sizes)) < 0.6 if masked else None
    view = StoreView(data.draw(st.integers(0, len(sizes))), visible)
    queries = queries_of(seed, examples, rows, coarse)
    scores = full(store, queries, view)
    of_step = coefficients(store, "0.weight", view.horizon).of_step
    asked = {(s, o): TopSlots(k, examples, s, o) for s in SCORES for o in ORDERS}
    with cut(*parts):
        scan(store, "0", view, queries, list(asked.values()), of_step=[of_step])
    for (score, order), best in asked.items():
        for i in range(examples):
            expected = ordered(scores[score][i].numpy(), order, k)
            slots = torch.as_tensor(best.slot)[i].tolist()
            found = [slot for slot in slots if slot >= 0]
            if coarse:  # all numbers are exact, so ties are ties
                assert found == expected, (score, order)
            else:
                values = scores[score][i].numpy()
                np.testing.assert_allclose(values[found], values[expected], rtol=1e-9, atol=1e-12)
            assert slots[len(found) :] == [-1] * (k - len(found))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_many_equal_candidates_keep_the_order_of_training(k, order, tmp_path):
    """Far more slots beat the worst of the best than there are places, and most of them are equal."""
    store = random_memory(tmp_path, [30, 40, 50], 1, coarse=True, shards=False)
    queries, view = queries_of(1, 4, 1, coarse=True), StoreView(3)
    scores = full(store, queries, view)
    for rows in (25, 60, 4096):
        asked = {score: TopSlots(k, 4, score, order) for score in SCORES}
        with cut(1, rows, 2):
            scan(store, "0", view, queries, list(asked.values()), of_step=[coefficients(store, "0.weight", 3).of_step])
        for score, best in asked.items():
            expected = [ordered(scores[score][i].numpy(), order, k) for i in range(4)]
            assert best.slot.tolist() == expected, (score, rows)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    groups=st.sampled_from([1, 2, 5, 64, 65, 200]),
    rows=st.integers(1, 3),
    masked=st.booleans(),
    parts=st.tuples(st.sampled_from([1, 30, 1 << 20]), st.sampled_from([2, 4096]), st.just(256)),
    data=st.data(),
    seed=seeds,
)
def test_sums_over_groups_are_those_of_the_full_matrix(
    sizes, groups, rows, masked, parts, data, seed, tmp_path_factory
):
    """Up to 64 groups are a matrix product, more are sorted runs."""
    store = random_memory(tmp_path_factory.mktemp("memory"), sizes, seed)
    random = np.random.default_rng(seed)
    visible = random.random(sum(sizes)) < 0.6 if masked else None
    view = StoreView(data.draw(st.integers(0, len(sizes))), visible)
    group = random.integers(groups, size=sum(sizes))
    queries = queries_of(seed, 2, rows, coarse=False)
    scores = full(store, queries, view)
    of_step = coefficients(store, "0.weight", view.horizon).of_step
    asked = {score: GroupSums(groups, 2, score, lambda block: group[block.visits]) for score in SCORES}
    with cut(*parts):
        scan(store, "0", view, queries, list(asked.values()), of_step=[of_step])
    member = torch.nn.functional.one_hot(torch.from_numpy(group), groups).double()
    for score, sums in asked.items():
        close(sums.total, scores[score].nan_to_num(0.0) @ member)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_many_queries_against_many_blocks_are_the_full_matrix(dtype, rows, tmp_path):
    """More slots than a block holds, more queries than are multiplied at a time."""
    sizes, examples = [1500, 2100, 700], 1200
    store = random_memory(tmp_path, sizes, 3, shards=False, dtype=dtype)
    assert store.slots("0") == sum(sizes)
    wide = queries_of(3, examples, rows, coarse=False)
    assert wide.directions is not None
    queries = LayerQueries(wide.rows.to(store.compute), wide.directions.to(store.compute), rows)
    scores = full(store, wide, StoreView(3))
    group = np.random.default_rng(0).integers(80, size=sum(sizes))
    best, few, many = (
        TopSlots(5, examples, "contribution", "largest"),
        *(GroupSums(g, examples, "abs", lambda b, g=g: group[b.visits] % g) for g in (10, 80)),
    )
    scan(store, "0", StoreView(3), queries, [best, few, many], of_step=[coefficients(store, "0.weight", 3).of_step])
    bar = {"float64": 1e-12, "float32": 1e-4, "float16": 1e-4}[dtype]  # the naive reader decodes the same float16
    expected = scores["contribution"].topk(5, dim=1).values
    close(scores["contribution"].gather(1, torch.as_tensor(best.slot)), expected, bar)
    for sums, groups in ((few, 10), (many, 80)):
        member = torch.nn.functional.one_hot(torch.from_numpy(group % groups), groups).double()
        close(sums.total, scores["abs"] @ member, bar)


@pytest.mark.parametrize("order", ORDERS)
def test_equal_scores_keep_the_order_of_training(order, tmp_path):
    """The same example again and again, across shards: the earliest slots come first."""
    model = mlp(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for _ in range(5):
            model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tape.flush()
    spot = dualform.open(tmp_path).attend(model, torch.ones(2, 3, dtype=torch.float64))
    for k in (1, 3, 6, 20, 30):
        hits = spot.top(k, layer="0", score="weight", order=order, per="slot")
        assert hits.slots.tolist() == [list(range(min(k, 20)))] * 2
