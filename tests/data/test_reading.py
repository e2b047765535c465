"""One reader: the same rows from every kind of table and file, read as training saw them, and errors that help."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dualform.data import columns_of, read
from dualform.data.reading import KINDS, ByteVocabulary
from dualform.errors import DataNotFound, QueryError

COLOURS = ("blue", "green", "red")


def people(rows: int = 30, seed: int = 0) -> pa.Table:
    """A table with numbers, words and a label in words."""
    draw = np.random.default_rng(seed)
    return pa.table({
        "age": draw.integers(20, 80, rows), "colour": [COLOURS[i] for i in draw.integers(0, 3, rows)],
        "weight": draw.normal(70, 10, rows), "member": draw.integers(0, 2, rows).astype(bool),
        "sick": [["no", "yes"][i] for i in draw.integers(0, 2, rows)],
    })  # fmt: skip


TABLE = people()
TRAIN = read(TABLE, label="sick", categories=["colour"], scale=True)


def forms(table: pa.Table, folder):
    """The table as everything that can be read."""
    pyarrow.csv.write_csv(table, folder / "t.csv")
    pq.write_table(table, folder / "t.parquet")
    yield from (table, folder / "t.csv", str(folder / "t.parquet"))
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    yield pandas.read_csv(folder / "t.csv")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(table)
    dataset.save_to_disk(folder / "saved", num_shards=2)
    backwards = list(range(len(table) - 1, -1, -1))
    yield from (dataset, dataset.select(backwards).select(backwards), folder / "saved")


def test_every_form_of_a_table_gives_the_same_rows(tmp_path):
    for source in forms(TABLE, tmp_path):
        rows = read(
            source, label="sick", categories=["colour"], scale=len(source) > 0 if hasattr(source, "sort") else True
        )
        if not len(rows):
            continue
        assert rows.columns == TRAIN.columns and torch.equal(rows.inputs, TRAIN.inputs)
        assert rows.labels is not None and TRAIN.labels is not None and torch.equal(rows.labels, TRAIN.labels)


def test_rows_are_the_numbers_of_the_table_in_order():
    """The naive version, number by number."""
    assert TRAIN.columns is not None and TRAIN.features == (
        "age", "colour = blue", "colour = green", "colour = red", "weight", "member",
    )  # fmt: skip
    for row, line in enumerate(TABLE.to_pylist()):
        expected = []
        for name in ("age", "colour", "weight", "member"):
            if name == "colour":
                expected += [float(line[name] == colour) for colour in COLOURS]
            else:
                values = np.array(TABLE[name].to_pylist(), dtype=float)
                expected.append((float(line[name]) - values.mean()) / values.std())
        assert TRAIN.inputs[row].tolist() == pytest.approx(expected, abs=1e-6)
        assert TRAIN.labels is not None and TRAIN.classes[int(TRAIN.labels[row])] == line["sick"]


@given(order=st.permutations(range(30)), count=st.integers(1, 30))
def test_other_rows_are_read_as_training_saw_them(order, count):
    """Also one row alone, of which no word list and no deviation could be learned."""
    some = TABLE.take(order[:count])
    rows = read(some, columns=TRAIN.columns)
    assert torch.equal(rows.inputs, TRAIN.inputs[order[:count]]) and rows.columns == TRAIN.columns
    assert torch.equal(read(TABLE, columns=TRAIN.columns, rows=order[:count]).inputs, rows.inputs)
    unlabelled = read(some.drop_columns(["sick"]), columns=TRAIN.columns)
    assert unlabelled.labels is None and torch.equal(unlabelled.inputs, rows.inputs)


def test_columns_are_plain_text_that_reads_back():
    columns = TRAIN.columns
    assert columns is not None
    assert columns_of(json.loads(json.dumps(vars(columns)))) == columns
    for broken in (
        {},
        {"names": "age"},
        {"names": [1]},
        {"names": [], "scale": {"age": "x"}},
        {"names": [], "classes": 3},
    ):
        with pytest.raises(QueryError, match="not the columns"):
            columns_of(broken)


def test_rows_are_shown_as_they_stand_in_the_table():
    columns, line = TRAIN.columns, TABLE.to_pylist()[4]
    assert columns is not None
    words = columns.in_words(TRAIN.inputs[4])
    assert words[:2] == [f"age {line['age']}", f"colour {line['colour']}"]
    assert words[2] == f"weight {line['weight']:.4g}"


def test_words_that_look_like_numbers_stay_words(tmp_path):
    (tmp_path / "codes.csv").write_text("code,y\n007,1\n7,0\n12,1\n")
    rows = read(tmp_path / "codes.csv", label="y", categories=["code"])
    assert rows.columns is not None and rows.columns.categories == {"code": ("007", "12", "7")}
    (tmp_path / "one.csv").write_text("code\n007\n")
    assert read(tmp_path / "one.csv", columns=rows.columns).inputs.tolist() == [[1, 0, 0]]


def test_a_pandas_category_keeps_its_order():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    sizes = pandas.Categorical(["s", "l", "s"], categories=["s", "m", "l"])
    rows = read(pandas.DataFrame({"size": sizes, "label": [0, 1, 0]}))
    assert rows.features == ("size = s", "size = m", "size = l") and rows.inputs[1].tolist() == [0, 0, 1]


def test_class_names_of_the_datasets_library_are_kept(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["cat", "dog"])})
    dataset = datasets.Dataset.from_dict({"x": [1.0, 2.0], "label": [1, 0]}, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "x.parquet")
    for source in (dataset, tmp_path / "saved", tmp_path / "x.parquet"):
        rows = read(source)
        assert rows.classes == ("cat", "dog") and rows.labels is not None and rows.labels.tolist() == [1, 0]


def test_a_folder_with_splits_asks_for_one_of_them(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1.0], "label": [1]})})
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(QueryError, match=r"holds the splits \['train'\]"):
        read(tmp_path / "both")
    with pytest.raises(QueryError, match=r"holds the splits \['train'\]"):
        read(both)
    assert read(tmp_path / "both" / "train").inputs.tolist() == [[1.0]]


def test_a_saved_folder_cannot_point_outside_of_itself(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(QueryError, match="outside of the folder"):
        read(tmp_path)


TEXTS = pa.table({"text": ["ab", "abcd", "é"], "label": ["good", "bad", "good"]})


def test_texts_become_tokens_with_their_padding():
    rows = read(TEXTS, tokens="bytes")
    assert rows.inputs.dtype == torch.int64 and rows.inputs[0].tolist() == [97, 98, 0, 0]
    assert rows.others["padding"].tolist()[0] == [False, False, True, True]
    assert rows.classes == ("bad", "good") and rows.labels is not None and rows.labels.tolist() == [1, 0, 1]
    vocabulary = ByteVocabulary()
    for row, text in enumerate(TEXTS["text"].to_pylist()):
        assert "".join(vocabulary.decode(rows.inputs[row][~rows.others["padding"][row]].tolist())) == text
    assert read(TEXTS, tokens=vocabulary, length=3).inputs.shape == (3, 3)
    assert read(TEXTS, tokens=vocabulary, length=9).inputs.shape == (3, 9)


def test_a_list_of_words_comes_from_a_file(tmp_path):
    words = ["<unk>", "good", "film"]
    with pytest.raises(QueryError, match=r"tokens is a list: pass 'bytes', or the path of a list"):
        read(TEXTS, tokens=words)  # type: ignore[arg-type]
    (tmp_path / "words.txt").write_text("\n".join(words))
    rows = read(pa.table({"text": ["good film", "a film"]}), tokens=tmp_path / "words.txt")
    assert rows.inputs.tolist() == [[1, 2], [0, 2]], "a word that is not in the list is <unk>"


def test_lists_are_rows_and_get_padding_where_their_lengths_differ():
    rows = read(pa.table({"input_ids": [[1, 2], [3]], "label": [0, 1]}))
    assert rows.inputs.tolist() == [[1, 2], [3, 0]] and rows.others["padding"].tolist() == [[False] * 2, [False, True]]
    pixels = np.random.default_rng(0).normal(size=(4, 3, 3))
    rows = read(pa.table({"pixels": pixels.tolist(), "label": [0, 1, 0, 1]}), dtype=torch.float64)
    assert torch.equal(rows.inputs, torch.from_numpy(pixels)) and "padding" not in rows.others


# ---------------------------------------------------------------- files of numbers and of arrays


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
    rows = read(folder / f"x{kind}", columns=key, rows=[3, 0, -1], dtype=torch.float64)
    torch.testing.assert_close(rows.inputs, data[[3, 0, -1]])
    assert len(read(folder / f"x{kind}", columns=key, rows=slice(0, 2))) == 2


def test_columns_of_a_table_are_chosen_by_name(files):
    folder, data = files
    rows = read(folder / "x.parquet", columns=["c", "a"], rows=[1], dtype=torch.float64)
    torch.testing.assert_close(rows.inputs, data[1:2, [2, 0]])


def test_labels_and_further_arrays_come_from_the_same_file(tmp_path):
    np.savez(tmp_path / "x.npz", inputs=np.ones((3, 2)), labels=[0, 1, 2], padding=np.zeros((3, 2), bool), more=[1])
    rows = read(tmp_path / "x.npz", also=["padding"], rows=[2, 1])
    assert rows.labels is not None and rows.labels.tolist() == [2, 1] and list(rows.others) == ["padding"]


def test_big_endian_numbers_are_read(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3, dtype=">f4"))
    assert read(tmp_path / "x.npy").inputs.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, r"'colour' holds words, such as '\w+': name it in categories \(--categories\), leave it out with columns"),
        ({"columns": ["age", "hight"]}, r"no column 'hight': its columns are \['age', 'colour'"),
        ({"label": "ill"}, "no column 'ill'"),
        ({"categories": ["shape"]}, "no column 'shape'"),
        ({"categories": ["colour"], "learn": False}, "learned from the training examples"),
        ({"columns": ["age"], "learn": False}, r"'sick' holds words: name the classes .*--classes"),
        ({"columns": ["age"], "classes": ["no", "maybe"]}, "'sick' is 'yes' in row .* not one of 'no', 'maybe'"),
        ({"columns": ["age"], "rows": [30]}, "no row 30: it holds 30 rows"),
    ],
)
def test_errors_say_what_to_pass(change, says):
    with pytest.raises(QueryError, match=says):
        read(TABLE, **{"label": "sick", **change})


def test_words_that_training_did_not_see_are_refused():
    other = TABLE.slice(0, 3).set_column(1, "colour", pa.array(["red", "pink", "red"]))
    with pytest.raises(QueryError, match="'colour' is 'pink' in row 1, which is not one of 'blue', 'green', 'red'"):
        read(other, columns=TRAIN.columns)


def test_missing_values_are_refused_with_their_row(tmp_path):
    (tmp_path / "x.csv").write_text("a,label\n1,0\n,1\n,1\n")
    with pytest.raises(QueryError, match=r"'a' has no value in 2 of 3 rows \(the first is row 1\)"):
        read(tmp_path / "x.csv")


def test_numbers_that_are_none_are_missing_values():
    with pytest.raises(QueryError, match=r"'a' has no value in 1 of 3 rows \(the first is row 2\)"):
        read(pa.table({"a": [1.0, 2.0, float("nan")]}))


def test_options_of_tables_are_refused_for_arrays(files):
    for categories, scale in (("a", False), ((), True)):
        with pytest.raises(QueryError, match=r"columns of a table, and .*x\.npy holds arrays"):
            read(files[0] / "x.npy", categories=categories, scale=scale)


def test_what_cannot_be_read_is_said(files):
    folder, _ = files
    with pytest.raises(DataNotFound, match="there is no file"):
        read(folder / "none.npy")
    (folder / "x.pt").touch()
    for source, says in (
        (folder / "x.pt", "is not one of"),
        (folder / "x.npz", "more than one array"),
        ([1], "a list"),
    ):
        with pytest.raises(QueryError, match=says):
            read(source)
    with pytest.raises(QueryError, match="has no 'y'"):
        read(folder / "x.safetensors", columns="y")
    with pytest.raises(QueryError, match="2020"):
        read(pa.table({"day": pa.array(["2020-01-01"]).cast(pa.date32())}))


def test_pickles_are_refused(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    for name in ("objects.npy", "objects.npz"):
        with pytest.raises(QueryError, match="cannot read"):
            read(tmp_path / name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_refused_in_a_sentence(tmp_path, kind):
    (tmp_path / f"x{kind}").write_bytes(b"\x00broken\xff\n")
    with pytest.raises(QueryError, match=r"cannot read|holds words|has no row"):
        read(tmp_path / f"x{kind}", rows=[0])
