"""`dualform help NAME`: every error and mark has a section, and the wheel carries the text of the docs page."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualform import errors
from dualform.show.commands import cli
from dualform.show.commands.help import sections

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
ERRORS = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
MARK = re.compile(r"""(?:\bmarks?|self\._marks|Reason)\(\s*"([a-z-]+)"|\bmark\b[^"\n]*"([a-z-]+)\"""")


def call(*words: str):
    return CliRunner().invoke(cli.app, ["help", *words], env={"COLUMNS": "160", "NO_COLOR": "1"})


def marks_in_the_code() -> set[str]:
    """The kinds of marks that the recorder makes."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "src/dualform/record").rglob("*.py")]
    return {first or second for text in texts for first, second in MARK.findall(text)}


def test_the_text_in_the_package_is_the_page_of_the_docs():
    packaged = ROOT / "src/dualform/show/commands/errors.md"
    assert packaged.read_bytes() == PAGE.read_bytes(), f"copy {PAGE} to {packaged}"


def test_every_error_and_every_mark_has_a_section():
    titles = set(sections())
    assert set(ERRORS) == {title for title in titles if title[0].isupper()}
    marks = {title for title in titles if title[0].islower()}
    found = marks_in_the_code()
    assert len(found) >= 12 and found <= marks


@pytest.mark.parametrize("name", [*ERRORS, "edited", "unknown-visits"])
def test_help_prints_the_section(name):
    result = call(name.lower())
    assert result.exit_code == 0 and result.stdout.startswith(name)
    assert len(result.stdout.split()) > 8 and "](" not in result.stdout


def test_help_alone_lists_the_names():
    words = call().stdout
    assert all(title in words.replace("\n", " ") for title in sections())


def test_a_name_that_does_not_exist_is_answered_with_similar_ones():
    result = call("NoteEror")
    assert result.exit_code == 1 and "NoteError" in result.stderr
