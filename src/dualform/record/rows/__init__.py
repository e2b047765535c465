"""Finds out to which example of the batch each row of a layer belongs."""

from .row_credit import RowCredit

__all__ = ["RowCredit"]
