"""Examples in a form that people can look at: pictures, texts, series, numbers; from files, data sets and uploads."""

from dualform.data import Vocabulary, load_vocabulary
from dualform.explain.notebook import data_address, png

from .examples import Examples, IndexableRows, ShownExample
from .load import is_series, load_examples
from .pictures import read_picture

__all__ = [
    "Examples",
    "IndexableRows",
    "ShownExample",
    "Vocabulary",
    "data_address",
    "is_series",
    "load_examples",
    "load_vocabulary",
    "png",
    "read_picture",
]
