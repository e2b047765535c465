"""The matrix that separates selected tokens from the others by the largest margin, and its solvers."""

from .generalised import TwoParts, fit_generalised
from .separation import InfeasibilityCertificate, Separation, fit
from .span import inside

__all__ = ["InfeasibilityCertificate", "Separation", "TwoParts", "fit", "fit_generalised", "inside"]
