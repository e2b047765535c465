"""The command that records, for those who look at a memory later."""

import re
import shlex
import sys
from pathlib import Path

MOST = 500
"""The most characters of a command that are kept."""

HIDDEN = "REMOVED"
"""What stands in place of a secret."""

SECRET = re.compile(r"(token|password|passwd|secret|api[-_]?key|credential)", re.IGNORECASE)


def recording_command() -> str:
    """The command of this process as one would type it; empty in a notebook, a prompt, or a worker of another program.

    What follows an option that sounds like a secret is left out.
    """
    script = sys.argv[0] if sys.argv else ""
    if not script or script.startswith("-") or "ipykernel" in script or hasattr(sys, "ps1"):
        return ""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    if module is not None and module.name:
        name = module.name.removesuffix(".__main__")
        words = ["python", "-m", name]
    else:
        words = ["python", script] if script.endswith(".py") else [Path(script).name]
    return shlex.join([*words, *_without_secrets(sys.argv[1:])])[:MOST]


def _without_secrets(words: list[str]) -> list[str]:
    kept, hides_next = [], False
    for word in words:
        name, mark, _ = word.partition("=")
        if hides_next and not word.startswith("-"):
            kept.append(HIDDEN)
        elif mark and SECRET.search(name):
            kept.append(f"{name}={HIDDEN}")
        else:
            kept.append(word)
        hides_next = word.startswith("-") and not mark and SECRET.search(word) is not None
    return kept
