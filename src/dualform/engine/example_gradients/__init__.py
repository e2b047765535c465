"""The gradient of each example's loss from its slots: products with queries, and EK-FAC factors."""

from .ekfac import kronecker_factors, solve_fisher, usual_damping
from .products import example_products, extended_matrix

__all__ = [
    "example_products",
    "extended_matrix",
    "kronecker_factors",
    "solve_fisher",
    "usual_damping",
]
