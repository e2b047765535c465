"""Synthetic tasks."""

from .listops import ListOps, listops
from .needle import Needle, needle

__all__ = ["ListOps", "Needle", "listops", "needle"]
