"""The real data sets, found or downloaded, never invented."""

from .digits import digits
from .folder import data_file
from .mnist import Images, mnist
from .stories import Stories, stories
from .text import aesop, wikitext2

__all__ = ["Images", "Stories", "aesop", "data_file", "digits", "mnist", "stories", "wikitext2"]
