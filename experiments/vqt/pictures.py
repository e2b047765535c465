"""Images of every data set in one shape, 3 × 32 × 32 with values from −1 to 1, and their classes."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform import data

FIRST_TEST = 1437
"""The number of training images among the 1,797 small digits: the first ones in the file."""


class Pictures(NamedTuple):
    """Images and their classes."""

    x: Tensor
    y: Tensor

    def __getitem__(self, which: Tensor | slice) -> "Pictures":  # type: ignore[override]
        return Pictures(self.x[which], self.y[which])


@cache
def pictures(name: str, part: str) -> Pictures:
    """The training or test images of a data set; for CIFAR-10 subsets of 10,000 and 2,000."""
    if name == "small-digits":
        images, labels = data.small_digits()
        large = images.float().repeat_interleave(4, 1).repeat_interleave(4, 2) / 8 - 1
        chosen = slice(None, FIRST_TEST) if part == "train" else slice(FIRST_TEST, None)
        return Pictures(_in_colour(large[chosen]), labels[chosen])
    if name == "cifar10":
        images, labels = data.cifar10(part, small=True)  # pyright: ignore[reportArgumentType]
        return Pictures(images.movedim(-1, 1).float() / 127.5 - 1, labels)
    images, labels = data.mnist(part, name)  # pyright: ignore[reportArgumentType]
    return Pictures(_in_colour(F.pad(images.float() / 127.5 - 1, (2, 2, 2, 2), value=-1.0)), labels)


def _in_colour(grey: Tensor) -> Tensor:
    return grey.unsqueeze(1).expand(-1, 3, -1, -1)


def labelled(name: str, count: int, seed: int) -> tuple[Pictures, Tensor]:
    """``count`` random training images, determined by the seed, and their indices in the data set."""
    whole = pictures(name, "train")
    index = torch.randperm(len(whole.y), generator=torch.Generator().manual_seed(seed))[:count]
    return whole[index], index
