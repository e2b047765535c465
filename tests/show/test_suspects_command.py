"""``dualform suspects``: the same answer as in Python, printed and exported."""

import csv
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dualform.show.commands import cli

MODEL = "dualform.models:MLP(16, 8, 3)"


def call(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def file(recorded, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.npz"
    np.savez(path, inputs=recorded.x.numpy(), labels=recorded.labels.numpy())
    return path


def test_suspects_are_those_of_python_printed_and_exported(recorded, file, tmp_path):
    out = tmp_path / "all.csv"
    options = ("--model", MODEL, "--data", file, "-k", 4, "--classes", "cat, dog,eel", "-o", out)
    result = call("suspects", recorded.path, *options)
    assert result.exit_code == 0, result.stderr
    suspects = recorded.memory.suspects(recorded.model, recorded.x, recorded.labels, progress=False)
    first, names = next(iter(suspects)), ("cat", "dog", "eel")
    change = f"{names[first.label]} → {names[first.suggested]}"
    assert change in next(line for line in result.stdout.splitlines() if line.split()[:1] == [str(first.index)])
    assert result.stdout.count(" → ") == 4 + 1 and "of 60 examples look wrong" in result.stdout
    with out.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["index"]) for row in rows] == suspects.table["index"].to_pylist()
    assert [float(row["score"]) for row in rows] == pytest.approx(suspects.table["score"].to_pylist(), abs=1e-6)


def test_the_memory_can_be_read_at_an_earlier_step(recorded, file):
    result = call("suspects", recorded.path, "--model", MODEL, "--data", file, "--step", 3)
    assert result.exit_code == 0 and "at step 3:" in result.stdout
    assert "30 examples were never used in training" in " ".join(result.stdout.split())


def test_a_file_without_labels_is_refused(recorded, tmp_path):
    np.save(tmp_path / "x.npy", recorded.x.numpy())
    result = call("suspects", recorded.path, "--model", MODEL, "--data", tmp_path / "x.npy")
    assert result.exit_code == 1 and "have no labels" in " ".join(result.stderr.split())


def test_a_folder_that_is_not_there_is_named(recorded, file, tmp_path):
    out = tmp_path / "nowhere" / "all.csv"
    result = call("suspects", recorded.path, "--model", MODEL, "--data", file, "-o", out)
    assert result.exit_code == 1 and str(out) in result.stderr.replace("\n", "")
