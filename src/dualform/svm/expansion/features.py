r"""The feature map of softmax attention, written out up to a degree (Nguyen et al. 2023, arXiv 2406.13781).

.. math:: \Phi_n(x) = \prod_{i=1}^d \frac{(x_i/d^{1/4})^{n_i}}{\sqrt{n_i!}},\qquad
    \Phi(x)^\top\Phi(y) = \exp(x^\top y/\sqrt d)

There is one feature for each multi-index n = (n_1 … n_d), so there are infinitely many. C(d + T, T) of them have a
degree n_1 + … + n_d of at most T.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import SizeError

LARGEST = 1 << 24
"""The most numbers that a table of features may hold."""


def polynomial_features(x: Float[Tensor, "n d"], degree: int) -> Float[Tensor, "n f"]:
    """Φ(x) up to a degree, in float64. Low degrees come first: features up to T are a prefix of those up to T + 1."""
    n, d = x.shape
    _check_feature_count(n, d, degree)
    powers = _powers(x.double() / d**0.25, degree)
    features = powers.new_ones(1)
    for i, exponents in enumerate(multi_indices(d, degree).unbind(1)):
        features = features * powers[:, i, exponents]
    return features


def multi_indices(d: int, degree: int) -> Int[Tensor, "f d"]:
    """All tuples of d non-negative integers whose sum is at most the degree, sorted by that sum."""
    rows = torch.zeros(1, 0, dtype=torch.int64)
    for _ in range(d):
        left = degree - rows.sum(1)
        more = torch.cat([torch.arange(count + 1) for count in left.tolist()])
        rows = torch.cat([rows.repeat_interleave(left + 1, 0), more.unsqueeze(1)], 1)
    return rows[rows.sum(1).argsort(stable=True)]


def truncation_bound(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], degree: int) -> Float[Tensor, "n m"]:
    r"""Upper bound of the error that features up to a degree T make in the kernel.

    .. math:: |\Phi_T(x)^\top\Phi_T(y) - e^{x^\top y/\sqrt d}| \le \frac{r^{T+1} e^r}{(T+1)!},\quad
        r = |x^\top y|/\sqrt d
    """
    r = (x.double() @ y.double().mT).abs() / math.sqrt(x.shape[1])
    return ((degree + 1) * r.log() + r - math.lgamma(degree + 2)).exp()


def _powers(x: Float[Tensor, "n d"], degree: int) -> Float[Tensor, "n d t"]:
    """x^k/√k! for k = 0 … T, as a running product, which avoids computing factorials."""
    steps = torch.arange(1, degree + 1, dtype=x.dtype, device=x.device).sqrt()
    return torch.cat([torch.ones_like(x).unsqueeze(-1), (x.unsqueeze(-1) / steps).cumprod(-1)], -1)


def _check_feature_count(n: int, d: int, degree: int) -> None:
    if degree < 0:
        raise SizeError(f"degree={degree} must be 0 or more.")
    if n * math.comb(d + degree, degree) > LARGEST:
        raise SizeError(
            f"{d} numbers have {math.comb(d + degree, degree):,} features up to degree {degree}, for each of {n} rows. "
            "Take a lower degree or fewer numbers; the kernel itself needs no features."
        )
