r"""EK-FAC: the Fisher matrix of a layer in the joint eigenbasis of its inputs and errors.

With :math:`K = \mathrm{E}[k k^\top]`, :math:`E = \mathrm{E}[e e^\top]` over all slots, the Fisher matrix
:math:`\mathrm{E}_i[\mathrm{vec}\,G_i\,\mathrm{vec}\,G_i^\top]` is taken as diagonal in the eigenbases of both, with the
entries that it has there (the mean squares of the examples' gradients). The slots are those of the labels, so it is the
*empirical* Fisher matrix. Reference: George et al. (2018), arXiv 1806.03884; as influence: Grosse et al. (2023),
arXiv 2308.03296.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import KroneckerFactors, Store
from dualform.types import LayerInfo

from .rows import ExampleRows, example_gradients, rows_of_steps

DAMPING = 0.1
"""The usual damping, as a share of the mean eigenvalue of a layer."""


def kronecker_factors(
    store: Store, layer: LayerInfo, steps: Sequence[int], watch: OnProgress | None = None
) -> KroneckerFactors:
    """The factors of a layer from the slots of some steps, in two passes over them."""
    inputs, errors = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for rows in rows_of_steps(store, layer, steps):
        keys = rows.extended_keys
        inputs, errors = inputs + (keys.mT @ keys).double(), errors + (rows.errors.mT @ rows.errors).double()
        if watch:
            watch(len(rows.visits))
    input_basis, error_basis = (torch.linalg.eigh(covariance)[1].to(store.compute) for covariance in (inputs, errors))
    squares, examples = torch.zeros((), dtype=torch.float64), 0
    for rows in rows_of_steps(store, layer, steps):
        squares = squares + _squares(rows, input_basis, error_basis).double()
        examples += rows.examples
        if watch:
            watch(len(rows.visits))
    return KroneckerFactors(input_basis, error_basis, (squares / max(1, examples)).to(store.compute))


def _squares(
    rows: ExampleRows, input_basis: Float[Tensor, "c c"], error_basis: Float[Tensor, "d_out d_out"]
) -> Float[Tensor, "d_out c"]:
    """The squared gradients of the examples of a step in both eigenbases, summed. Rows are rotated, not gradients."""
    keys, errors = rows.extended_keys @ input_basis, rows.errors @ error_basis
    if rows.examples == len(rows.visits):
        return errors.square().mT @ keys.square()
    width = rows.layer.width
    rotated = replace(rows, keys=keys[:, :width], bias_keys=keys[:, width:], errors=errors)
    total = torch.zeros((), dtype=errors.dtype)
    for _, gradients in example_gradients(rotated):
        total = total + gradients.square().sum(0)
    return total


def usual_damping(factors: KroneckerFactors) -> float:
    """The damping of a layer where none is given: 0.1 times the mean of its eigenvalues."""
    return DAMPING * float(factors.squares.mean())


def solve_fisher(
    factors: KroneckerFactors, queries: Float[Tensor, "n d_out c"], damping: float
) -> Float[Tensor, "n d_out c"]:
    r"""The queries times :math:`(F + \delta)^{-1}` with the damping δ."""
    rotated = factors.errors.mT @ queries @ factors.inputs
    if not damping:  # no example has a gradient here
        return torch.zeros_like(queries)
    return factors.errors @ (rotated / (factors.squares + damping)) @ factors.inputs.mT
