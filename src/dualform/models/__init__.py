"""The networks of the examples and experiments."""

from .block import TransformerBlock
from .classifier import SequenceClassifier, SeriesClassifier, TextClassifier
from .convert import as_timm, convert
from .lstm import LSTMLanguageModel
from .mlp import MLP
from .segments import SegmentLM, noam
from .transformer import TransformerLM
from .vit import ViT

__all__ = [
    "MLP",
    "LSTMLanguageModel",
    "SegmentLM",
    "SequenceClassifier",
    "SeriesClassifier",
    "TextClassifier",
    "TransformerBlock",
    "TransformerLM",
    "ViT",
    "as_timm",
    "convert",
    "noam",
]
