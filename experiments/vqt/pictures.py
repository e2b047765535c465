"""Pictures of every set in one shape: 3 × 32 × 32, from −1 to 1, and their classes."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform import data

FIRST_TEST = 1437
"""Of the 1,797 small digits the first so many are for training, in the order of the file."""


class Pictures(NamedTuple):
    """Pictures and their classes."""

    x: Tensor
    y: Tensor

    def __getitem__(self, which: Tensor | slice) -> "Pictures":  # type: ignore[override]
        return Pictures(self.x[which], self.y[which])


@cache
def pictures(name: str, part: str) -> Pictures:
    """The training or test pictures of a set; of CIFAR-10 the 10,000 and 2,000 that are at hand."""
    if name == "small-digits":
        images, labels = data.small_digits()
        large = images.float().repeat_interleave(4, 1).repeat_interleave(4, 2) / 8 - 1
        some = slice(None, FIRST_TEST) if part == "train" else slice(FIRST_TEST, None)
        return Pictures(_in_colour(large[some]), labels[some])
    if name == "cifar10":
        images, labels = data.cifar10(part, small=True)  # pyright: ignore[reportArgumentType]
        return Pictures(images.movedim(-1, 1).float() / 127.5 - 1, labels)
    images, labels = data.mnist(part, name)  # pyright: ignore[reportArgumentType]
    return Pictures(_in_colour(F.pad(images.float() / 127.5 - 1, (2, 2, 2, 2), value=-1.0)), labels)


def _in_colour(grey: Tensor) -> Tensor:
    return grey.unsqueeze(1).expand(-1, 3, -1, -1)


def labelled(name: str, count: int, seed: int) -> tuple[Pictures, Tensor]:
    """So many training pictures, drawn anew for each seed, and their numbers in the set."""
    whole = pictures(name, "train")
    index = torch.randperm(len(whole.y), generator=torch.Generator().manual_seed(seed))[:count]
    return whole[index], index
