"""The machine that numbers were measured on, in one line."""

import platform
from pathlib import Path

import torch


def machine() -> str:
    """Processors, and the versions that count."""
    return f"{processors()}, Python {platform.python_version()}, torch {torch.__version__}"


def processors() -> str:
    """How many there are, and what they are called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor() or platform.machine()
