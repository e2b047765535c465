"""A one-line description of the machine that measurements were made on."""

import platform
from pathlib import Path

import torch


def machine() -> str:
    """The processors and the versions of Python and torch."""
    return f"{processors()}, Python {platform.python_version()}, torch {torch.__version__}"


def processors() -> str:
    """The number and the name of the processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor() or platform.machine()
