"""One reader for tables of numbers, words and texts, and for files of arrays. Nothing is ever unpickled."""

from .columns import Columns, columns_of, in_table
from .read import read
from .rows import DataRows
from .tables import KINDS
from .vocabulary import ByteVocabulary, Vocabulary, WordVocabulary, load_vocabulary

__all__ = [
    "KINDS",
    "ByteVocabulary",
    "Columns",
    "DataRows",
    "Vocabulary",
    "WordVocabulary",
    "columns_of",
    "in_table",
    "load_vocabulary",
    "read",
]
