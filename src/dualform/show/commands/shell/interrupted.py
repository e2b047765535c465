"""What Ctrl-C leaves behind, command by command, and what to type to go on."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..program import pasteable


def after_interrupt(name: str | None, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """The sentences after Ctrl-C: what is kept of a command, and what to type.

    ``values`` are the command's options, ``words`` what was typed after the name of the program.
    """
    kept = KEPT.get(name or "", _nothing)(values)
    return f"Stopped. {kept}" + (f" {pasteable(*words)}" if kept.endswith(":") else "")


def _nothing(values: Mapping[str, Any]) -> str:
    return "Nothing was written or changed. To start over, type:"


def _demo(values: Mapping[str, Any]) -> str:
    memory = Path(values["out"]) / "memory"
    if not (memory / "manifest.json").is_file():
        return _nothing(values)
    return (
        f"The steps that were complete are kept in {memory}; to see them, type {pasteable('inspect', memory)}. "
        "To start over, type:"
    )


def _report(values: Mapping[str, Any]) -> str:
    return f"{values['out']} was not written. To start over, type:"


def _evaluate(values: Mapping[str, Any]) -> str:
    path = Path(values["path"])
    folder = values["folder"] or path.with_name(path.name + "-evaluated")
    kept = Path(folder) / "trainings"
    return f"The trainings that were finished are kept in {kept}. To train only what is missing, type:"


def _reproduce(values: Mapping[str, Any]) -> str:
    return f"The runs that were finished are kept in {values['out']}. To go on, type:"


KEPT: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "demo": _demo, "report": _report, "evaluate": _evaluate, "reproduce": _reproduce,
}  # fmt: skip
"""Commands that write something. All others only read."""
