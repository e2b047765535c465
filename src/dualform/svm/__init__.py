"""What an attention layer selected: the support vector regression that it is the expansion of."""

from .expansion import expand, primal
from .features import polynomial_features, truncation_bound
from .proof import Proof, prove
from .regression import Regression, Solution
from .solver import solve
from .support import Support, SupportVector, support_vectors

__all__ = [
    "Proof",
    "Regression",
    "Solution",
    "Support",
    "SupportVector",
    "expand",
    "polynomial_features",
    "primal",
    "prove",
    "solve",
    "support_vectors",
    "truncation_bound",
]
