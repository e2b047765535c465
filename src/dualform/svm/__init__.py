"""What an attention layer selected: the support vector regression that it is the expansion of."""

from .expansion import expand, primal
from .features import polynomial_features, truncation_bound
from .generalised import TwoParts, fit_generalised
from .proof import Proof, prove
from .regression import Regression, Solution
from .separation import Certificate, Separation, fit
from .solver import solve
from .support import Support, SupportVector, support_vectors

__all__ = [
    "Certificate",
    "Proof",
    "Regression",
    "Separation",
    "Solution",
    "Support",
    "SupportVector",
    "TwoParts",
    "expand",
    "fit",
    "fit_generalised",
    "polynomial_features",
    "primal",
    "prove",
    "solve",
    "support_vectors",
    "truncation_bound",
]
