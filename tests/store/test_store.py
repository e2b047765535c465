"""Written == read, by dualform and by any other program."""

import importlib
import json
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import Naive, Run, batches, close, mlp, seeds, setups, sgd, tokens, trained, whole
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import dualform
from dualform.errors import HorizonError
from dualform.store import SlotArena, Store, load_manifest, verify, write_tensors
from dualform.types import DType, Transition

out = importlib.import_module("dualform.store.io.direct_io")

DTYPES: dict[DType, torch.dtype] = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}


def run_of(path, dtype: DType = "float64", flush=False, model=None) -> Run:
    model = model or mlp(5, 4, 3)
    optimizer = sgd(model)
    data = batches(5, 3, 5, 3)
    if not flush:
        return trained(path, model, optimizer, data, dtype=dtype)
    run = Run(path, model, optimizer, data)
    with dualform.record(model, optimizer, path, dtype=dtype, progress=False) as tape:
        for i, (x, y) in enumerate(data):
            tape.note(index=torch.arange(3) + 3 * i, label=y)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            tape.flush()
    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [lambda: mlp(5, 4, 3), whole], ids=["mlp", "whole model"])
def test_any_safetensors_reader_reads_the_slots(dtype, make, tmp_path):
    run = run_of(tmp_path, dtype, model=make())
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert files
    for file in files:
        tensors = load_file(file)
        for layer in run.memory.store.manifest.layers:
            assert tensors[f"{layer.name}.keys"].dtype == tensors[f"{layer.name}.errors"].dtype == DTYPES[dtype]
            assert tensors[f"{layer.name}.keys"].shape[1] == layer.d_in
            assert tensors[f"{layer.name}.errors"].shape[1] == layer.d_out
            assert (f"{layer.name}.error_exponents" in tensors) == (dtype == "float16")
    first = load_file(tmp_path / "init.safetensors")
    for name, tensor in run.states[0].items() if run.states else []:
        assert name == "right.weight" or torch.equal(first[name], tensor)
    for file in sorted((tmp_path / "snapshots").glob("*.safetensors")):
        assert all("@" in name for name in load_file(file))


def test_pyarrow_reads_the_tables(tmp_path):
    run = run_of(tmp_path)
    visits = pq.read_table(tmp_path / "visits")
    assert visits.column_names == ["visit", "step", "row", "index", "label", "source"]
    assert visits.num_rows == 15
    calls = pq.read_table(tmp_path / "calls")
    assert set(calls["layer"].to_pylist()) == {"0", "2"} and sum(calls["rows"].to_pylist()) == 30
    steps = pq.read_table(tmp_path / "steps")
    assert set(Transition._fields) <= set(steps.column_names)
    assert steps.num_rows == 5 * 4
    assert visits.equals(run.memory.visits)


def test_the_manifest_is_json_that_lists_every_file(tmp_path):
    run_of(tmp_path, flush=True)
    value = json.loads((tmp_path / "manifest.json").read_text())
    assert value["format"] == "dualform-memory" and value["version"] == 2
    assert value["steps"] == 5 and value["visits"] == 15
    listed = {name for shard in value["shards"] for name in shard["files"]}
    there = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert there - listed == {"manifest.json", "init.safetensors", ".lock"}
    assert listed <= there
    assert not list(tmp_path.rglob("*.partial"))


def test_nothing_is_pickled(tmp_path):
    run_of(tmp_path)
    for file in (p for p in tmp_path.rglob("*") if p.is_file()):
        assert file.suffix in (".json", ".safetensors", ".parquet", "") and not file.read_bytes().startswith(b"\x80")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("flush", [False, True], ids=["one shard", "several shards"])
def test_what_was_seen_in_training_is_what_is_read(dtype, flush, tmp_path):
    """Keys and errors, as hooks of our own saw them."""
    model = mlp(5, 4, 3).to(DTYPES[dtype])
    optimizer = sgd(model)
    keys, errors = [], []
    model[2].register_forward_hook(lambda m, args, out: keys.append(args[0].detach().clone()))
    model[2].register_full_backward_hook(lambda m, gi, go: errors.append(go[0].detach().clone()))
    with dualform.record(model, optimizer, tmp_path, dtype=dtype, progress=False) as tape:
        for x, y in batches(5, 3, 5, 3):
            torch.nn.functional.cross_entropy(model(x.to(DTYPES[dtype])), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if flush:
                tape.flush()
    store = Store(tmp_path)
    assert (len(store.manifest.shards) > 1) == flush
    blocks = list(store.blocks("2", errors=True))
    assert torch.equal(torch.cat([b.keys for b in blocks]), torch.cat(keys))
    assert torch.equal(torch.cat([b.errors for b in blocks if b.errors is not None]), torch.cat(errors))
    ids = np.random.default_rng(0).permutation(15)
    assert torch.equal(store.gather("2", ids, "key"), torch.cat(keys)[ids])
    assert torch.equal(store.gather("2", ids, "error"), torch.cat(errors)[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 9), upto=st.integers(0, 5), ids=st.lists(st.integers(0, 14), max_size=20), flush=st.booleans()
)
def test_blocks_of_any_size_hold_the_slots_in_order(dtype, rows, upto, ids, flush, memories):
    path = memories[dtype, flush]
    store, slots = Store(path), Naive(path).slots("0")
    blocks = list(store.blocks("0", errors=True, rows=rows))
    assert all(len(block.slots) <= rows for block in blocks)
    assert np.concatenate([block.slots for block in blocks]).tolist() == list(range(15))
    assert slots.errors is not None
    for name, scale, expected in (("keys", "key_scale", slots.keys), ("errors", "error_scale", slots.errors)):
        parts = []
        for block in blocks:
            values, factor = getattr(block, name).double(), getattr(block, scale)
            parts.append(values if factor is None else values * factor.double().unsqueeze(1))
        assert torch.equal(torch.cat(parts), expected)
    assert np.concatenate([block.steps for block in blocks]).tolist() == slots.step.tolist()
    assert np.concatenate([block.visits for block in blocks]).tolist() == slots.visit.tolist()
    some = list(store.blocks("0", errors=False, rows=rows, upto=upto))
    assert all(block.errors is None for block in some)
    assert {s for block in some for s in block.steps if s <= upto} == set(range(1, upto + 1))
    found = store.gather("0", np.array(ids, dtype=np.int64), "key")
    close(found, slots.keys[ids])


@pytest.fixture(scope="module")
def memories(tmp_path_factory):
    out = {}
    for dtype in DTYPES:
        for flush in (False, True):
            out[dtype, flush] = tmp_path_factory.mktemp("memory")
            run_of(out[dtype, flush], dtype, flush)
    return out


@given(setup=setups())
def test_the_store_and_the_naive_reader_read_the_same(setup, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    store, naive = run.memory.store, Naive(run.path)
    assert store.visits.to_pylist() == naive.visits
    for layer in store.manifest.layers:
        slots = naive.slots(layer.name)
        ids = np.arange(store.slots(layer.name))
        calls = store.calls(layer.name)
        assert calls.visits_of(ids).tolist() == slots.visit.tolist()
        assert calls.positions_of(ids).tolist() == slots.position.tolist()
        assert calls.step[calls.calls_of(ids)].tolist() == slots.step.tolist()
        assert torch.equal(store.gather(layer.name, ids, "key"), slots.keys)
    for name in store.parameters:
        steps, transitions, scale, _ = store.schedule(name)
        moves = naive.transitions(name)
        assert steps.tolist() == [step for step, _, _ in moves]
        for t, s, (_, a, b) in zip(transitions, scale, moves, strict=True):
            assert np.array_equal(t[:4].reshape(2, 2), a) and np.array_equal(t[4:6] * s, b)


@pytest.mark.parametrize("leading", [(2, 3), (3, 2, 2)], ids=str)
def test_positions_number_the_rows_of_an_example(leading, tmp_path):
    model = tokens()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        model.each(torch.randn(*leading, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
    calls = Store(tmp_path).calls("each")
    ids = np.arange(int(np.prod(leading)))
    size = int(np.prod(leading[1:]))
    assert calls.positions_of(ids).tolist() == list(range(size)) * leading[0]
    assert calls.visits_of(ids).tolist() == [v for v in range(leading[0]) for _ in range(size)]


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    run_of(tmp_path / "memory", flush=True, model=whole())
    manifest = load_manifest(tmp_path / "memory")
    manifest.save(tmp_path)
    assert load_manifest(tmp_path) == manifest


# ---------------------------------------------------------------- snapshots


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_rest_is_known_at_every_step_it_was_looked_at(every, tmp_path):
    model = whole()
    run = trained(tmp_path, model, sgd(model), batches(6, 4, 5, 3), snapshot_every=every)
    for step in (s for s in range(7) if s % every == 0):
        for name, tensor in run.memory.at(step).weights().items():
            if name in run.memory.certificate.rest:
                assert torch.equal(tensor, run.states[step][name])
    if every > 1:
        with pytest.raises(HorizonError, match="snapshot_every=1"):
            run.memory.at(1).weights()


def test_a_rest_that_does_not_change_is_kept_once(tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.LayerNorm(4, elementwise_affine=False), torch.nn.Linear(4, 3)
    )
    model.register_buffer("table", torch.arange(1000.0))
    model = model.double()
    run = trained(tmp_path, model, sgd(model), batches(5, 3, 5, 3))
    names = [name for file in (tmp_path / "snapshots").glob("*") for name in load_file(file)]
    assert not any(name.startswith("table@") for name in names)
    assert torch.equal(run.memory.at(3).weights()["table"], model.get_buffer("table"))


# ---------------------------------------------------------------- tensors

ANY = [
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
]


@given(
    kinds=st.lists(st.tuples(st.sampled_from(ANY), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=6),
    seed=seeds,
)
def test_a_file_of_tensors_is_read_by_safetensors(kinds, seed, tmp_path_factory):
    random = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{i}": torch.randint(0, 2, shape, generator=random).to(dtype) for i, (dtype, shape) in enumerate(kinds)
    }
    path = tmp_path_factory.mktemp("files") / "some.safetensors"
    write_tensors(path, {name: [tensor] for name, tensor in tensors.items()})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_pieces_are_joined_along_their_first_axis(sizes, tmp_path_factory):
    pieces = [torch.randn(size, 3) for size in sizes]
    path = tmp_path_factory.mktemp("files") / "some.safetensors"
    write_tensors(path, {"joined": pieces})
    assert torch.equal(load_file(path)["joined"], torch.cat(pieces))


def test_a_large_file_is_written_whole(tmp_path):
    """Large files go past the page cache, a megabyte at a time."""
    tensor = torch.arange(5_000_003, dtype=torch.int16)
    write_tensors(tmp_path / "large.safetensors", {"a": [tensor], "b": [tensor[:7].float()]})
    found = load_file(tmp_path / "large.safetensors")
    assert torch.equal(found["a"], tensor) and torch.equal(found["b"], tensor[:7].float())


@pytest.mark.parametrize("direct", [True, False], ids=["past the cache", "through the cache"])
@given(
    rows=st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), min_size=1, max_size=4),
    width=st.integers(1, 9),
)
def test_tensors_that_begin_on_pages_are_read_as_they_were_written(direct, rows, width, tmp_path_factory):
    """Pieces that begin on a page are written directly, the others through a buffer: the file is the same."""
    arena, path = SlotArena(), tmp_path_factory.mktemp("files") / "some.safetensors"
    tensors = {}
    for i, sizes in enumerate(rows):
        pieces = [
            arena.room((size, width), torch.float16) if (size + i) % 3 else torch.empty(size, width).half()
            for size in sizes
        ]
        tensors[f"t{i}"] = [piece.copy_(torch.randn(piece.shape)) for piece in pieces]
    with mock.patch.object(out, "DIRECT_FROM", 1 if direct else 1 << 40):
        entry = write_tensors(path, tensors, paged=True)
    verify(path, entry, content=True)
    found = load_file(path)
    assert {name for name in found if not name.startswith("#pad")} == tensors.keys()
    for name, pieces in tensors.items():
        assert torch.equal(found[name], torch.cat(pieces))
    header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    assert (8 + len(header)) % 4096 == 0
    assert all(about["data_offsets"][0] % 4096 == 0 for name, about in json.loads(header).items() if name in tensors)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_model_of_mixed_types_is_kept_and_read(precision, tmp_path):
    """Batch normalisation counts batches in int64, behind weights that may end anywhere."""
    model = whole().float()
    model.register_buffer("odd", torch.ones(3, dtype=precision))
    model.register_buffer("flags", torch.ones(3, dtype=torch.bool))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    data = [(x.float(), y) for x, y in batches(3, 4, 5, 3)]
    run = trained(tmp_path, model, sgd(model), data, dtype="float16")
    for step, state in enumerate(run.states):
        for name, tensor in run.memory.at(step).weights().items():
            if name in run.memory.certificate.rest:
                assert torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype


def test_the_bytes_on_disk_are_as_announced(tmp_path):
    """Keys and errors take T · Σ (d_in + d_out) numbers, and little more (spec/dual-form.md §5.2, 10)."""
    model = mlp(50, 40, 10).float()
    data = [(x.float(), y) for x, y in batches(20, 64, 50, 10)]
    run = trained(tmp_path, model, sgd(model), data, dtype="float16")
    size = sum(file.stat().st_size for file in (tmp_path / "shards").glob("*"))
    expected = 20 * 64 * 2 * (50 + 40 + 40 + 10)
    assert expected < size < 1.05 * expected + 4096
    assert isinstance(run.memory.visits, pa.Table)
