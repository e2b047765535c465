"""What an attention layer selected: the regression that it is the expansion of, and how it separates tokens."""

from .expansion import expand, primal
from .features import polynomial_features, truncation_bound
from .finding import HeadReport, SupportToken
from .generalised import TwoParts, fit_generalised
from .look import look
from .origin import Origin, origin
from .proof import Proof, prove
from .regression import Regression, Solution
from .report import Report, report, reports
from .separation import Certificate, Separation, fit
from .solver import solve
from .support import Support, SupportVector, support_vectors
from .trajectory import Trajectory, trajectory

__all__ = [
    "Certificate",
    "HeadReport",
    "Origin",
    "Proof",
    "Regression",
    "Report",
    "Separation",
    "Solution",
    "Support",
    "SupportToken",
    "SupportVector",
    "Trajectory",
    "TwoParts",
    "expand",
    "fit",
    "fit_generalised",
    "look",
    "origin",
    "polynomial_features",
    "primal",
    "prove",
    "report",
    "reports",
    "solve",
    "support_vectors",
    "trajectory",
    "truncation_bound",
]
