"""Shells complete commands, options and their values, from a script that starts no Python."""

import shutil
import subprocess
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


def test_the_key_itself_completes_a_command_in_an_interactive_bash(bash):
    """A terminal, the tab key and Enter: what runs is the completed line."""
    pty = pytest.importorskip("pty", reason="this system has no terminals of this kind")
    import os

    program = f"source {bash}; dualform() {{ echo ran \"$@\"; }}\nPS1='> '\n"
    reader, writer = pty.openpty()
    with subprocess.Popen(["bash", "--norc", "-i"], stdin=writer, stdout=writer, stderr=writer, text=True) as shell:
        os.close(writer)
        os.write(reader, f"{program}dualform insp\t\nexit\n".encode())
        shown = b""
        while True:
            try:
                piece = os.read(reader, 1024)
            except OSError:  # the terminal is closed
                break
            if not piece:
                break
            shown += piece
        shell.wait(timeout=20)
    os.close(reader)
    assert "ran inspect" in shown.decode(), shown.decode()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_scripts_for_zsh_and_fish_hold_every_command(name):
    assert f"      {name}) words=" in script("zsh") and "bashcompinit" in script("zsh")
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
