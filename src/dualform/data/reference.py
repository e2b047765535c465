"""The split and scale of images in the code of Irie, Csordás, Schmidhuber (2022), besides the ordinary split.

From the 60,000 training images of (Fashion-)MNIST it draws a random 50,000, and from those a random four fifths:
40,053. CIFAR-10 only gets the second draw. Pixels are scaled by one mean and one deviation per channel, measured before
the second draw.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

ReferenceSplit = Literal["ordinary", "reference"]
"""All training images, or those that the paper's code trains on."""

KEPT, VALID = 50_000, 0.2
FIRST_SEED, SECOND_SEED = 0x1234, 0xC1CAFA52


class Scale(NamedTuple):
    """Mean and deviation of the bytes of each channel."""

    mean: Float[Tensor, " c"]
    deviation: Float[Tensor, " c"]

    def __call__(self, images: UInt8[Tensor, "n h w *c"]) -> Float[Tensor, "n h w *c"]:
        """Pixels with mean 0 and deviation 1 in each channel."""
        mean, deviation = (moment if images.ndim == 4 else moment[0] for moment in self)
        return (images.float() - mean) / deviation


def reference_images(count: int, part: str) -> Int[Tensor, " k"]:
    """The indices of the training images in the ``train`` or the ``valid`` part of the paper's code."""
    order = np.arange(count)
    if count > KEPT:
        shuffled = np.random.RandomState(FIRST_SEED).permutation(count)
        order = shuffled[:KEPT] if part == "train" else shuffled[KEPT:]
    kept = np.random.RandomState(SECOND_SEED).rand(len(order)) > VALID
    return torch.from_numpy(order[kept if part == "train" else ~kept])


def measured_before(count: int) -> Int[Tensor, " k"]:
    """The indices of the training images that the scale is measured on."""
    order = np.arange(count) if count <= KEPT else np.random.RandomState(FIRST_SEED).permutation(count)[:KEPT]
    return torch.from_numpy(order)


def scale_of(images: UInt8[Tensor, "n h w *c"]) -> Scale:
    """Measure the scale of images."""
    pixels = images.flatten(0, 2).double() if images.ndim == 4 else images.flatten().double().unsqueeze(1)
    return Scale(pixels.mean(0).float(), pixels.std(0).float())
