"""Adafactor: a running square that is stored as one number per row and one per column."""

from torch import Tensor

from dualform.types import Transition

from .adam import step_of
from .protocol import Rule, Seen, Settings, Shared
from .sgd import sign_of


def adafactor(s: Settings) -> Transition:
    r"""One step of ``torch.optim.Adafactor``: :math:`W_s = (1 - \eta\lambda) W_{s-1} - P_s g_s`."""
    return Transition(ww=1 - s["lr"] * s["weight_decay"], wp=-1.0, pg=sign_of(s))


def adafactor_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r"""The preconditioner: steps are relative to the size of the weights, and large ones are clipped.

    .. math:: P_s = \frac{\alpha_s}{\max(1, \mathrm{RMS}(g/\sqrt{V})/d)} \frac{1}{\sqrt{V_s}},\quad
        V_s = \frac{R_s C_s}{\mathrm{mean}(R_s)},\quad
        \alpha_s = \max(\epsilon_2, \mathrm{RMS}(W_{s-1}))\,\min(\eta, 1/\sqrt s)

    R and C are running means of :math:`g^2` over rows and columns. All examples share these numbers.
    """
    g, step = parameter.gradient, step_of(s)
    new = step ** s["beta2_decay"]
    floor = s.get("eps1", parameter.eps)
    if g.ndim > 1:
        rows = shared["row_var"] = _moving_average(shared.get("row_var"), (g * g).mean(-1, keepdim=True), new)
        columns = shared["col_var"] = _moving_average(shared.get("col_var"), (g * g).mean(-2, keepdim=True), new)
        v = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=floor)
    else:
        v = shared["variance"] = _moving_average(shared.get("variance"), g * g, new)
    p = v.clamp(min=floor * floor).rsqrt()
    size = _rms(parameter.weight).clamp(min=s["eps2"]) * min(s["lr"], step**-0.5)
    return p * (size / (_rms(p * g) / s["d"]).clamp(min=1.0))


def _moving_average(old: Tensor | None, new: Tensor, share: float) -> Tensor:
    return share * new if old is None else old + share * (new - old)


def _rms(x: Tensor) -> Tensor:
    return x.norm().cpu().double() / x.numel() ** 0.5


ADAFACTOR = Rule(
    "Adafactor", adafactor, None, ("row_var", "col_var", "variance"), adafactor_p, local=False, decays_by_factor=True,
    not_differentiable=lambda s: "the bounds of its step",
)  # fmt: skip
