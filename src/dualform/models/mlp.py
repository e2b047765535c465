"""A multilayer perceptron for images."""

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers ``fc1``, ``fc2``, … with ReLU between them; images are flattened.

    ``MLP(784, 800, 800, 10)`` is the network of Irie, Csordás, Schmidhuber (2022), arXiv 2202.05798.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.depth = len(widths) - 1
        for i, (d_in, d_out) in enumerate(pairwise(widths), start=1):
            setattr(self, f"fc{i}", nn.Linear(d_in, d_out))

    @property
    def layers(self) -> Sequence[nn.Linear]:
        """The linear layers, first to last."""
        return [getattr(self, f"fc{i}") for i in range(1, self.depth + 1)]

    def forward(self, x: Float[Tensor, "b ..."]) -> Float[Tensor, "b d_out"]:
        """The logits of each image."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)
