"""Attention during training: gradient descent on one layer, and reports on heads at several steps."""

from .trajectory import Trajectory, trajectory

__all__ = ["Trajectory", "trajectory"]
