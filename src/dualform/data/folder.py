"""Where data lies: the folder that ``DUALFORM_DATA`` names, or the user's cache."""

import os
from pathlib import Path

from dualform.errors import DataNotFound


def data_folders() -> list[Path]:
    """The folders that are searched, in order."""
    named = os.environ.get("DUALFORM_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dualform" / "data"
    return [*([Path(named)] if named else []), cache]


def data_file(name: str) -> Path:
    """A file of a data set, or a sentence that says where it was looked for."""
    for folder in data_folders():
        if (folder / name).is_file():
            return folder / name
    places = " or ".join(str(folder) for folder in data_folders())
    raise DataNotFound(
        f"cannot find {name} in {places}. Put it there, or set DUALFORM_DATA to the folder that holds it."
    )
