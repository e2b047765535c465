"""Real data sets, read from disk or downloaded, never synthetic."""

from .digits import digits, small_digits
from .folder import data_file
from .images import FASHION, OBJECTS, Images, cifar10, fashion_mnist, mnist, reference_scale
from .indexed import IndexedCollate, IndexedDataset, indexed, indexed_collate
from .reading import Columns, DataRows, Vocabulary, columns_of, in_table, load_vocabulary, read
from .reference import ReferenceSplit, Scale, reference_images
from .reviews import ByteTexts, Reviews, as_bytes, reviews
from .series import Series, series, standardised
from .stories import Stories, stories
from .text import aesop, wikitext2

__all__ = [
    "FASHION",
    "OBJECTS",
    "ByteTexts",
    "Columns",
    "DataRows",
    "Images",
    "IndexedCollate",
    "IndexedDataset",
    "ReferenceSplit",
    "Reviews",
    "Scale",
    "Series",
    "Stories",
    "Vocabulary",
    "aesop",
    "as_bytes",
    "cifar10",
    "columns_of",
    "data_file",
    "digits",
    "fashion_mnist",
    "in_table",
    "indexed",
    "indexed_collate",
    "load_vocabulary",
    "mnist",
    "read",
    "reference_images",
    "reference_scale",
    "reviews",
    "series",
    "small_digits",
    "standardised",
    "stories",
    "wikitext2",
]
