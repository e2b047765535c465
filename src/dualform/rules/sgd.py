"""Stochastic gradient descent: momentum, dampening, Nesterov, coupled weight decay, ``maximize``; and its average."""

from collections.abc import Mapping
from typing import Any

import torch

from dualform.types import Transition

from .protocol import Rule, Settings, numbers

_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


def _settings(group: Mapping[str, Any], state: Mapping[str, Any]) -> Settings:
    settings = {name: float(group[name]) for name in _NUMBERS}  # by name: no search through the group at every step
    settings["fresh"] = float(state.get("momentum_buffer") is None)
    return settings


def sgd(s: Settings) -> Transition:
    r"""One step of ``torch.optim.SGD``, linear in the gradient g.

    .. math::
        d_s &= \pm g_s + \lambda W_{s-1} \\
        M_s &= \mu M_{s-1} + (1-\tau)\, d_s  \qquad (M_s = d_s \text{ where there was no buffer}) \\
        W_s &= W_{s-1} - \eta_s\, (d_s + \mu M_s \text{ if Nesterov, else } M_s)

    μ is ``momentum``, τ ``dampening``, λ ``weight_decay``, η ``lr``; ``maximize`` flips the sign of g. With μ = 0 the
    buffer is unused and d is applied directly. The settings may change from step to step.
    """
    lr, mu, decay, sign = s["lr"], s["momentum"], s["weight_decay"], sign_of(s)
    if mu == 0:
        return Transition(ww=1 - lr * decay, wg=-lr * sign)
    keep, take = (0.0, 1.0) if s["fresh"] else (mu, 1 - s["dampening"])
    # d = sign·g + decay·W and M = keep·M + take·d; the step is straight·d + through·M(old)
    straight, through = (1 + mu * take, mu * keep) if s["nesterov"] else (take, keep)
    return Transition(
        ww=1 - lr * straight * decay,
        wm=-lr * through,
        mw=take * decay,
        mm=keep,
        wg=-lr * straight * sign,
        mg=take * sign,
    )


def asgd(s: Settings) -> Transition:
    r"""One step of ``torch.optim.ASGD``.

    .. math:: W_s = (1 - \lambda_d \eta_s)\, W_{s-1} - \eta_s (g_s + \lambda W_{s-1})

    λ_d is ``lambd``, η the optimiser's state ``eta``. Its running average does not affect the weights.
    """
    eta = s["eta"]
    return Transition(ww=1 - eta * (s["lambd"] + s["weight_decay"]), wg=-eta * sign_of(s))


def _asgd_settings(group: Mapping[str, Any], state: Mapping[str, Any]) -> Settings:
    return {"eta": float(torch.tensor(group["lr"])), **numbers(group, state)}  # rounded as in the optimiser


def sign_of(s: Settings) -> float:
    """The sign of the gradient in the step: −1 with ``maximize``."""
    return -1.0 if s["maximize"] else 1.0


SGD = Rule("SGD", sgd, buffer="momentum_buffer", settings=_settings)
ASGD = Rule("ASGD", asgd, settings=_asgd_settings)
