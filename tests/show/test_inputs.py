"""Rows of a file: the same numbers from every kind of file, and nothing is unpickled."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from dualform.errors import DataNotFound, QueryError
from dualform.show.inputs import KINDS, as_inputs, parse_rows, read_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("files"), np.random.default_rng(0).normal(size=(5, 3))
    table = pa.table({name: data[:, i] for i, name in enumerate("abc")})
    np.save(folder / "x.npy", data)
    np.savez(folder / "x.npz", x=data, other=data[:1])
    pyarrow.csv.write_csv(table, folder / "x.csv")
    pq.write_table(table, folder / "x.parquet")
    save_file({"x": data, "other": data[:1]}, folder / "x.safetensors")
    return folder, torch.from_numpy(data)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(files, kind):
    folder, data = files
    key = "x" if kind in (".npz", ".safetensors") else None
    torch.testing.assert_close(read_rows(folder / f"x{kind}", [3, 0, -1], key), data[[3, 0, -1]])


def test_columns_of_a_table_are_chosen_by_name_and_lists_are_rows(files, tmp_path):
    folder, data = files
    torch.testing.assert_close(read_rows(folder / "x.parquet", [1], "c, a"), data[1:2, [2, 0]])
    pq.write_table(pa.table({"pixels": data.tolist(), "name": list("abcde")}), tmp_path / "lists.parquet")
    torch.testing.assert_close(read_rows(tmp_path / "lists.parquet", [2], "pixels"), data[2:3])
    with pytest.raises(QueryError, match="'name' does not hold numbers"):
        read_rows(tmp_path / "lists.parquet", [2], "name")


def test_what_is_not_there_is_said(files):
    folder, _ = files
    with pytest.raises(DataNotFound, match="there is no file"):
        read_rows(folder / "none.npy", [0])
    with pytest.raises(QueryError, match="is not one of"):
        (folder / "x.pt").touch()
        read_rows(folder / "x.pt", [0])
    with pytest.raises(QueryError, match="has no row 5"):
        read_rows(folder / "x.npy", [5])
    with pytest.raises(QueryError, match="more than one array"):
        read_rows(folder / "x.npz", [0])
    with pytest.raises(QueryError, match="has no 'y'"):
        read_rows(folder / "x.safetensors", [0], "y")


def test_pickles_are_refused(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    for name in ("objects.npy", "objects.npz"):
        with pytest.raises(QueryError, match="cannot read"):
            read_rows(tmp_path / name, [0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_refused_in_a_sentence(tmp_path, kind):
    (tmp_path / f"x{kind}").write_bytes(b"\x00broken\xff\n")
    with pytest.raises(QueryError, match=r"cannot read|does not hold numbers|has no row"):
        read_rows(tmp_path / f"x{kind}", [0])


def test_rows_are_numbers_and_stretches():
    assert parse_rows("0,3,5") == [0, 3, 5]
    assert parse_rows("2:5,-1,:2") == [2, 3, 4, -1, 0, 1]
    for text in ("", "a", "3:3", "1:", "0;1"):
        with pytest.raises(QueryError, match="0,3,5"):
            parse_rows(text)


def test_integers_are_tokens_only_for_an_embedding():
    data = torch.tensor([[1, 2]], dtype=torch.uint8)
    assert as_inputs(data, nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))).dtype == torch.int64
    assert as_inputs(data, nn.Linear(2, 2)).dtype == torch.float32
    assert as_inputs(data.double(), nn.Linear(2, 2).double()).dtype == torch.float64
