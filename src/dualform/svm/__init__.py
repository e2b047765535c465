"""Attention layers read as support vector machines: the regression behind a head, and the margin of its selections."""

from .dynamics import Trajectory, trajectory
from .expansion import (
    Proof,
    Regression,
    Solution,
    Support,
    SupportVector,
    expand,
    polynomial_features,
    primal,
    prove,
    solve,
    support_vectors,
    truncation_bound,
)
from .heads import HeadReport, Origin, Report, SupportToken, look, origin, report, reports
from .separation import InfeasibilityCertificate, Separation, TwoParts, fit, fit_generalised

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
