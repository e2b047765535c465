"""Search for data files: in the folder ``DUALFORM_DATA``, the user's cache, system packages, then on the network.

With ``DUALFORM_OFFLINE=1`` nothing is ever downloaded.
"""

import os
from pathlib import Path

from dualform.errors import DataNotFound

from .fetch import fetch
from .sources import PACKAGES, SOURCES


def cache_folder() -> Path:
    """The folder of downloaded files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualform" / "data"


def data_folders() -> list[Path]:
    """The folders that are searched, in order."""
    named = os.environ.get("DUALFORM_DATA")
    return [*([Path(named)] if named else []), cache_folder()]


def find_file(*names: str) -> Path | None:
    """The first of these files that exists on this machine."""
    for name in names:
        first, _, rest = name.partition("/")
        packaged = [Path(PACKAGES[first], rest)] if first in PACKAGES else []
        for path in (*(folder / name for folder in data_folders()), *packaged):
            if path.is_file():
                return path
    return None


def data_file(*names: str) -> Path:
    """The path of a data file under one of its names, after a download to the user's cache if necessary."""
    path = find_file(*names)
    if path is not None:
        return path
    places = " or ".join(str(folder) for folder in data_folders())
    wanted = " or ".join(names)
    sentence = f"cannot find {wanted} in {places}. Put it there, or set DUALFORM_DATA to the folder that holds it"
    downloadable = next((name for name in names if name in SOURCES), None)
    if downloadable is None:
        raise DataNotFound(f"{sentence}.")
    if os.environ.get("DUALFORM_OFFLINE", "0") not in ("", "0"):
        raise DataNotFound(f"{sentence}; DUALFORM_OFFLINE is set, so it is not downloaded.")
    try:
        return fetch(SOURCES[downloadable], cache_folder() / downloadable)
    except DataNotFound as error:
        raise DataNotFound(f"{sentence}. {error}") from error
