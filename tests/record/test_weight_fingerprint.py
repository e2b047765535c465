"""Checksums of weights and optimiser state: what changes between two steps is seen."""

import pytest
import torch

from dualform.record.verify.weight_fingerprint import STRETCH, WHOLE, WeightFingerprints


@pytest.mark.parametrize("size", [8, WHOLE // 4 + 1, 4 * STRETCH])
def test_a_state_in_other_memory_is_seen_where_it_is_not_read_whole(size):
    """``state.data = other`` raises no count of writes, and the difference may lie outside of the stretch."""
    weight, buffer = torch.randn(size), torch.randn(size)
    fingerprints = WeightFingerprints({"w": weight}, {"w": {"buffer": buffer}})
    assert not fingerprints.state_changed("w", {"buffer": buffer})
    other = buffer.clone()
    other[-1] += 1
    buffer.data = other
    assert fingerprints.state_changed("w", {"buffer": buffer})


def test_any_bit_of_a_weight_is_seen_through_numpy():
    weight = torch.randn(300, 400)
    fingerprints = WeightFingerprints({"w": weight}, {})
    weight.numpy().view("uint32")[299, 399] ^= 1
    assert fingerprints.changed("w")
    fingerprints.take("w", {})
    assert not fingerprints.changed("w")
