"""MNIST and Fashion-MNIST in their original files."""

import gzip
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from .folder import data_file


class Images(NamedTuple):
    """Pictures and their classes."""

    images: UInt8[Tensor, "n height width"]
    labels: Int[Tensor, " n"]


def mnist(part: Literal["train", "test"], name: Literal["mnist", "fashion-mnist"] = "mnist") -> Images:
    """The 60,000 training or 10,000 test images of (Fashion-)MNIST, 28 × 28 bytes each."""
    prefix = "train" if part == "train" else "t10k"
    images = _read(f"{name}/{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    labels = _read(f"{name}/{prefix}-labels-idx1-ubyte.gz", 8)
    return Images(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def _read(name: str, header: int) -> np.ndarray:
    with gzip.open(data_file(name)) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header).copy()
