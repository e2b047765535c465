"""What an attention layer selected: the regression that it is the expansion of, and how it separates tokens."""

from .dynamics.trajectory import Trajectory, trajectory
from .expansion.expansion import expand, primal
from .expansion.features import polynomial_features, truncation_bound
from .expansion.regression import Regression, Solution
from .expansion.solver import solve
from .expansion.support_vectors import Support, SupportVector, support_vectors
from .expansion.theorem import Proof, prove
from .heads.attention_calls import look
from .heads.head_findings import HeadReport, SupportToken
from .heads.origin import Origin, origin
from .heads.report import Report, report, reports
from .separation.generalised import TwoParts, fit_generalised
from .separation.separation import InfeasibilityCertificate, Separation, fit

__all__ = [
    "HeadReport",
    "InfeasibilityCertificate",
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
