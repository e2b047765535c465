"""Numbers to disk and back."""

import numpy as np
import pytest
import torch
from helpers import seeds
from hypothesis import given
from hypothesis import strategies as st

from dualform.store import COMPUTED, STORED, EncodedRows, EncodingWorkspace, RowTarget, all_finite, encode, encode_into

HALF = 2.0**-11
"""Half a unit in the last place of float16."""


def decoded(encoded: EncodedRows) -> torch.Tensor:
    """Row i stands for values[i] · 2**exponents[i]."""
    values, exponents = encoded
    return values.double() if exponents is None else values.double() * torch.exp2(exponents.double()).unsqueeze(1)


@st.composite
def rows(draw, low=-20, high=20):
    """Rows of very different sizes: each has its own power of ten."""
    m, d = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    random = torch.Generator().manual_seed(draw(seeds))
    sizes = torch.tensor([float(10 ** draw(st.floats(low, high))) for _ in range(m)], dtype=torch.float64)
    return torch.randn(m, d, generator=random, dtype=torch.float64) * sizes.unsqueeze(1)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scaled", [True, False], ids=["errors", "keys"])
@given(rows=rows())
def test_what_is_written_whole_is_read_as_it_was(dtype, scaled, rows):
    rows = rows.to(STORED[dtype])
    encoded, finite = encode(rows.clone(), dtype, scaled=scaled)
    assert finite and encoded.exponents is None
    assert encoded.values.dtype == STORED[dtype] == COMPUTED[dtype]
    assert torch.equal(encoded.values, rows)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@given(rows=rows())
def test_half_precision_keeps_eleven_bits_of_every_error(precision, rows):
    """Each row has its own power of two: what is small beside other rows is not lost, only beside its own."""
    rows = rows.to(precision)
    encoded, finite = encode(rows.clone(), "float16", scaled=True)
    assert finite and encoded.values.dtype == torch.float16 and encoded.exponents is not None
    size = rows.double().abs().amax(1, keepdim=True)
    off = (decoded(encoded) - rows.double()).abs()
    assert (off <= HALF * rows.double().abs() + 2.0**-24 * size).all()


@given(rows=rows(low=-3, high=3), offset=st.integers(-18, 15))
def test_half_precision_keeps_eleven_bits_of_the_largest_keys(rows, offset):
    """Keys get powers of two only where they need them: all that is small beside the largest key may lose digits."""
    rows = rows * 10.0**offset
    encoded, finite = encode(rows.clone(), "float16", scaled=False)
    assert finite
    largest = rows.abs().max()
    off = (decoded(encoded) - rows).abs()
    assert (off <= HALF * rows.abs() + 2.0**-18 * largest).all()


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-20, 1e-9, 1e-4, 1.0, 3e4, 1e6, 1e20], ids=str)
@pytest.mark.parametrize("scaled", [True, False], ids=["errors", "keys"])
def test_tiny_and_huge_numbers_survive_half_precision(size, scaled, precision):
    rows = torch.tensor([[1.0, -0.5, 0.25], [0.75, 0.0, -1.0]], dtype=precision) * size
    encoded, finite = encode(rows.clone(), "float16", scaled=scaled)
    assert finite and torch.isfinite(encoded.values).all()
    torch.testing.assert_close(decoded(encoded), rows.double(), rtol=2 * HALF, atol=0)


@pytest.mark.parametrize("sizes", [(1.0, 1e-9), (1e6, 1e-3), (1.0, 1e6)], ids=str)
def test_small_keys_beside_large_ones_survive_half_precision(sizes):
    rows = torch.tensor([[1.0, -0.5, 0.25]] * 2, dtype=torch.float64) * torch.tensor(sizes).double().unsqueeze(1)
    encoded, _ = encode(rows.clone(), "float16", scaled=False)
    torch.testing.assert_close(decoded(encoded), rows, rtol=2 * HALF, atol=0)


def test_ordinary_keys_need_no_exponents():
    random = torch.Generator().manual_seed(0)
    encoded, finite = encode(torch.rand(50, 8, generator=random), "float16", scaled=False)
    assert finite and encoded.exponents is None


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("scaled", [True, False], ids=["errors", "keys"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_is_noticed(dtype, scaled, bad):
    for place in (0, 5, 11):
        rows = torch.ones(4, 3)
        rows.view(-1)[place] = bad
        _, finite = encode(rows, dtype, scaled=scaled)
        assert not finite


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("scaled", [True, False], ids=["errors", "keys"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1)], ids=str)
def test_nothing_at_all_is_written_too(dtype, scaled, shape):
    encoded, finite = encode(torch.zeros(shape), dtype, scaled=scaled)
    assert finite and torch.equal(decoded(encoded), torch.zeros(shape, dtype=torch.float64))


@given(rows=rows(low=-300, high=300))
def test_no_size_of_error_becomes_infinite_or_nothing_but_noise(rows):
    """Float64 reaches further than float16 with an exponent is decoded to: then errors may vanish, but not explode."""
    encoded, finite = encode(rows.clone(), "float16", scaled=True)
    assert finite
    assert torch.isfinite(encoded.values).all()
    assert encoded.exponents is not None and encoded.exponents.dtype == torch.int16


@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=8),
    precision=st.sampled_from([torch.float32, torch.float64]),
)
def test_all_finite_looks_at_every_entry(values, precision):
    """Also where the sum of finite numbers is not."""
    assert all_finite(torch.tensor(values, dtype=precision)) == bool(np.isfinite(values).all())


def on_workspace(
    rooms: list[tuple[torch.Tensor, bool]], workspace: EncodingWorkspace | None
) -> list[tuple[torch.Tensor, bool]]:
    """All rows decoded, and whether they are finite."""
    made = [
        RowTarget(rows, torch.empty(rows.shape, dtype=torch.float16), np.zeros(len(rows), np.int16), scaled)
        for rows, scaled in rooms
    ]
    copied = encode_into(made, workspace)
    for (rows, _), seen in zip(rooms, copied, strict=True):
        assert not seen.finite or seen.square == pytest.approx(float(rows.double().square().sum()), rel=1e-5)
    return [
        (decoded(EncodedRows(r.values, torch.from_numpy(r.exponents))), seen.finite)
        for r, seen in zip(made, copied, strict=True)
    ]


@given(
    passes=st.lists(st.lists(st.integers(-12, 12), min_size=4, max_size=4), min_size=1, max_size=4),
    zeros=st.booleans(),
    seed=seeds,
)
def test_a_workspace_that_is_used_again_changes_nothing(passes, zeros, seed):
    """The rows of a pass are encoded together, in any sizes, rows of zeros among them: as each would be alone."""
    random, workspace = torch.Generator().manual_seed(seed), EncodingWorkspace()
    for sizes in passes:
        rooms = []
        for i, power in enumerate(sizes):
            rows = torch.randn(3, 5 + i % 2, generator=random) * 10.0**power
            if zeros:
                rows[i % 3] = 0.0
            rooms.append((rows, i % 2 == 0))
        for (rows, scaled), (found, finite) in zip(rooms, on_workspace(rooms, workspace), strict=True):
            (alone, _) = encode(rows.clone(), "float16", scaled=scaled)
            assert finite
            size = rows.double().abs().amax(1, keepdim=True)
            bar = HALF * rows.double().abs() + 2.0**-18 * size  # a row of its own size never loses more than this
            assert ((found - rows.double()).abs() <= bar).all()
            assert ((decoded(alone) - rows.double()).abs() <= bar).all()
            assert not found[size.squeeze(1) == 0].any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_number_in_a_workspace_is_told_from_the_others(bad):
    workspace = EncodingWorkspace()
    good, broken = torch.ones(3, 4), torch.ones(3, 4)
    on_workspace([(good, True), (good, False)], workspace)
    broken[1, 2] = bad
    (first, fine), (_, not_fine) = on_workspace([(good, True), (broken, False)], workspace)
    assert fine and not not_fine and torch.equal(first, good.double())
