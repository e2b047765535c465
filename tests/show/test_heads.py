"""What heads separate, as a page, as JSON and in the terminal: the numbers of the report itself."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Attending, attention_tokens
from safetensors.torch import save_model
from serving import serving
from torch import nn
from typer.testing import CliRunner

from dualform import svm
from dualform.attention import build
from dualform.errors import QueryError
from dualform.show.commands.cli import app
from dualform.show.views.attention.separation import (
    DirectionExamples,
    HeadsView,
    HeadTrajectory,
    SeparationQuestion,
    SeparationView,
    separation,
)
from dualform.show.views.explorer import Explorer
from dualform.show.views.render import as_plain
from dualform.show.views.work import PendingWork, WorkQueue

pytest.importorskip("numba")


def patient(explorer: Explorer) -> Explorer:
    """The same, which does at once what would otherwise have to be started."""
    explorer.work_queue = WorkQueue(patience=float("inf"))
    return explorer


def numbers_of(explorer: Explorer, layer: str, rows: int) -> svm.Report:
    """The report that the page is about."""
    model = explorer.memory.load_into(explorer.model, progress=False)
    return svm.reports(model, explorer.inputs("test", range(rows)), layers=[layer], progress=False)[layer]


def test_the_page_shows_the_report(attention_explorer):
    explorer = patient(attention_explorer)
    view = separation(explorer, SeparationQuestion(head=1, rows=8))
    report = numbers_of(explorer, "attention", 8)
    assert isinstance(view.found, HeadsView) and view.layers == ["attention"] and view.heads == 2
    (head,) = view.found.heads
    assert head.head == 1 and sum(head.margins) == len(report[1].margins)
    assert head.margin_range == pytest.approx((float(report[1].margins[0]), float(report[1].margins[-1])), abs=1e-6)
    assert sum(head.places) == pytest.approx(1.0) and 0 < sum(share for _, share in head.items) <= 1 + 1e-9
    assert [each.share for each in head.support] == pytest.approx([s.share for s in report[1].support(12)], abs=1e-4)
    tokens = attention_tokens()
    first = report[1].support(1)[0]
    assert f"‘w{int(tokens[first.sequence, first.token])}’" in head.support[0].token


def test_the_training_examples_that_built_it_sum_to_the_whole(attention_explorer):
    explorer = patient(attention_explorer)
    view = separation(explorer, SeparationQuestion(rows=8))
    assert isinstance(view.built, DirectionExamples) and isinstance(view.through, HeadTrajectory)
    report = numbers_of(explorer, "attention", 8)
    direction = report[0].separation.W / report[0].separation.W.norm()
    assert view.built.total == pytest.approx(float((report[0].W * direction).sum()), abs=1e-4)
    assert len(view.built.most) == 7 and view.built.most[0].mean >= view.built.most[-1].mean >= view.built.least[0].mean
    assert view.built.most[0].shown is not None
    norms = next(each for each in view.through.curves if each.name == "norm")
    assert view.through.steps[0] == 0 and view.through.steps[-1] == 12
    assert norms.values[-1] == pytest.approx(float(report[0].W.norm()), rel=1e-4)


@pytest.mark.parametrize("fixture", [pytest.param("series_explorer", marks=pytest.mark.slow), "patches_explorer"])
def test_heads_that_are_seen_in_their_own_space_say_what_they_cannot(fixture, request):
    explorer = patient(request.getfixturevalue(fixture))
    view = separation(explorer, SeparationQuestion(rows=4))
    assert isinstance(view.found, HeadsView) and isinstance(view.built, str) and "model’s space" in view.built
    assert view.found.heads[0].support and not view.found.heads[0].items


def test_what_takes_long_is_announced_first(attention_explorer):
    view = separation(attention_explorer, SeparationQuestion())
    assert isinstance(view.found, PendingWork) and view.through is None and view.built is None


def test_what_makes_no_sense_is_refused(attention_explorer, digits_explorer):
    for asking in (
        SeparationQuestion("head"),
        SeparationQuestion(head=2),
        SeparationQuestion(head=-1),
        SeparationQuestion(above=100),
    ):
        with pytest.raises(QueryError):
            separation(attention_explorer, asking)
    with pytest.raises(QueryError, match="needs a network with attention heads"):
        separation(digits_explorer, SeparationQuestion())


def test_the_json_is_the_page(attention_explorer):
    with serving(patient(attention_explorer)) as served:
        found, page = served.get("/heads.json?head=1&rows=6").json, served.get("/heads?head=1&rows=6")
        view = separation(served.explorer, SeparationQuestion(head=1, rows=6))
        assert isinstance(view, SeparationView) and found == as_plain(view)
        assert page.status == 200 and "style=" not in page.text
        for text in (
            "What do the heads separate?",
            "Training examples that built",
            "through training",
            "separated from",
        ):
            assert text in page.text
        assert '<a href="/heads" aria-current="page"' in page.text
        for path in ("head=9", "above=200", "layer=x", "rows=x"):
            assert served.get(f"/heads?{path}").status == 400


# ---------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A checkpoint, tokens, and a module that makes the model."""
    torch.manual_seed(0)
    save_model(Attending(), str(tmp_path / "model.safetensors"))
    np.savez(tmp_path / "test.npz", inputs=attention_tokens().numpy())
    (tmp_path / "words.json").write_text(str([f"w{i}" for i in range(11)]).replace("'", '"'))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["heads", *words])


MODEL = ["--model", "conftest:Attending", "--rows", "0:6", "--null", "1"]


def test_the_command_prints_the_report(files):
    found = command("model.safetensors", "test.npz", *MODEL, "--tokens", "words.json", "-o", "heads.html")
    assert found.exit_code == 0, found.output
    torch.manual_seed(0)
    report = svm.reports(Attending(), attention_tokens()[:6], progress=False, null=1)["attention"]
    for line in str(report).splitlines()[:4]:
        assert " ".join(line.split()) in " ".join(found.output.split())
    page = (files / "heads.html").read_text()
    assert "What do the heads separate?" in page and re.search(r"‘w\d+’", page) and "script" not in page
    assert page.count("<summary>Head") == 2


def test_a_memory_is_followed_through_training(files, attention_run):
    found = command(str(attention_run), "test.npz", *MODEL, "--moments", "2", "--no-nuclear", "-o", "heads.html")
    assert found.exit_code == 0, found.output
    assert "through training" in found.output and re.search(r"after step +0 +6 +12\n", found.output)
    assert "Head 1 of attention through training" in (files / "heads.html").read_text()


class Both(nn.Module):
    """A layer that can be reported on, and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.soft, self.linear = nn.Embedding(11, 8), build("softmax", 8, 2), build("linear", 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.soft(self.embed(x))).mean(1)


def test_layers_that_cannot_be_reported_on_are_named(files):
    save_model(Both(), str(files / "both.safetensors"))
    words = [
        "both.safetensors",
        "test.npz",
        "--model",
        "test_heads:Both",
        "--rows",
        "0:4",
        "--null",
        "0",
        "--no-nuclear",
    ]
    found = command(*words)
    assert found.exit_code == 0, found.output
    assert "soft: 2 heads" in found.output and "linear: this LinearAttention has a linear kernel" in found.output
    refused = command(*words, "--layer", "linear")
    assert refused.exit_code == 1 and "linear kernel" in refused.output
    assert command(*words, "--layer", "x").exit_code == 1


class Classed(Attending):
    """The same with a class token, which is no token of the text."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        return self.out(self.attention(x, x, x, need_weights=False)[0][:, 0])


def test_a_class_token_does_not_stand_in_the_way(files):
    save_model(Classed(), str(files / "classed.safetensors"))
    words = ["classed.safetensors", "test.npz", "--model", "test_heads:Classed", "--null", "0", "--no-nuclear"]
    found = command(*words, "--rows", "0:4", "-o", "heads.html")
    assert found.exit_code == 0, found.output
    assert "token 6" in (files / "heads.html").read_text()


def test_bad_input_is_a_sentence(files):
    np.savez(files / "few.npz", inputs=attention_tokens()[:3].numpy())
    np.savez(files / "float.npz", inputs=attention_tokens().numpy() / 2)
    np.savez(files / "far.npz", inputs=attention_tokens().numpy() + 100)
    model = ["--model", "conftest:Attending", "--null", "0", "--no-nuclear"]
    assert command("model.safetensors", "few.npz", *model).exit_code == 0  # fewer rows than are taken by themselves
    for words, said in (
        (["model.safetensors", "float.npz"], "cannot take these inputs"),
        (["model.safetensors", "far.npz"], "cannot take these inputs"),
        (["model.safetensors", "test.npz", "--moments", "2"], "--moments needs a memory"),
        (["model.safetensors", "test.npz", "-o", "nowhere/x.html"], "there is no folder nowhere"),
        (["model.safetensors", "none.npz"], "there is no file"),
        (["none.safetensors", "test.npz"], "there is no file"),
    ):
        found = command(*words, *model)
        assert found.exit_code == 1 and said in " ".join(found.output.split()), found.output
