"""The real data sets, found or downloaded, never invented."""

from .digits import digits
from .folder import data_file
from .mnist import Images, mnist

__all__ = ["Images", "data_file", "digits", "mnist"]
