"""The command line: help, documents, answers, and errors in one sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import series_model, some_series
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

from dualform.errors import AskError
from dualform.explain import open_memory, survey
from dualform.models import MLP
from dualform.record import record
from dualform.show.commands import cli

MODEL = "dualform.models:MLP(16, 8, 3)"
COMMANDS = dict(get_command(cli.app).commands)  # pyright: ignore[reportAttributeAccessIssue]
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def call(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def data(recorded, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "x.npy"
    np.save(file, recorded.x.numpy())
    return file


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_stands_in_the_docs(name):
    result = call(name, "--help")
    assert result.exit_code == 0 and "Example" in result.stdout
    assert f"## dualform {name}" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_stands_in_the_docs(name):
    text = DOCS.read_text(encoding="utf-8")
    for option in COMMANDS[name].params:
        assert option.help, f"{name} {option.name}"
        assert option.opts[0] in text or option.name == "path", f"{name} {option.name}"


def test_inspect_shows_what_is_in_a_memory(recorded):
    result = call("inspect", recorded.path)
    assert result.exit_code == 0, result.stderr
    for word in (
        "30 steps",
        "300 visits",
        "fc1",
        "fc2",
        "source",
        "even, odd",
        "shards",
        "SGD",
        "rounding floor",
        "No marks",
    ):
        assert word in result.stdout.replace("odd, even", "even, odd"), word


def test_inspect_shows_a_memory_without_steps(tmp_path):
    model = MLP(4, 2)
    with record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "empty", progress=False):
        pass
    result = call("inspect", tmp_path / "empty")
    assert result.exit_code == 0 and "No step is complete" in result.stdout


def test_inspect_shows_a_survey_as_what_it_is(tmp_path):
    model = MLP(16, 8, 3)
    x, label = torch.randn(20, 16), torch.arange(20) % 3

    def losses(network, index):
        return torch.nn.functional.cross_entropy(network(x[index]), label[index], reduction="none")

    survey(
        model, losses, lambda index: index, tmp_path / "m", examples=20, columns={"label": label}, progress=False,
        checkpoints=[(model.state_dict(), 0.5), (model.state_dict(), 0.25)],
    )  # fmt: skip
    result = call("inspect", tmp_path / "m")
    printed = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.stderr
    for words in (
        "a survey of 20 examples at 2 checkpoints",
        "(learning rates 0.5, 0.25)",
        "fc1",
        "label",
        "approximations",
    ):
        assert words in printed
    assert "rebuilds the weights" not in printed and "steps, " not in printed


def test_inspect_says_that_a_recording_was_interrupted(tmp_path):
    model = MLP(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt), record(model, optimizer, tmp_path / "m", progress=False):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        raise KeyboardInterrupt
    printed = " ".join(call("inspect", tmp_path / "m").stdout.split())
    assert "interrupted (KeyboardInterrupt): the memory ends with the last complete step, 1." in printed


def test_inspect_shows_marks(tmp_path):
    model = MLP(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="outside"), record(model, optimizer, tmp_path / "m", progress=False):
        for step in range(8):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 7:
                with torch.no_grad():
                    model.get_parameter("fc1.weight").mul_(0.5)
    result = call("inspect", tmp_path / "m")
    assert "'fc1.weight' from step" in result.stdout


def test_ask_says_the_top_examples_the_totals_their_unit_and_the_residual(recorded, data):
    result = call("ask", recorded.path, "--model", MODEL, "--data", data, "--rows", "0,7", "-k", 3)
    assert result.exit_code == 0, result.stderr
    spot = recorded.memory.attend(recorded.model, recorded.x[[0, 7]])
    for hit in (next(iter(spot.top(3)[query])) for query in (0, 1)):
        assert f"{hit.contribution:+.2f}" in result.stdout
    for words in (
        "the whole network; examples ordered by",
        "out of all layers at once",
        "row 0:",
        "row 7:",
        "adds to the logit of the predicted class",
        "visits",
        "sum to the whole",
        "residual",
    ):
        assert words in " ".join(result.stdout.split()), words
    one_layer = call("ask", recorded.path, "--model", MODEL, "--data", data, "--layer", "fc2", "--per", "slot", "-k", 3)
    slot = next(iter(spot.top(3, layer="fc2", per="slot")))
    assert f"{slot.contribution:+.2f}" in one_layer.stdout and "weight α" in one_layer.stdout
    later = call("ask", recorded.path, "--model", MODEL, "--data", data, "--per", "visit", "-k", 1, "--after", 29)
    assert f" {next(iter(spot.top(1, per='visit', after=29))).contribution:+.2f}" in later.stdout


@pytest.mark.parametrize("score", ["contribution", "weight", "abs"])
@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_ask_takes_every_score_layer_and_column(recorded, data, score, layer):
    options = ("--score", score, "--layer", layer, "--by", "source", "--target", 1, "--step", 20)
    result = call("ask", recorded.path, "--model", MODEL, "--data", data, *options)
    assert result.exit_code == 0, result.stderr
    assert "even" in result.stdout
    assert ("first order" in result.stdout) == (layer == "fc1")
    assert ("sum to the whole" in result.stdout) == (score == "contribution")


def test_ask_explains_the_margin_and_the_loss_of_the_labels_in_the_file(recorded, data, tmp_path):
    np.savez(tmp_path / "x.npz", inputs=recorded.x.numpy(), labels=recorded.labels.numpy())
    ask = ("ask", recorded.path, "--model", MODEL, "--rows", "0,7", "-k", 3)
    result = call(*ask, "--data", tmp_path / "x.npz", "--target", "loss")
    assert result.exit_code == 0, result.stderr
    spot = recorded.memory.attend(recorded.model, recorded.x[[0, 7]], target="loss", labels=recorded.labels[[0, 7]])
    hits = spot.top(3)
    assert all(f"{float(value):+.2f}" in result.stdout for value in hits.contribution[:, 0])
    assert "the loss of the given label" in " ".join(result.stdout.split())
    assert "has no labels" in call(*ask, "--data", data, "--target", "margin").stderr
    assert "is not understood" in " ".join(call(*ask, "--data", data, "--target", "likely").stderr.split())


def test_a_masked_answer_says_what_a_mask_is(recorded, data):
    result = call("ask", recorded.path, "--model", MODEL, "--data", data, "--without", "label = 1")
    assert result.exit_code == 0, result.stderr
    masked = recorded.memory.without("label = 1").predict(recorded.model, recorded.x[:1])
    assert f"{float(masked.max()):+.2f}" in result.stdout
    assert "removes direct contributions with everything else held fixed" in " ".join(result.stdout.split())


def test_weights_must_be_the_memorys(recorded, data, tmp_path):
    save_file(recorded.model.state_dict(), tmp_path / "own.safetensors")
    torch.manual_seed(1)
    save_file(MLP(16, 8, 3).state_dict(), tmp_path / "other.safetensors")
    ask = ("ask", recorded.path, "--model", MODEL, "--data", data)
    assert call(*ask, "--weights", tmp_path / "own.safetensors").exit_code == 0
    refused = call(*ask, "--weights", tmp_path / "other.safetensors")
    assert refused.exit_code == 1 and "are not the memory's" in refused.stderr


def test_weights_must_be_the_memorys_where_keys_alone_are_kept(recorded, data, tmp_path):
    torch.manual_seed(0)
    model = MLP(16, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "m", keep="keys", progress=False) as tape:
        for _ in range(2):
            tape.note(label=recorded.labels[:10])
            model(recorded.x[:10]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    save_file(recorded.model.state_dict(), tmp_path / "other.safetensors")
    ask = ("ask", tmp_path / "m", "--model", MODEL, "--data", data, "--score", "weight")
    assert call(*ask, "--weights", tmp_path / "own.safetensors").exit_code == 0
    refused = call(*ask, "--weights", tmp_path / "other.safetensors")
    assert refused.exit_code == 1 and "it kept others" in refused.stderr
    masked = call(*ask, "--without", "label = 1")
    assert masked.exit_code == 1 and "a mask cannot change" in masked.stderr


def test_without_a_label_the_sum_is_still_checked(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "m", progress=False):
        for _ in range(30):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    np.save(tmp_path / "x.npy", np.ones((2, 4)))
    (tmp_path / "one_output.py").write_text("import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 1))\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = call("ask", "m", "--model", "one_output:model", "--data", "x.npy", "-k", 4)
    assert result.exit_code == 0, result.stderr
    assert "22 others" in result.stdout and "sum to the whole" in result.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "nowhere"}, "there is no memory"),
        ({"--model": "no.such:model"}, "cannot make the model"),
        ({"--model": "dualform.models:MLP(16, 9, 3)"}, "does not fit the memory"),
        ({"--data": "nowhere.npy"}, "there is no file"),
        ({"--rows": "1000"}, "has no row 1000"),
        ({"--rows": "x"}, "cannot read the rows"),
        ({"--layer": "fc9"}, "no layer 'fc9'"),
        ({"--by": "colour"}, "no column 'colour'"),
        ({"--target": "3"}, "not among the 3 outputs"),
        ({"--step": "31"}, "cannot be read at step 31"),
        ({"--without": "label ="}, "cannot read the filter"),
        ({"--without": "label = 9"}, "matches none"),
    ],
)
def test_every_error_is_one_sentence_without_a_traceback(recorded, data, change, says):
    options = {"--model": MODEL, "--data": str(data), **change}
    path = options.pop("path", recorded.path)
    result = call("ask", path, *(word for pair in options.items() for word in pair))
    assert result.exit_code == 1
    assert says in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_rows_that_do_not_fit_the_model_are_refused_in_a_sentence(recorded, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 5)))
    result = call("ask", recorded.path, "--model", MODEL, "--data", tmp_path / "x.npy")
    assert result.exit_code == 1 and "Traceback" not in result.output and result.stderr.count("\n") == 1


def test_ask_gives_a_model_its_padding_too(series_run, tmp_path):
    waves, padding, labels = some_series()
    model = open_memory(series_run).load_into(series_model()).eval()
    np.savez(tmp_path / "x.npz", inputs=waves, padding=padding, labels=labels)
    model_name = 'dualform.models:SeriesClassifier(3, 16, 3, width=16, heads=4, layers=1, hidden=16, attention="bn+sh")'
    result = call("ask", series_run, "--model", model_name, "--data", tmp_path / "x.npz", "--rows", "4", "-k", 2)
    with torch.no_grad():
        logit = model(waves[4:5], padding[4:5]).max()
    assert result.exit_code == 0 and f"with a logit of {float(logit):+.2f}" in result.stdout, result.stderr
    assert "▁" in result.stdout


def test_debug_shows_where_an_error_comes_from():
    result = call("--debug", "inspect", "nowhere")
    assert result.exit_code == 1 and type(result.exception).__name__ == "MemoryNotFound"
    assert not isinstance(call("inspect", "nowhere").exception, AskError)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    result = call("demo", "--out", tmp_path / "file", "--steps", 1)
    assert result.exit_code == 1 and "cannot use" in result.stderr and "Traceback" not in result.output


def test_ctrl_c_ends_with_a_sentence(monkeypatch):
    def interrupted(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.demonstration, "run", interrupted)
    result = call("demo")
    assert result.exit_code == 130 and "Stopped." in result.stderr


def test_the_version_is_said():
    assert call("--version").stdout.startswith("dualform ")


@pytest.fixture(scope="module")
def digits_files(digits_run, tmp_path_factory) -> dict[str, str]:
    path, digits = digits_run
    folder = tmp_path_factory.mktemp("digits-files")
    np.savez(folder / "train.npz", inputs=digits.x.numpy(), labels=digits.labels.numpy())
    np.savez(folder / "test.npz", inputs=digits.x[digits.test].numpy(), labels=digits.labels[digits.test].numpy())
    return {
        "memory": str(path), "train": str(folder / "train.npz"), "test": str(folder / "test.npz"),
        "model": "dualform.models:MLP(784, 128, 10)",
    }  # fmt: skip


def test_ask_shows_pictures_and_bars(digits_files):
    files = digits_files
    command = ["ask", files["memory"], "--model", files["model"], "--data", files["test"], "--rows", "3", "-k", "4"]
    names = ",".join(["zero", "one", *"23456789"])
    result = call(*command, "--train", files["train"], "--classes", names)
    assert result.exit_code == 0, result.stderr
    assert "the network says one (class 1)" in result.stdout
    assert "▓" in result.stdout and "│" in result.stdout
    assert "▓" in call(*command).stdout, "the asked image is shown without training examples too"


def test_report_writes_one_file(digits_files, tmp_path):
    files, out = digits_files, tmp_path / "report.html"
    command = ["report", files["memory"], "--model", files["model"], "--data", files["train"], "--test", files["test"]]
    result = call(*command, "--examples", "4", "--weigh", "30", "-o", out, "--title", "Four digits")
    assert result.exit_code == 0, result.stderr
    text = out.read_text(encoding="utf-8")
    assert text.count('class="one"') == 4 and "Four digits" in text and str(out) in result.stdout.replace("\n", "")
    result = call(*command, "--rows", "0,3,499", "--weigh", "0", "-o", out)
    assert result.exit_code == 0 and out.read_text(encoding="utf-8").count('class="one"') == 3
    assert "no example 500" in call(*command, "--rows", "500", "-o", out).stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--data", "missing.npz"], "there is no file"), (["--model", "nothing:at_all"], "cannot make the model"),
        (["--model", "dualform.models:MLP(784, 9, 10)"], "does not fit"), (["--tokens", "missing.json"], "no file"),
        (["--host", "203.0.113.7"], "cannot listen"),
    ],
)  # fmt: skip
def test_serve_says_what_is_wrong(digits_files, change, said):
    files = digits_files
    options = {"--model": files["model"], "--data": files["train"], "--test": files["test"], "--port": "0"}
    options |= dict(zip(change[::2], change[1::2], strict=True))
    words = [word for pair in options.items() for word in pair]
    result = call("serve", files["memory"], "--no-open", *words)
    assert result.exit_code == 1 and said in result.stderr
