"""Muon: a matrix multiplies the running mean of the gradients from the left and makes it nearly orthogonal."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.types import Transition

from .protocol import Rule, Seen, Settings, Shared, numbers


def _settings(group: Mapping[str, Any], state: Mapping[str, Any]) -> Settings:
    return {**numbers(group, state), "like_adamw": float(group["adjust_lr_fn"] == "match_rms_adamw")}


def muon(s: Settings) -> Transition:
    r"""One step of ``torch.optim.Muon``.

    .. math:: M_s = \mu M_{s-1} + (1-\mu) g_s,\qquad
        W_s = (1-\eta\lambda) W_{s-1} - P_s\,(\mu M_s + (1-\mu) g_s \text{ if Nesterov, else } M_s)
    """
    mu = s["momentum"]
    through, straight = (mu * mu, (1 - mu) * (1 + mu)) if s["nesterov"] else (mu, 1 - mu)
    return Transition(
        ww=1 - s["lr"] * s["weight_decay"], mm=mu, mg=1 - mu, wp=-1.0, pm=through, pg=straight
    )  # fmt: skip


def muon_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r"""The matrix by which a few Newton–Schulz iterations multiply their argument.

    .. math:: X \leftarrow (a + b\,XX^\top + c\,(XX^\top)^2)\, X,\qquad X_0 = u / \lVert u\rVert

    The optimiser itself computes this in bfloat16, so its step differs from P u by a few per cent.
    """
    t = muon(s)
    x = t.pm * parameter.buffer + t.pg * parameter.gradient
    rows, columns = x.shape
    a, b, c = (s[f"ns_coefficients{i}"] for i in (1, 2, 3))
    p = torch.eye(rows, dtype=x.dtype, device=x.device) / x.norm().clamp(min=s["eps"])
    x = p @ x
    for _ in range(int(s["ns_steps"])):
        gram = x @ x.mT
        factor = b * gram + c * gram @ gram
        factor.diagonal().add_(a)
        p, x = factor @ p, factor @ x
    size = 0.2 * max(rows, columns) ** 0.5 if s["like_adamw"] else max(1.0, rows / columns) ** 0.5
    return p * (s["lr"] * size)


MUON = Rule(
    "Muon", muon, "momentum_buffer", (), muon_p, acts="left", local=False, settings=_settings, decays_by_factor=True,
    not_differentiable=lambda s: "rounding to bfloat16, which is left out",
)  # fmt: skip
