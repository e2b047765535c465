r"""Attention from both sides: as a support vector expansion, and as the layer that it is the dual of.

.. math:: f(x) = \frac{W\Phi(x)}{h(x)} + b = \sum_j v_j \frac{\Phi(x)^\top\Phi(k_j)}{h(x)} + b,\qquad
    W = \sum_j v_j\Phi(k_j)^\top,\quad h(x) = \sum_j \Phi(x)^\top\Phi(k_j)

With the exponential kernel the right-hand side is softmax attention: keys k, values v, query x (Nguyen et al. 2023,
arXiv 2406.13781, Theorem 1). h overflows where keys are long, so only its logarithm is stored.
"""

import math

from jaxtyping import Bool, Float
from torch import Tensor

from dualform.attention import KernelName, feature_map

from .features import polynomial_features


def log_kernel(
    x: Float[Tensor, "*s n d"], y: Float[Tensor, "*s m d"], kernel: KernelName = "exp"
) -> Float[Tensor, "*s n m"]:
    r"""The logarithm of :math:`\Phi(x)^\top\Phi(y)`."""
    if kernel == "exp":
        return x @ y.mT / math.sqrt(x.shape[-1])
    return (feature_map(x) @ feature_map(y).mT).log()


def log_normaliser(
    x: Float[Tensor, "*s n d"], keys: Float[Tensor, "*s m d"], kernel: KernelName = "exp",
    hidden: Bool[Tensor, "*#s #n m"] | None = None,
) -> Float[Tensor, "*s n"]:  # fmt: skip
    """The logarithm of h(x), summed over the keys that are not hidden."""
    logits = log_kernel(x, keys, kernel)
    return (logits if hidden is None else logits.masked_fill(hidden, -math.inf)).logsumexp(-1)


def expand(
    x: Float[Tensor, "n d"], keys: Float[Tensor, "m d"], values: Float[Tensor, "m e"], *, kernel: KernelName = "exp",
    hidden: Bool[Tensor, "#n m"] | None = None, bias: Float[Tensor, " e"] | None = None,
) -> Float[Tensor, "n e"]:  # fmt: skip
    """The support vector expansion f(x). ``hidden`` keys are left out of the data that f was fitted to."""
    logits = log_kernel(x, keys, kernel)
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    f = logits.softmax(-1).nan_to_num() @ values
    return f if bias is None else f + bias


def primal(
    x: Float[Tensor, "n d"], keys: Float[Tensor, "m d"], values: Float[Tensor, "m e"], degree: int, *,
    bias: Float[Tensor, " e"] | None = None,
) -> Float[Tensor, "n e"]:  # fmt: skip
    """f(x) as a layer WΦ(x)/h(x) + b, with the features of the exponential kernel up to ``degree``."""
    at_keys, at_x = polynomial_features(keys, degree), polynomial_features(x, degree)
    weight = values.to(at_keys.dtype).mT @ at_keys
    f = at_x @ weight.mT / (at_x @ at_keys.sum(0)).unsqueeze(-1)
    return f if bias is None else f + bias
