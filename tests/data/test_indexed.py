"""``indexed``: every item comes with its place in the data set, however a loader goes through it."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from dualform import tasks
from dualform.data import indexed, indexed_collate
from dualform.errors import QueryError
from dualform.explain import open_memory
from dualform.record import record

X, Y = torch.arange(20.0).unsqueeze(1).repeat(1, 4), torch.arange(20) % 3
PAIRS = TensorDataset(X, Y)
Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("dataset", "item"),
    [
        (PAIRS, lambda i: (X[i], Y[i], i)),
        ([(float(i), i % 3) for i in range(20)], lambda i: (float(i), i % 3, i)),
        ([[float(i), i % 3] for i in range(20)], lambda i: (float(i), i % 3, i)),
        ([Pair(float(i), i % 3) for i in range(20)], lambda i: (float(i), i % 3, i)),
        ([{"x": float(i)} for i in range(20)], lambda i: {"x": float(i), "index": i}),
        (X, lambda i: (X[i], i)),
        (["text"] * 20, lambda i: ("text", i)),
    ],
)
def test_an_item_is_followed_by_its_index_or_has_it_by_name(dataset, item):
    data = indexed(dataset)
    assert len(data) == 20
    for place in (0, 7, 19, -1):
        assert str(data[place]) == str(item(place % 20))
    with pytest.raises(IndexError, match="holds 20"):
        data[20]


@given(st.integers(1, 7), st.booleans(), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 19), min_size=1))
def test_whatever_a_loader_does_with_the_order_the_index_is_the_place(batch_size, shuffle, seed, chosen):
    torch.manual_seed(seed)
    for data, expected in ((indexed(PAIRS), range(20)), (Subset(indexed(PAIRS), chosen), sorted(chosen))):
        places = []
        for x, y, index in DataLoader(data, batch_size=batch_size, shuffle=shuffle):
            torch.testing.assert_close((x, y), (X[index], Y[index]))
            places += index.tolist()
        assert sorted(places) == list(expected)


def test_samplers_workers_and_data_sets_of_data_sets_work():
    loaders: tuple[dict[str, Any], ...] = (
        {"sampler": WeightedRandomSampler([1.0] * 20, 30)},
        {"batch_sampler": BatchSampler([3, 3, 5, 19], 2, drop_last=False)},
        {"batch_size": None},
        {"batch_size": 4, "num_workers": 1},
    )
    for options in loaders:
        for x, _, index in DataLoader(indexed(PAIRS), **options):
            torch.testing.assert_close(x, X[index])
    for x, _, index in DataLoader(indexed(ConcatDataset([PAIRS, PAIRS])), batch_size=40):
        assert index.tolist() == list(range(40)) and x[25].equal(X[5])
    for x, _, index in DataLoader(indexed(Subset(PAIRS, [4, 2])), batch_size=2):
        assert index.tolist() == [0, 1] and x.equal(X[[4, 2]])


def test_a_collate_fn_that_knows_no_index_gets_the_items_of_the_data_set():
    seen = []

    def pad(items):
        seen.append(items)
        return default_collate(items)

    for dataset in (PAIRS, [{"x": x} for x in X], X):
        seen.clear()
        for batch in DataLoader(indexed(dataset), batch_size=5, collate_fn=indexed_collate(pad)):
            index = batch["index"] if isinstance(batch, dict) else batch[-1]
            expected = default_collate([dataset[int(place)] for place in index])
            assert str(seen[-1]) == str([dataset[int(place)] for place in index])
            assert str(batch["x"] if isinstance(batch, dict) else batch[0]) == str(
                expected["x"] if isinstance(batch, dict) else expected[0] if isinstance(expected, list) else expected
            )


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_a_data_set_of_hugging_face_stays_one_and_gets_a_column(kind):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    plain = datasets.Dataset.from_dict({"x": X.tolist(), "text": ["t"] * 20}).shuffle(seed=0)
    data = indexed(plain.with_format(kind, columns=["x"]))
    assert isinstance(data, datasets.Dataset) and [int(i) for i in data["index"]] == list(range(20))
    assert set(data[3]) == {"x", "index"} and type(data[3]["x"]) is type(plain.with_format(kind)[3]["x"])
    if kind == "torch":
        for batch in DataLoader(data, batch_size=6, shuffle=True):
            torch.testing.assert_close(batch["x"], torch.tensor(plain["x"])[batch["index"]])
    with pytest.raises(QueryError, match="'index' of their own"):
        indexed(data)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(1, 2)])


@pytest.mark.parametrize(
    ("dataset", "says"),
    [(Stream(), "a Stream gives its items in a stream"), ((x for x in X), "a generator gives"),
     (DataLoader(PAIRS), "takes the data set, not the loader")],
)  # fmt: skip
def test_what_has_no_places_is_refused_in_a_sentence(dataset, says):
    with pytest.raises(QueryError, match=says):
        indexed(dataset)
    with pytest.raises(QueryError, match="name='place'"):
        indexed([{"index": 3}])[0]
    assert indexed([{"index": 3}], name="place")[0] == {"index": 3, "place": 0}


@pytest.mark.parametrize("collate", [None, indexed_collate()])
def test_a_loop_over_an_indexed_loader_is_recorded_and_run_again_from_the_same_loader(tmp_path, collate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(indexed(PAIRS), batch_size=5, shuffle=True, collate_fn=collate)
    with record(model, optimizer, tmp_path / "m", replay=True, progress=False) as tape:
        for x, y, index in loader:
            tape.note(index=index, label=y)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = open_memory(tmp_path / "m")
    assert sorted(memory.visits["index"].to_pylist()) == list(range(20))
    assert memory.replay(model, *tasks.classification(loader)).check().exact
