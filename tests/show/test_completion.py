"""Shells complete commands, options and their values, from a script that starts no Python."""

import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dualform.show.commands import cli

COMMANDS = dict(get_command(cli.app).commands)  # pyright: ignore[reportAttributeAccessIssue]


def script(shell: str) -> str:
    result = CliRunner().invoke(cli.app, ["completion", shell])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def bash(tmp_path_factory) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash on this machine")
    file = tmp_path_factory.mktemp("bash") / "dualform"
    file.write_text(script("bash"))
    return file


def completed(bash: Path, *words: str) -> list[str]:
    """What a real bash offers after these words when the tab key is pressed, in a folder with a file memory.txt."""
    (bash.parent / "memory.txt").touch()
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"source {bash}; cd {bash.parent}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        "$(complete -p dualform | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    result = subprocess.run(
        ["bash", "--norc", "-c", program], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert not result.stderr, result.stderr
    return result.stdout.split()


def test_bash_completes_commands(bash):
    assert completed(bash, "dualform", "ins") == ["inspect"]
    assert set(COMMANDS) < set(completed(bash, "dualform", ""))
    assert "--quiet" in completed(bash, "dualform", "--")


@pytest.mark.parametrize("name", COMMANDS)
def test_bash_completes_every_option_of_every_command(bash, name):
    options = completed(bash, "dualform", "-q", name, "--")
    assert {"--help", "--quiet"} <= set(options)
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option":
            assert {option for option in parameter.opts if option.startswith("--")} <= set(options)


def test_bash_completes_the_values_of_a_choice_and_leaves_files_to_bash(bash):
    assert completed(bash, "dualform", "ask", "--score", "w") == ["weight"]
    assert completed(bash, "dualform", "completion", "") == ["bash", "zsh", "fish"]
    assert completed(bash, "dualform", "ask", "mem") == []  # bash's own completion of files takes over
    assert "-o bashdefault -o default" in bash.read_text()


class Terminal:
    """An interactive shell on a terminal of its own, to which keys are sent."""

    def __init__(self, words: Sequence[str], setup: str, folder: Path) -> None:
        pty = pytest.importorskip("pty", reason="this system has no terminals of this kind")
        self.reader, writer = pty.openpty()
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        size = subprocess.run(["stty", "rows", "200", "cols", "200"], stdin=writer, check=False)
        assert size.returncode == 0
        self.shell = subprocess.Popen(
            words, stdin=writer, stdout=writer, stderr=writer, env=environment, cwd=folder, start_new_session=True
        )
        os.close(writer)
        self.times = 0
        self.shows(f"{setup}\n")

    def shows(self, keys: str, *words: str) -> None:
        """Press the keys, wait until all of these words are on the terminal, and begin a new line."""
        self._wait(keys, *words)
        self.times += 1
        self._wait(f"\x15echo next'' line {self.times}.\n", f"next line {self.times}.")  # not the echo of the keys

    def _wait(self, keys: str, *words: str) -> None:
        os.write(self.reader, keys.encode())
        shown, end = "", time.monotonic() + 30
        while missing := [word for word in words if word not in shown]:
            assert time.monotonic() < end, (missing, shown)
            if select.select([self.reader], [], [], 1)[0]:
                shown += os.read(self.reader, 65536).decode(errors="replace")

    def close(self) -> None:
        self.shell.kill()
        self.shell.wait(timeout=20)
        os.close(self.reader)


@pytest.fixture(params=["bash", "zsh"])
def terminal(request, tmp_path) -> Iterator[Terminal]:
    """A shell that has read its script, in a folder with a file; ``dualform`` prints how it was called."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    (tmp_path / "script").write_text(script(shell))
    (tmp_path / "memory.txt").touch()
    words = {"bash": ["bash", "--norc", "-i"], "zsh": ["zsh", "-f", "-i"]}[shell]
    opened = Terminal(words, "source ./script; dualform() { echo ran \"$@\" end; }; PS1='> '", tmp_path)
    yield opened
    opened.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no terminals of this kind")
def test_the_key_itself_completes_in_an_interactive_shell(terminal):
    """A terminal, the tab key and Enter: what runs is the completed line."""
    terminal.shows("dualform insp\t\n", "ran inspect end")
    terminal.shows("dualform -q insp\t\n", "ran -q inspect end")
    terminal.shows("dualform ask --score w\t\n", "ran ask --score weight end")
    terminal.shows("dualform ask --weig\t\n", "ran ask --weights end")
    terminal.shows("dualform completion z\t\n", "ran completion zsh end")
    terminal.shows("dualform inspect mem\t\n", "ran inspect memory.txt end")
    terminal.shows("dualform \t\t", *COMMANDS)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no terminals of this kind")
def test_every_option_of_every_command_is_listed_in_an_interactive_shell(terminal):
    for name, command in COMMANDS.items():
        options = [option for p in command.params if p.param_type_name == "option" for option in p.opts]
        terminal.shows(f"dualform {name} --\t\t", *(option for option in options if option.startswith("--")), "--quiet")


@pytest.fixture(scope="module")
def fish(tmp_path_factory) -> Path:
    if shutil.which("fish") is None:
        pytest.skip("there is no fish on this machine")
    file = tmp_path_factory.mktemp("fish") / "dualform.fish"
    file.write_text(script("fish"))
    return file


def offered_by_fish(fish: Path, line: str) -> list[str]:
    """What a real fish offers at the end of a line."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(fish.parent), "LC_ALL": "C.UTF-8"}
    words = ["fish", "--no-config", "-c", f"source {fish.name}; complete -C '{line}'"]
    result = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=fish.parent, check=True)
    assert not result.stderr, result.stderr
    return [offered.partition("\t")[0] for offered in result.stdout.splitlines()]


def test_fish_completes_commands_options_values_and_files(fish):
    assert set(offered_by_fish(fish, "dualform ")) == set(COMMANDS)
    assert offered_by_fish(fish, "dualform -q insp") == ["inspect"]
    assert {"--quiet", "--debug", "--version", "--help"} <= set(offered_by_fish(fish, "dualform --"))
    assert set(offered_by_fish(fish, "dualform ask --score ")) == {"weight", "abs", "contribution"}
    assert set(offered_by_fish(fish, "dualform completion ")) == {"bash", "zsh", "fish"}
    (fish.parent / "memory.txt").touch()
    assert offered_by_fish(fish, "dualform inspect mem") == ["memory.txt"]


@pytest.mark.parametrize("name", COMMANDS)
def test_fish_completes_every_option_of_every_command(fish, name):
    options = {option for p in COMMANDS[name].params if p.param_type_name == "option" for option in p.opts}
    offered = set(offered_by_fish(fish, f"dualform {name} --"))
    assert {option for option in options if option.startswith("--")} | {"--help", "--quiet"} <= offered


@pytest.mark.parametrize("name", COMMANDS)
def test_the_scripts_for_zsh_and_fish_hold_every_command(name):
    assert f"      {name}) offered=" in script("zsh")
    assert f"-f -a {name} -d" in script("fish")


def test_the_script_for_fish_holds_the_values_of_a_choice_and_the_help():
    line = next(line for line in script("fish").splitlines() if "from ask'" in line and "-l score" in line)
    assert "-x -a 'weight abs contribution'" in line and "Rank by" in line


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_itself_reads_its_script(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    (tmp_path / "script").write_text(script(shell))
    assert subprocess.run([shell, str(tmp_path / "script")], capture_output=True).returncode == 0
