"""Settings that all tests share."""

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("night", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

os.environ["DUALFORM_OFFLINE"] = "1"  # a test uses the data that is there, and is skipped where there is none

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for whatever a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adafactor and Muon are newer than the lowest torch that is supported: their cases are skipped without them."""
    for name in ("Adafactor", "Muon"):
        if not hasattr(torch.optim, name):
            for item in items:
                if name in item.name:
                    item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} has no {name}"))


torch.set_num_threads(1)  # on layers this small a second thread costs more than it brings, and tests run side by side


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of ``benchmarks/`` by its name."""
    if not BENCHMARKS.exists():
        pytest.skip("the benchmarks are not part of a source distribution")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


@pytest.fixture(scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Whether bytes survive a power cut is the system's affair; here only the order of things counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
