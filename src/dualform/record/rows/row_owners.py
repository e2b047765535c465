r"""Finds the example o(r) of each row r of a call.

If the loss of example i is multiplied by a label c_i, the errors of its rows are multiplied by c_i, and no others. So
two backward passes of one forward pass, without labels and with them, show the example of every row, however the
network arranges its rows: :math:`e_r(c) = c_{o(r)}\, e_r(1)`. A row to whose error several examples contribute has no
such ratio. Labels are powers of two, so that the product is exact in every precision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

LABELS = 4
"""Different labels: 1, 2, 4, 8."""


class AxisSplit(NamedTuple):
    """One of the leading axes counts the examples, in its outer part (all rows of the first example, then those of the
    second) or in its inner part (the first rows of all examples, then the second ones). Both are the same where the
    axis has as many entries as there are examples.
    """

    axis: int
    outer: bool

    def stride(self, leading: Sequence[int], examples: int) -> int | None:
        """Row r belongs to example r // stride % examples; None where the axis has no such length."""
        if self.axis >= len(leading) or not leading[self.axis] or leading[self.axis] % examples:
            return None
        stride = leading[self.axis] // examples if self.outer else 1
        for extent in leading[self.axis + 1 :]:
            stride *= extent
        return stride


RowsOfExample = frozenset[AxisSplit] | str
"""All splits that the rows of a call agree with; or the reason why there is none."""

SHARED = "its rows belong to all examples alike"
MIXED = "some of its rows belong to several examples at once"
SELECTED = "its rows are selected or ordered by the values of the batch"


def splits_of(leading: Sequence[int]) -> list[AxisSplit]:
    """All ways to split some leading axes."""
    return [AxisSplit(axis, outer) for axis in range(len(leading)) for outer in (True, False)]


def owners(rows: int, stride: int, examples: int) -> Int[Tensor, " rows"]:
    """The example of each row."""
    return torch.arange(rows) // stride % examples


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding may cause in a ratio (labels are exact, but some devices change the order of
    sums).
    """
    return min(1e-2, 1e3 * torch.finfo(dtype).eps)


def draw_labels(examples: int, random: torch.Generator) -> Float[Tensor, " examples"]:
    """Draw a power of two for each example, different ones for neighbours."""
    blocks = [torch.randperm(LABELS, generator=random) for _ in range(-(-examples // LABELS))]
    return torch.exp2(torch.cat(blocks)[:examples].double())


def rows_by_labels(
    plain: Float[Tensor, "*leading d"], labelled: Float[Tensor, "*leading d"], labels: Float[Tensor, " examples"]
) -> RowsOfExample | None:  # fmt: skip
    """The splits of rows into examples, from their errors without labels and with them; None where no error arrived."""
    leading, bar = tuple(plain.shape[:-1]) or (1,), tolerance(plain.dtype)
    plain, labelled = (errors.detach().double().reshape(-1, errors.shape[-1]).cpu() for errors in (plain, labelled))
    size = plain.abs().amax(1) if plain.numel() else plain.new_zeros(len(plain))
    reached = size > bar * bar * size.max() if len(size) else size.bool()
    if not reached.any():
        return None
    ratio = (plain * labelled).sum(1) / plain.square().sum(1)
    alone = ((labelled - ratio.unsqueeze(1) * plain).abs().amax(1) <= bar * ratio.abs() * size)[reached]
    label = torch.exp2(ratio.clamp(min=0.5).log2().round())
    if not alone.all() or not ((ratio - label).abs() <= bar * label)[reached].all():
        return MIXED
    splits = set()
    for split in splits_of(leading):
        stride = split.stride(leading, len(labels))
        if stride is not None and (labels[owners(len(plain), stride, len(labels))] == label)[reached].all():
            splits.add(split)
    return frozenset(splits) or SELECTED


def rows_by_rolling(
    before: Sequence[Shaped[Tensor, "*leading _"]], after: Sequence[Shaped[Tensor, "*leading _"]], examples: int
) -> RowsOfExample:  # fmt: skip
    """The splits of rows into examples, from their keys and errors before and after every example has moved to the
    place of the next one.
    """
    leading = tuple(before[0].shape[:-1]) or (1,)
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return SELECTED
    rows = torch.arange(before[0].shape[:-1].numel())
    if _same(before, after, rows):
        return SHARED
    splits = set()
    for split in splits_of(leading):
        stride = split.stride(leading, examples)
        if stride is not None:
            example = owners(len(rows), stride, examples)
            if _same(before, after, rows + ((example - 1) % examples - example) * stride):
                splits.add(split)
    return frozenset(splits) or SELECTED


def _same(before: Sequence[Tensor], after: Sequence[Tensor], rows: Int[Tensor, " r"]) -> bool:
    """Whether ``before[rows]`` equals ``after``, floating-point numbers up to rounding."""
    for first, second in zip(before, after, strict=True):
        bar = 10 * tolerance(first.dtype) if first.is_floating_point() else 0.0
        first, second = (tensor.detach().double().cpu().reshape(len(rows), -1) for tensor in (first, second))
        if first.numel() and ((first[rows] - second).abs() > bar * first.abs().amax(0)).any():
            return False
    return True
