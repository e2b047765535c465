"""Real data sets, read from disk or downloaded, never synthetic."""

from .digits import digits, small_digits
from .folder import data_file
from .images import FASHION, OBJECTS, Images, cifar10, fashion_mnist, mnist, reference_scale
from .indexed import IndexedCollate, IndexedDataset, indexed, indexed_collate
from .reference import ReferenceSplit, Scale, reference_images
from .reviews import ByteTexts, Reviews, as_bytes, reviews
from .series import Series, series, standardised
from .stories import Stories, stories
from .text import aesop, wikitext2

__all__ = [
    "FASHION",
    "OBJECTS",
    "ByteTexts",
    "Images",
    "IndexedCollate",
    "IndexedDataset",
    "ReferenceSplit",
    "Reviews",
    "Scale",
    "Series",
    "Stories",
    "aesop",
    "as_bytes",
    "cifar10",
    "data_file",
    "digits",
    "fashion_mnist",
    "indexed",
    "indexed_collate",
    "mnist",
    "reference_images",
    "reference_scale",
    "reviews",
    "series",
    "small_digits",
    "standardised",
    "stories",
    "wikitext2",
]
