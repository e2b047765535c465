"""Where training takes an attention layer: gradient descent, and heads through time."""

from .trajectory import Trajectory, trajectory

__all__ = ["Trajectory", "trajectory"]
