"""Settings that all tests share."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("night", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

torch.set_num_threads(1)  # on layers this small a second thread costs more than it brings, and tests run side by side

KNOWN = Path(__file__).with_name("known_failures.txt")


def pytest_collection_modifyitems(items):
    """Laws that do not hold yet are listed in known_failures.txt: they run, and may fail until they are mended."""
    known = {line.strip() for line in KNOWN.read_text().splitlines() if line.strip() and not line.startswith("#")}
    for item in items:
        name = item.nodeid.split("[")[0]
        if name in known or item.nodeid in known:
            item.add_marker(pytest.mark.xfail(reason="does not hold yet: known_failures.txt", strict=False))
