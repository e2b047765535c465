"""The page of one prediction: what the network says, and which training it is made of."""

from .page import PredictionView, predict
from .question import ORDERS, AskedTokens, PredictionQuestion
from .sums import name_of
from .top_examples import TopExample, top_example

__all__ = [
    "ORDERS",
    "AskedTokens",
    "PredictionQuestion",
    "PredictionView",
    "TopExample",
    "name_of",
    "predict",
    "top_example",
]
