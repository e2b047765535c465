"""Stochastic gradient descent: momentum, dampening, Nesterov, coupled weight decay, ``maximize``."""

from collections.abc import Mapping
from typing import Any

from dualform.types import Transition

from .protocol import Rule


def sgd(group: Mapping[str, Any], state: Mapping[str, Any]) -> Transition:
    r"""One step of ``torch.optim.SGD``, linear in the gradient g.

    .. math::
        d_s &= \pm g_s + \lambda W_{s-1} \\
        M_s &= \mu M_{s-1} + (1-\tau)\, d_s  \qquad (M_s = d_s \text{ where there was no buffer}) \\
        W_s &= W_{s-1} - \eta_s\, (d_s + \mu M_s \text{ if Nesterov, else } M_s)

    μ is ``momentum``, τ ``dampening``, λ ``weight_decay``, η ``lr``; ``maximize`` turns the sign of g. With μ = 0 the
    buffer stays as it is and d is used. The settings may change from step to step.
    """
    lr, mu, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
    sign = -1.0 if group["maximize"] else 1.0
    if mu == 0:
        return Transition(ww=1 - lr * decay, wg=-lr * sign)
    fresh = state.get("momentum_buffer") is None
    keep, take = (0.0, 1.0) if fresh else (mu, 1 - float(group["dampening"]))
    # d = sign·g + decay·W and M = keep·M + take·d; the step is straight·d + through·M(old)
    straight, through = (1 + mu * take, mu * keep) if group["nesterov"] else (take, keep)
    return Transition(
        ww=1 - lr * straight * decay,
        wm=-lr * through,
        mw=take * decay,
        mm=keep,
        wg=-lr * straight * sign,
        mg=take * sign,
    )


SGD = Rule("SGD", sgd, buffer="momentum_buffer", reads=("lr", "momentum", "dampening", "weight_decay", "nesterov"))
