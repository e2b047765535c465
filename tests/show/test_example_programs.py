"""The short programs in examples/ run, find what they claim to find, and are as long as the README says."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dualform
from dualform.errors import DataNotFound
from dualform.show.commands import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = r"[-+]\d+\.\d+"

Run = Callable[[str], tuple[dict[str, Any], str]]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Run:
    """Run an example in an empty folder: its variables and what it printed."""
    pytest.importorskip("mlxtend", reason="the extra demo is not installed")
    monkeypatch.chdir(tmp_path)

    def run_example(name: str) -> tuple[dict[str, Any], str]:
        try:
            variables = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
        except DataNotFound as error:
            pytest.skip(str(error))
        return variables, capsys.readouterr().out

    return run_example


def lines_of_code(file: Path) -> int:
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def test_the_readme_lists_every_example_with_its_lines_of_code():
    listed = {
        name: int(lines) for name, lines in re.findall(r"^\| \[(\w+)\.py\]\(.*\| (\d+) \|$", README, re.MULTILINE)
    }
    assert listed == {file.stem: lines_of_code(file) for file in (ROOT / "examples").glob("*.py")}


def test_the_wrong_labels_of_the_table_are_found_and_a_path_is_enough_for_commands(run: Run):
    variables, printed = run("table")
    assert float(re.findall(r"score: AUC ([\d.]+)", printed)[0]) > 0.95
    assert variables["wrong"].sum() == len(variables["x"]) // 20
    for command in ("inspect", "ask", "suspects", "report"):
        result = CliRunner().invoke(cli.app, [command, "runs/cars"], env={"COLUMNS": "160", "NO_COLOR": "1"})
        assert result.exit_code == 0, result.stderr
        if command != "report":
            assert "eight" in result.stdout, "classes have the names of the table"
    assert "A mistake" in Path("report.html").read_text(encoding="utf-8")


def test_passages_of_a_review_are_made_of_passages_of_the_same_opinion(run: Run):
    variables, printed = run("reviews")
    spot, hits, y = variables["spot"], variables["hits"], variables["y"]
    assert len(printed.split("made of:")) == 1 + len(variables["asked"]) > 2
    assert dualform.open("runs/reviews").certificate.worst < 0.05
    assert all(hit.contribution > 0 and hit.label == y[hit.index] for hit in hits)
    same = [hit.label == spot.prediction[hit.query].argmax() for hit in hits]
    assert sum(same) > len(same) / 2


@pytest.mark.slow
def test_the_fables_of_a_sentence_add_up_to_it(run: Run):
    variables, _ = run("characters")
    parts, sentence = variables["parts"], variables["sentence"]
    total = variables["lead"](variables["model"](sentence))
    assert parts.total[0].item() == pytest.approx(total.item(), rel=1e-3)
    whole = parts.values[0].sum() + parts.bias[0].sum() + parts.initial[0] + parts.residual[0]
    assert whole.item() == pytest.approx(parts.total[0].item(), rel=1e-6) and abs(parts.residual[0]) < 0.1
    assert set(parts.names) == set(variables["fables"])
