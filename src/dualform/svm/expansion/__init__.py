"""Attention as a support vector expansion: the regression behind a head, and its support vectors."""

from .expansion import expand, primal
from .features import polynomial_features, truncation_bound
from .regression import Regression, Solution
from .solver import solve
from .support_vectors import By, Support, SupportVector, power, support_vectors
from .theorem import Proof, prove

__all__ = [
    "By",
    "Proof",
    "Regression",
    "Solution",
    "Support",
    "SupportVector",
    "expand",
    "polynomial_features",
    "power",
    "primal",
    "prove",
    "solve",
    "support_vectors",
    "truncation_bound",
]
