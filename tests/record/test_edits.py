"""Any change of weights, optimiser state or gradients outside of the recorded steps is marked or certified."""

import pytest


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_no_change_passes_in_silence(first, benchmark, tmp_path, no_waiting_for_the_disk):
    """``python benchmarks/edits.py`` makes 2,000 tries."""
    for seed in range(first, first + 15):
        where, outcome, without = benchmark("edits").attempt(seed, tmp_path)
        assert outcome != "silent", f"seed {seed}: {where}"
        assert not without, f"seed {seed}: marked without a change"
