"""RMSprop, Adagrad and Adadelta, which divide the gradient entry by entry, without a running mean of it."""

from torch import Tensor

from dualform.types import Transition

from .adam import decayed_gradient
from .protocol import Rule, Seen, Settings, Shared, root
from .sgd import sign_of


def rmsprop(s: Settings) -> Transition:
    r"""One step of ``torch.optim.RMSprop``, where the buffer is applied after P.

    .. math:: M_s = \mu M_{s-1} + P_s d_s,\qquad W_s = W_{s-1} - \eta\, (M_s \text{ if } \mu > 0 \text{ else } P_s d_s)
    """
    lr, mu, inner = s["lr"], s["momentum"], {"pw": s["weight_decay"], "pg": sign_of(s)}
    if mu > 0:
        return Transition(wm=-lr * mu, mm=mu, wp=-lr, mp=1.0, **inner)
    return Transition(wp=-lr, **inner)


def rmsprop_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = 1/(\sqrt{V_s} + \epsilon),\; V_s = \alpha V_{s-1} + (1-\alpha) d_s^2`; ``centered`` subtracts the
    squared mean from V.
    """
    d, alpha = decayed_gradient(s, parameter), s["alpha"]
    v = shared["square_avg"] = moving_average(alpha, shared.get("square_avg"), d * d)
    if s["centered"]:
        mean = shared["grad_avg"] = moving_average(alpha, shared.get("grad_avg"), d)
        v = v - mean * mean
    return 1 / (root(v) + s["eps"])


def adagrad(s: Settings) -> Transition:
    r"""One step of ``torch.optim.Adagrad``: :math:`W_s = W_{s-1} - \frac{\eta}{1 + (s-1)\eta_\text{decay}} P_s d_s`."""
    return Transition(wp=-s["lr"] / (1 + s["step"] * s["lr_decay"]), pw=s["weight_decay"], pg=sign_of(s))


def adagrad_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = 1/(\sqrt{V_s} + \epsilon),\; V_s = V_{s-1} + d_s^2`."""
    d = decayed_gradient(s, parameter)
    v = shared["sum"] = shared["sum"] + d * d
    return 1 / (root(v) + s["eps"])


def adadelta(s: Settings) -> Transition:
    r"""One step of ``torch.optim.Adadelta``: :math:`W_s = W_{s-1} - \eta P_s d_s`."""
    return Transition(wp=-s["lr"], pw=s["weight_decay"], pg=sign_of(s))


def adadelta_p(s: Settings, shared: Shared, parameter: Seen) -> Tensor:
    r""":math:`P_s = \sqrt{U_{s-1} + \epsilon} / \sqrt{V_s + \epsilon}`: V is the running square of d, U that of
    :math:`P_s d_s`, the steps that all examples took together.
    """
    d, rho = decayed_gradient(s, parameter), s["rho"]
    before = shared.get("acc_delta")
    v = shared["square_avg"] = moving_average(rho, shared.get("square_avg"), d * d)
    p = ((0.0 if before is None else before) + s["eps"]) ** 0.5 / (v + s["eps"]).sqrt()
    shared["acc_delta"] = moving_average(rho, before, (p * d) ** 2)
    return p


def moving_average(keep: float, old: Tensor | None, new: Tensor) -> Tensor:
    """Update a running mean, which is zero before its first step."""
    return (1 - keep) * new if old is None else keep * old + (1 - keep) * new


RMSPROP = Rule("RMSprop", rmsprop, "momentum_buffer", ("square_avg", "grad_avg"), rmsprop_p, reads_gradients=True)
ADAGRAD = Rule("Adagrad", adagrad, None, ("sum",), adagrad_p, reads_gradients=True)
ADADELTA = Rule("Adadelta", adadelta, None, ("square_avg", "acc_delta"), adadelta_p, reads_gradients=True)
