r"""The inner loops of the solvers, compiled by numba where it is installed (extra ``svm``).

Without numba the same functions run as Python, with the same answers, some tens of times slower. Importing this file
imports numba, so it is only imported where a problem is solved. A row r constrains :math:`\delta_r^\top W z_i` of its
query i, with :math:`\delta_r` the difference of two points, which is computed when it is needed and never stored.
"""

from typing import Any, no_type_check

import numpy as np

try:
    from numba import njit

    COMPILED = True
except ImportError:  # pragma: no cover - the environment of the tests has it
    njit: Any = None
    COMPILED = False

SUMS = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags that let sums be reordered for vector registers, but keep infinite bounds infinite."""


def jit(function: Any) -> Any:
    """Compile a function at its first call, and cache the result on disk where that is possible."""
    if not COMPILED:
        return function
    try:
        return njit(cache=True, fastmath=SUMS, nogil=True)(function)
    except RuntimeError:  # there is no folder for the cache
        return njit(fastmath=SUMS, nogil=True)(function)


if COMPILED:

    @jit
    @no_type_check
    def dot(a, b):
        """a·b."""
        total = 0.0
        for k in range(len(a)):
            total += a[k] * b[k]
        return total

    @jit
    @no_type_check
    def subtract(a, b, out):
        """a − b, into out."""
        for k in range(len(a)):
            out[k] = a[k] - b[k]

    @jit
    @no_type_check
    def add(step, a, out):
        """Add step·a to out."""
        for k in range(len(a)):
            out[k] += step * a[k]

    @jit
    @no_type_check
    def apply(W, z, out):
        """W z, into out."""
        for k in range(len(W)):
            out[k] = dot(W[k], z)

else:
    dot = np.dot
    subtract, apply = np.subtract, np.dot

    def add(step: float, a: Any, out: Any) -> None:
        """Add step·a to out."""
        out += step * a


@jit
@no_type_check
def descent_sweep(
    points, queries, sizes, plus, minus, start, order, curvature, target, low, high, ridge, lam, W, times
):
    """Coordinate descent along the rows of each query in turn, ``times`` times; changes lam and W = centre + M(lam).

    A query costs two passes over W, a row only its own length. ``curvature`` is ‖z‖²‖δ‖² of a row.
    """
    u, delta, change = np.empty(len(W)), np.empty(len(W)), np.empty(len(W))
    for i in order:
        z = queries[i]
        apply(W, z, u)
        change[:] = 0.0
        moved = False
        for _ in range(times):
            for r in range(start[i], start[i + 1]):
                subtract(points[plus[r]], points[minus[r]], delta)
                slope = target[r] - dot(delta, u) - ridge * lam[r]
                new = min(max(lam[r] + slope / (curvature[r] + ridge), low[r]), high[r])
                step = new - lam[r]
                if step != 0.0:
                    moved = True
                    lam[r] = new
                    add(step, delta, change)
                    add(step * sizes[i], delta, u)
        if moved:
            for k in range(len(W)):
                add(change[k], z, W[k])


@jit
@no_type_check
def values(points, plus, minus, start, at):
    """δ_r·at_i of every row, with i its query."""
    out, delta = np.empty(len(plus)), np.empty(points.shape[1])
    for i in range(len(start) - 1):
        for r in range(start[i], start[i + 1]):
            subtract(points[plus[r]], points[minus[r]], delta)
            out[r] = dot(delta, at[i])
    return out


@jit
@no_type_check
def sums(points, plus, minus, start, lam):
    """Σ_r lam_r δ_r over the rows of every query."""
    out, delta = np.zeros((len(start) - 1, points.shape[1])), np.empty(points.shape[1])
    for i in range(len(start) - 1):
        for r in range(start[i], start[i + 1]):
            if lam[r] != 0.0:
                subtract(points[plus[r]], points[minus[r]], delta)
                add(lam[r], delta, out[i])
    return out


@jit
@no_type_check
def squares(points, plus, minus):
    """‖δ_r‖² of every row."""
    out, delta = np.empty(len(plus)), np.empty(points.shape[1])
    for r in range(len(plus)):
        subtract(points[plus[r]], points[minus[r]], delta)
        out[r] = dot(delta, delta)
    return out
