"""The real data sets, found or downloaded, never invented."""

from .digits import digits
from .folder import data_file
from .mnist import Images, mnist
from .text import aesop, wikitext2

__all__ = ["Images", "aesop", "data_file", "digits", "mnist", "wikitext2"]
