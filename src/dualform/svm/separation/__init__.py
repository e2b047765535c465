"""Solvers for the matrix that separates selected tokens from the others by the largest margin."""

from .generalised import TwoParts, fit_generalised
from .separation import InfeasibilityCertificate, Separation, fit
from .span import project_to_span

__all__ = ["InfeasibilityCertificate", "Separation", "TwoParts", "fit", "fit_generalised", "project_to_span"]
