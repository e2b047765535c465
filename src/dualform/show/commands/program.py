"""Commands that work when pasted: by the name under which this installation of dualform can be called."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

NAME = "dualform"


def pasteable(*words: object) -> str:
    """A command of dualform as one line for the shell that this process was started from."""
    return f"{program()} {shlex.join(map(str, words))}"


def program() -> str:
    """How to call this installation: ``dualform`` if the PATH finds it, else the path of its script.

    Without a script (run from the source tree) it is ``python -m dualform``.
    """
    script = _script()
    if script is None:
        return f"{_shortest(Path(sys.executable))} -m {NAME}"
    on_path = shutil.which(NAME)
    if on_path is not None and Path(on_path).resolve() == script.resolve():
        return NAME
    return _shortest(script)


def _script() -> Path | None:
    """The script that started this process, if it is dualform's, else the one installed beside this Python."""
    started = Path(sys.argv[0])
    if started.stem == NAME and started.is_file():
        return started.absolute()
    installed = shutil.which(NAME, path=sysconfig.get_path("scripts"))
    return None if installed is None else Path(installed)


def _shortest(file: Path) -> str:
    """A path that a shell can call, relative to the working folder if that is shorter. Links are not followed."""
    absolute = os.path.abspath(file)
    try:
        relative = os.path.relpath(absolute)
    except ValueError:  # on another drive
        relative = absolute
    relative = relative if os.sep in relative else os.path.join(os.curdir, relative)
    return shlex.quote(min(absolute, relative, key=len))
