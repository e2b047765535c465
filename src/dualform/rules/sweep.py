"""The coefficient of every slot, computed from an optimiser's steps in one sweep backwards in time."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Coefficients:
    r"""The decomposition of one parameter at horizon h into its initial state and the gradients of all steps.

    .. math:: W_h = \rho W_0 + \gamma M_0 + \sum_s c_s G_s

    ``of_step[s]`` is :math:`c_s(h)` for the gradient G_s from backpropagation; 0 for steps that did not update the
    parameter and for steps after the horizon. Index 0 is not a step.
    """

    of_step: Float[np.ndarray, " T1"]
    rho: float
    gamma: float


def sweep(
    steps: Int[np.ndarray, " k"],
    transitions: Float[np.ndarray, "k t"],
    scale: Float[np.ndarray, " k"],
    horizon: int,
    last: int,
    of: str = "weight",
) -> Coefficients:
    r"""Propagate the row vector :math:`[1\;0]\,A_h \cdots A_{s+1}` from the horizon back to the first step.

    ``steps`` are the steps that updated the parameter, in order; ``transitions`` their numbers, of which the first six
    are used (ww wm mw mm wg mg); ``scale`` the factor :math:`\kappa_s` between backward and step (clipping, loss
    scale). ``last`` is the last step of the memory: the result has an entry for each step. ``of="buffer"`` starts with
    [0 1] and decomposes the optimiser's buffer M instead of W.
    """
    of_step = np.zeros(last + 1)
    w, m = (1.0, 0.0) if of == "weight" else (0.0, 1.0)
    upto = int(np.searchsorted(steps, horizon, side="right"))
    reversed_coefficients = []
    for ww, wm, mw, mm, wg, mg in transitions[:upto, :6][::-1].tolist():
        reversed_coefficients.append(w * wg + m * mg)
        w, m = w * ww + m * mw, w * wm + m * mm
    of_step[steps[:upto]] = np.array(reversed_coefficients[::-1]) * scale[:upto]
    return Coefficients(of_step, rho=w, gamma=m)
