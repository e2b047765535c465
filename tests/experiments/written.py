"""A results page, written somewhere else from some runs."""

from pathlib import Path
from typing import Any

import pytest

from dualform.show.commands.reproduce import source_tree


def written(page: Any, runs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a module of a page makes of runs. Nothing of what is kept with the code is read or changed."""
    assert source_tree() not in folder.parents
    monkeypatch.setattr(page.PAGE.archive, "results", folder / "results")
    monkeypatch.setattr(page.PAGE.archive, "images", folder / "images")
    monkeypatch.setattr(page.PAGE, "file", folder / "page.md")
    monkeypatch.setattr("sys.argv", ["page", "--runs", str(runs)])
    page.main()
    return (folder / "page.md").read_text()
