"""``--json``: one JSON document on standard output, with the numbers that Python gives."""

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dualform.show.commands import cli
from dualform.show.commands.as_json import as_json
from dualform.show.commands.help import sections

MODEL = "dualform.models:MLP(16, 8, 3)"


def call(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "80", "NO_COLOR": "1"})


@dataclass(frozen=True)
class Answer:
    layer: str
    values: torch.Tensor
    columns: dict

    def to_pandas(self):
        return pd.DataFrame(self.columns)


cells = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text()


@given(st.lists(st.tuples(cells, cells), min_size=1))
def test_any_table_becomes_one_object_a_line(lines):
    frame = pd.DataFrame(lines, columns=["one", "other"], dtype=object)
    answer = as_json(Answer("fc1", torch.ones(2), frame.to_dict("list")))
    assert answer["layer"] == "fc1" and "values" not in answer
    text = json.dumps(answer, allow_nan=False)  # infinity and NaN are no JSON
    assert [row.keys() for row in json.loads(text)["rows"]] == [{"one", "other"}] * len(lines)
    for row, (one, _) in zip(answer["rows"], lines, strict=True):
        assert row["one"] == one or (row["one"] is None and not np.isfinite(one))


def test_missing_values_times_and_named_indices_are_kept():
    frame = pd.DataFrame(
        {"n": pd.array([1, None], dtype="Int64"), "t": [pd.NaT, pd.Timestamp("2024-01-02")], (1, "a"): [0.5, np.inf]},
        index=pd.Index(["p", "q"], name="parameter"),
    )
    rows = as_json({"table": Answer("fc1", torch.ones(1), {}), "none": None, "frames": [1, np.float32(0.5)]})
    assert rows == {"table": {"layer": "fc1", "rows": []}, "none": None, "frames": [1, 0.5]}

    class Table:
        def to_pandas(self):
            return frame

    first, second = as_json(Table())["rows"]
    assert first == {"parameter": "p", "n": 1, "t": None, "1/a": 0.5}
    assert second["n"] is None and second["t"].startswith("2024-01-02") and second["1/a"] is None


def test_ask_prints_the_numbers_of_python_and_nothing_else(recorded, tmp_path):
    np.save(tmp_path / "x.npy", recorded.x.numpy())
    ask = ("ask", recorded.path, "--model", MODEL, "--data", tmp_path / "x.npy", "--rows", "0,7", "-k", 3)
    result = call(*ask, "--layer", "fc1", "--without", "label = 1", "--json")
    assert result.exit_code == 0 and not result.stderr, result.stderr
    printed = json.loads(result.stdout)
    spot = recorded.memory.attend(recorded.model, recorded.x[[0, 7]])
    assert printed["rows"] == [0, 7] and printed["step"] == 30
    np.testing.assert_allclose(printed["output"], spot.prediction.detach(), rtol=1e-6)
    expected = spot.ask("fc1", top=3, by=["label"], per="example")
    assert expected.hits is not None and expected.hits.per == printed["per"]
    assert len(printed["notes"]) == 2 and "everything else held fixed" in printed["notes"][1]
    hits = pd.DataFrame(printed["answer"]["hits"]["rows"])
    np.testing.assert_allclose(hits["contribution"], expected.hits.to_pandas()["contribution"], rtol=1e-6)
    sums = pd.DataFrame(printed["answer"]["groups"]["label"]["rows"]).drop(columns="query")
    np.testing.assert_allclose(sums, expected.groups["label"].to_pandas(), rtol=1e-5)
    masked = recorded.memory.without("label = 1").predict(recorded.model, recorded.x[[0, 7]])
    np.testing.assert_allclose(printed["output_without"], masked, rtol=1e-6)


def test_inspect_prints_what_python_says_of_a_memory(recorded):
    printed = json.loads(call("inspect", recorded.path, "--json").stdout)
    memory = recorded.memory
    assert printed["steps"] == memory.step and printed["visits"] == len(memory.visits) and not printed["marks"]
    assert printed["certificate"] == dict(memory.certificate) and printed["floor"] == dict(memory.certificate.floor)
    assert [layer["layer"] for layer in printed["layers"]] == list(memory.layers)
    on_disk = sum(file.stat().st_size for file in (recorded.path / "shards").iterdir())
    assert printed["bytes"]["shards"] == on_disk


@pytest.mark.parametrize("words", [(), ("noteerror",)])
def test_help_prints_the_texts_by_name(words):
    printed = json.loads(call("help", *words, "--json").stdout)
    assert printed == (sections() if not words else {"NoteError": sections()["NoteError"]})


def test_an_error_is_a_sentence_and_no_json():
    result = call("inspect", "nowhere", "--json")
    assert result.exit_code == 1 and not result.stdout and "there is no memory" in result.stderr
