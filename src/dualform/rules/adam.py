"""Adam and its variants: a running mean of gradients, divided entry by entry by the root of their running square."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.types import Transition

from .protocol import Rule, Seen, Settings, Shared, numbers, root
from .sgd import sign_of


@dataclass(frozen=True)
class Decay:
    """Weight decay: the factor ``left`` of W, and the multiple of W added to the gradient if the decay is coupled."""

    left: float
    coupled: float


def decay_of(s: Settings) -> Decay:
    """The weight decay of a step: decoupled (AdamW), or coupled (Adam, where it also enters the running square)."""
    if s.get("decoupled_weight_decay"):
        return Decay(1 - s["lr"] * s["weight_decay"], 0.0)
    return Decay(1.0, s["weight_decay"])


def decayed_gradient(s: Settings, parameter: Seen) -> Tensor:
    """The gradient d, with the sign of ``maximize`` and any coupled weight decay."""
    d = sign_of(s) * parameter.gradient
    coupled = decay_of(s).coupled
    return d + coupled * parameter.weight if coupled else d


def mean_and_part(s: Settings, of_mean: float, of_gradient: float = 0.0) -> Transition:
    r"""M ← β₁M + (1 − β₁)d, and W ← (decay factor) W − P (a M + b d), with a ``of_mean`` and b ``of_gradient``."""
    beta, sign, decay = s["betas1"], sign_of(s), decay_of(s)
    take = 1 - beta + (of_gradient / of_mean if of_gradient else 0.0)
    return Transition(
        ww=decay.left,
        mw=(1 - beta) * decay.coupled,
        mm=beta,
        mg=(1 - beta) * sign,
        wp=-of_mean,
        pw=take * decay.coupled,
        pm=beta,
        pg=take * sign,
    )


def running_square(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r"""V ← β₂V + (1 − β₂)d²."""
    d, beta = decayed_gradient(s, parameter), s["betas2"]
    v = d.square().mul_(1 - beta)
    if "exp_avg_sq" in shared:
        v.add_(shared["exp_avg_sq"], alpha=beta)
    shared["exp_avg_sq"] = v
    return v


def step_of(s: Settings) -> int:
    """The number of this step, the first being 1."""
    return int(s.get("step", 0)) + 1


def correction(s: Settings, beta: str) -> float:
    """The bias correction 1 − β^s of a running mean that starts at zero.

    A capturable (or compiled) optimiser counts steps in a float32 tensor, so 1 − β^s is rounded there.
    """
    if s.get("capturable"):
        return float(1 - s[beta] ** torch.tensor(float(step_of(s))))
    return 1 - s[beta] ** step_of(s)


def adam_settings(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step, and whether the optimiser counts steps in a tensor."""
    return numbers(group, state) | ({"capturable": 1.0} if group.get("capturable") else {})


def adamw_settings(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """Those of Adam. In older versions of torch the group of an AdamW does not say that its decay is decoupled."""
    settings = adam_settings(group, state)
    settings.setdefault("decoupled_weight_decay", 1.0)
    return settings


def adam(s: Settings) -> Transition:
    r"""One step of ``torch.optim.Adam`` and ``AdamW``: :math:`W_s = a W_{s-1} - \frac{\eta}{1-\beta_1^s} P_s M_s`."""
    return mean_and_part(s, of_mean=s["lr"] / correction(s, "betas1"))


def adam_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = 1 / (\sqrt{V_s / (1-\beta_2^s)} + \epsilon)`; with ``amsgrad`` of the largest V so far."""
    v = running_square(s, shared, parameter)
    if s["amsgrad"]:
        before = shared.get("max_exp_avg_sq")
        v = shared["max_exp_avg_sq"] = v if before is None else v.maximum(before)
    return 1 / (root(v) / correction(s, "betas2") ** 0.5 + s["eps"])


def nadam(s: Settings) -> Transition:
    r"""One step of ``torch.optim.NAdam``: P applies to a mixture of M and d.

    .. math:: W_s = a W_{s-1} - \eta P_s \Big(\frac{1-\mu_s}{1-\prod_{i\le s}\mu_i} d_s
        + \frac{\mu_{s+1}}{1-\prod_{i\le s+1}\mu_i} M_s\Big),\quad \mu_s = \beta_1 (1 - 0.5 \cdot 0.96^{\psi s})

    ψ is ``momentum_decay``; the optimiser keeps the product as ``mu_product``.
    """
    mu, after, product = _mu(s, step_of(s)), _mu(s, step_of(s) + 1), s["mu_product"]
    return mean_and_part(s, s["lr"] * after / (1 - product * after), s["lr"] * (1 - mu) / (1 - product))


def _mu(s: Settings, step: int) -> float:
    return s["betas1"] * (1 - 0.5 * 0.96 ** (s["momentum_decay"] * step))


def _nadam_settings(group: Mapping[str, Any], state: Mapping[str, Any]) -> Settings:
    s = adam_settings(group, state)
    before = state.get("mu_product", torch.ones(()))
    s["mu_product"] = float(before * _mu(s, step_of(s)))  # rounded as the optimiser rounds it
    return s


def nadam_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = 1 / (\sqrt{V_s / (1-\beta_2^s)} + \epsilon)`."""
    v = running_square(s, shared, parameter)
    return 1 / (root(v / correction(s, "betas2")) + s["eps"])


def rectification(s: Settings) -> float | None:
    r"""The factor r_s of RAdam; None in the first steps, where the variance of V is not defined.

    .. math:: r_s = \sqrt{\frac{(\rho_s-4)(\rho_s-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_s}},\quad
        \rho_\infty = \frac{2}{1-\beta_2} - 1,\quad \rho_s = \rho_\infty - \frac{2 s \beta_2^s}{1-\beta_2^s}
    """
    step, beta = step_of(s), s["betas2"]
    most = 2 / (1 - beta) - 1
    rho = most - 2 * step * beta**step / correction(s, "betas2")
    if rho <= 5:
        return None
    return ((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)) ** 0.5


def radam(s: Settings) -> Transition:
    r"""One step of ``torch.optim.RAdam``: P is left out while its variance is not defined.

    .. math:: W_s = a W_{s-1} - \frac{\eta}{1-\beta_1^s}\, r_s \sqrt{1-\beta_2^s}\; P_s M_s
        \quad\text{or}\quad W_s = a W_{s-1} - \frac{\eta}{1-\beta_1^s}\, M_s
    """
    size, factor = s["lr"] / correction(s, "betas1"), rectification(s)
    if factor is not None:
        return mean_and_part(s, size * factor * correction(s, "betas2") ** 0.5)
    t = mean_and_part(s, size)
    return t._replace(ww=t.ww + t.wp * t.pw, wm=t.wp * t.pm, wg=t.wp * t.pg, wp=0.0, pw=0.0, pm=0.0, pg=0.0)


def radam_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = 1 / (\sqrt{V_s} + \epsilon)`."""
    return 1 / (root(running_square(s, shared, parameter)) + s["eps"])


def adamax(s: Settings) -> Transition:
    r"""One step of ``torch.optim.Adamax``: :math:`W_s = W_{s-1} - \frac{\eta}{1-\beta_1^s} P_s M_s`."""
    return mean_and_part(s, of_mean=s["lr"] / correction(s, "betas1"))


def adamax_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = 1/U_s,\quad U_s = \max(\beta_2 U_{s-1},\, |d_s| + \epsilon)`."""
    u = decayed_gradient(s, parameter).abs() + s["eps"]
    if "exp_inf" in shared:
        u = u.maximum(s["betas2"] * shared["exp_inf"])
    shared["exp_inf"] = u
    return 1 / u


def _maximum_of_amsgrad(s: Settings) -> str:
    return "the maximum of amsgrad" if s["amsgrad"] else ""


ADAM = Rule(
    "Adam", adam, "exp_avg", ("exp_avg_sq", "max_exp_avg_sq"), adam_p, settings=adam_settings, decays_by_factor=True,
    reads_gradients=True, not_differentiable=_maximum_of_amsgrad,
)  # fmt: skip
ADAMW = Rule(
    "AdamW", adam, "exp_avg", ("exp_avg_sq", "max_exp_avg_sq"), adam_p, settings=adamw_settings, decays_by_factor=True,
    reads_gradients=True, not_differentiable=_maximum_of_amsgrad,
)  # fmt: skip
NADAM = Rule(
    "NAdam", nadam, "exp_avg", ("exp_avg_sq",), nadam_p, settings=_nadam_settings, decays_by_factor=True,
    reads_gradients=True,
)  # fmt: skip
RADAM = Rule(
    "RAdam", radam, "exp_avg", ("exp_avg_sq",), radam_p, settings=adam_settings, decays_by_factor=True,
    reads_gradients=True,
)  # fmt: skip
ADAMAX = Rule(
    "Adamax", adamax, "exp_avg", ("exp_inf",), adamax_p, settings=adam_settings, reads_gradients=True,
    not_differentiable=lambda s: "its maximum",
)  # fmt: skip
