"""Image data sets with classes: MNIST, Fashion-MNIST, CIFAR-10."""

import gzip
import tarfile
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from dualform.errors import DataNotFound, require

from .folder import data_file, find_file
from .reference import ReferenceSplit, Scale, measured_before, reference_images, scale_of

ImageSubset = Literal["train", "valid", "test"]
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The classes of Fashion-MNIST and of CIFAR-10."""


class Images(NamedTuple):
    """Images and their classes."""

    images: UInt8[Tensor, "n height width *channels"]
    labels: Int[Tensor, " n"]

    def __getitem__(self, rows: Tensor) -> "Images":  # type: ignore[override]
        return Images(self.images[rows], self.labels[rows])


def mnist(
    part: ImageSubset, name: Literal["mnist", "fashion-mnist"] = "mnist", *, split: ReferenceSplit = "ordinary"
) -> Images:
    """The 60,000 training or 10,000 test images of (Fashion-)MNIST, 28 × 28 bytes each.

    ``split="reference"`` gives the 40,053 training images of the paper's code, and 2,008 for validation.
    """
    return _part(partial(_idx, name), part, split)


def fashion_mnist(part: ImageSubset, *, split: ReferenceSplit = "ordinary") -> Images:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): clothes in the format of MNIST."""
    return mnist(part, "fashion-mnist", split=split)


def cifar10(part: ImageSubset, *, split: ReferenceSplit = "ordinary", small: bool = False) -> Images:
    """The 50,000 training or 10,000 test images of CIFAR-10 (Krizhevsky 2009), 32 × 32 × 3 bytes each.

    ``small=True`` uses the first 10,000 and 2,000, which are in ``cifar10/train10k.png`` and ``test2k.png``.
    """
    return _part(_small_cifar if small else _cifar, part, split)


def reference_scale(images: Images) -> Scale:
    """The scale of the paper's code, computed from all training images of a data set."""
    return scale_of(images.images[measured_before(len(images.labels))])


def _part(read: Callable[[bool], Images], part: ImageSubset, split: ReferenceSplit) -> Images:
    if part == "valid" and split != "reference":
        raise DataNotFound("the ordinary split has no part 'valid': use 'train', 'test', or split='reference'.")
    everything = read(part != "test")
    if part == "test" or split == "ordinary":
        return everything
    return everything[reference_images(len(everything.labels), part)]


def _idx(name: str, training: bool) -> Images:
    prefix = "train" if training else "t10k"
    images = _bytes(f"{name}/{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    labels = _bytes(f"{name}/{prefix}-labels-idx1-ubyte.gz", 8)
    return Images(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def _bytes(name: str, header: int) -> np.ndarray:
    with gzip.open(data_file(name)) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header).copy()


def _cifar(training: bool) -> Images:
    """From the authors' archive: a byte for the class, then red, green and blue, row by row."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if training else ["test_batch.bin"]
    try:
        archive = data_file("cifar10/cifar-10-binary.tar.gz")
    except DataNotFound as error:
        if find_file("cifar10/train10k.png") is None:
            raise
        raise DataNotFound(f"{error} A part of it is available: cifar10(…, small=True).") from error
    with tarfile.open(archive) as tar:
        files = [tar.extractfile(f"cifar-10-batches-bin/{name}") for name in names]
        rows = np.concatenate([np.frombuffer(f.read(), np.uint8).reshape(-1, 3073) for f in files if f is not None])
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy()
    return Images(torch.from_numpy(images), torch.from_numpy(rows[:, 0].astype(np.int64)))


def _small_cifar(training: bool) -> Images:
    name = "train10k" if training else "test2k"
    picture = np.asarray(require("PIL.Image", "plot").open(data_file(f"cifar10/{name}.png")))
    labels = np.load(data_file(f"cifar10/{name}-labels.npy"), allow_pickle=False)
    return Images(torch.from_numpy(picture.reshape(-1, 32, 32, 3).copy()), torch.from_numpy(labels.astype(np.int64)))
