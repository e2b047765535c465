r"""Lion and Rprop, whose steps only use signs: sign(x) = P x with P = 1/|x|, and 0 where x is 0."""

import torch
from torch import Tensor

from dualform.types import Transition

from .protocol import Rule, Seen, Settings, Shared
from .sgd import sign_of


def lion(s: Settings) -> Transition:
    r"""One step of Lion (Chen et al., 2023, arXiv 2302.06675), as in the package ``lion-pytorch``.

    .. math:: W_s = (1 - \eta\lambda) W_{s-1} - \eta\, \mathrm{sign}(\beta_1 M_{s-1} + (1-\beta_1) g_s),\qquad
        M_s = \beta_2 M_{s-1} + (1-\beta_2) g_s
    """
    lr, inner, outer = s["lr"], s["betas1"], s["betas2"]
    return Transition(
        ww=1 - lr * s["weight_decay"], mm=outer, mg=1 - outer, wp=-lr, pm=inner, pg=1 - inner
    )  # fmt: skip


def lion_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = 1 / |\beta_1 M_{s-1} + (1-\beta_1) g_s|`."""
    return inverse(s["betas1"] * parameter.buffer + (1 - s["betas1"]) * parameter.gradient)


def rprop(s: Settings) -> Transition:
    r"""One step of ``torch.optim.Rprop``: :math:`W_s = W_{s-1} - P_s g_s`."""
    return Transition(wp=-1.0, pg=sign_of(s))


def rprop_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = \Delta_s / |g_s|`: the step Δ of an entry grows while its gradient keeps its sign, and shrinks when
    the sign changes; then the entry skips one step.
    """
    g = sign_of(s) * parameter.gradient
    turns = (g * shared["prev"]).sign() if "prev" in shared else torch.zeros_like(g)
    size = shared["step_size"] if "step_size" in shared else torch.full_like(g, s["lr"])
    waits = turns < 0
    factor = torch.ones_like(g).masked_fill(turns > 0, s["etas2"]).masked_fill(waits, s["etas1"])
    shared["step_size"] = size = (size * factor).clamp(s["step_sizes1"], s["step_sizes2"])
    shared["prev"] = g.masked_fill(waits, 0.0)
    return (size * inverse(g)).masked_fill(waits, 0.0)


def inverse(x: Tensor) -> Tensor:
    """1/|x|, and 0 where x is 0."""
    return torch.where(x == 0, 0.0, 1 / x.abs())


def _signs(s: Settings) -> str:
    return "signs, whose slope is 0"


LION = Rule(
    "Lion", lion, "exp_avg", (), lion_p, decays_by_factor=True, not_differentiable=_signs, signs_only=True
)  # fmt: skip
RPROP = Rule("Rprop", rprop, None, ("prev", "step_size"), rprop_p, not_differentiable=_signs, signs_only=True)
