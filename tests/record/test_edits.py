"""Whatever changes weights, optimiser state or gradients behind the recorder's back is marked or certified."""

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="the benchmarks are not here")


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        import edits  # type: ignore[import-not-found]

        yield edits


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_no_change_passes_in_silence(first, script, tmp_path, no_waiting_for_the_disk):
    """``python benchmarks/edits.py`` makes 2,000 tries."""
    for seed in range(first, first + 15):
        where, outcome, without = script.attempt(seed, tmp_path)
        assert outcome != "silent", f"seed {seed}: {where}"
        assert not without, f"seed {seed}: marked without a change"
