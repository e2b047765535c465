"""From the steps of an optimiser to the coefficient of every slot: one sweep, backwards in time."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Coefficients:
    r"""How one parameter at horizon h is put together from what was there and what it saw.

    .. math:: W_h = \rho W_0 + \gamma M_0 + \sum_s c_s G_s

    ``of_step[s]`` is :math:`c_s(h)` for the gradient G_s as backprop gave it; 0 for steps that passed the parameter
    by and for steps after the horizon. Index 0 is no step.
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
    r"""Carry the row vector :math:`[1\;0]\,A_h \cdots A_{s+1}` from the horizon down to the first step.

    ``steps`` are the steps at which the parameter moved, in order; ``transitions`` their numbers, of which the first
    six count (ww wm mw mm wg mg); ``scale`` the factor :math:`\kappa_s` between backward and step (clipping, loss
    scale). ``last`` is the last step of the memory: the result has an entry for each. ``of="buffer"`` starts with
    [0 1]: the optimiser's buffer M instead of W.
    """
    of_step = np.zeros(last + 1)
    w, m = (1.0, 0.0) if of == "weight" else (0.0, 1.0)
    upto = int(np.searchsorted(steps, horizon, side="right"))
    found = []
    for ww, wm, mw, mm, wg, mg in transitions[:upto, :6][::-1].tolist():
        found.append(w * wg + m * mg)
        w, m = w * ww + m * mw, w * wm + m * mm
    of_step[steps[:upto]] = np.array(found[::-1]) * scale[:upto]
    return Coefficients(of_step, rho=w, gamma=m)
