"""The real data sets, found or downloaded, never invented."""

from .digits import digits
from .folder import data_file
from .images import FASHION, OBJECTS, Images, cifar10, fashion_mnist, mnist, reference_scale
from .reference import Scale, Split, reference_images
from .stories import Stories, stories
from .text import aesop, wikitext2

__all__ = [
    "FASHION",
    "OBJECTS",
    "Images",
    "Scale",
    "Split",
    "Stories",
    "aesop",
    "cifar10",
    "data_file",
    "digits",
    "fashion_mnist",
    "mnist",
    "reference_images",
    "reference_scale",
    "stories",
    "wikitext2",
]
