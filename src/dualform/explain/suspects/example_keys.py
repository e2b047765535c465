"""What a layer saw of each example, averaged over its visits."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.engine import StoreView, stream
from dualform.progress import OnProgress
from dualform.store import Store
from dualform.types import LayerInfo

from .training_set import TrainingSet

WIDEST = 2048
"""The most columns of a table of keys: wider keys are projected at random, rarer tokens are left out."""

PAIRS = 1 << 24
"""How many pairs of an example and a token are collected before equal ones are counted."""


def example_keys(
    store: Store, view: StoreView, layer: LayerInfo, training: TrainingSet, watch: OnProgress | None
) -> Float[Tensor, "n d"]:
    """One row an example: its mean key in the layer, or for an embedding the weighted counts of its tokens.

    Rows of examples that the layer never saw are zero.
    """
    if layer.indexed:
        return _token_counts(store, view, layer, training, watch)
    width = min(layer.key_size, WIDEST)
    generator = torch.Generator().manual_seed(0)
    projection = (
        torch.randn(layer.key_size, width, generator=generator, dtype=store.compute) / width**0.5
        if width < layer.key_size
        else None
    )
    total, count = torch.zeros(len(training), width, dtype=store.compute), torch.zeros(len(training))
    for slots in stream(store, layer.name, view, errors=False, watch=watch):
        rows = training.row_of_visit[slots.block.visits]
        kept = torch.from_numpy(np.flatnonzero(rows >= 0))
        keys = slots.keys if slots.block.key_scale is None else slots.keys * slots.block.key_scale.unsqueeze(1)
        keys = keys[kept] if projection is None else keys[kept] @ projection
        examples = torch.from_numpy(rows)[kept]
        total.index_add_(0, examples, keys.to(total.dtype))
        count.index_add_(0, examples, torch.ones(len(examples)))
    return total / count.clamp(min=1).to(total.dtype).unsqueeze(1)


def _token_counts(
    store: Store, view: StoreView, layer: LayerInfo, training: TrainingSet, watch: OnProgress | None
) -> Float[Tensor, "n d"]:
    r"""Counts of the commonest tokens: :math:`(1 + \log f_{it}) \log(n / n_t)`, each example of length 1.

    f is how often the example i has the token t at a visit, :math:`n_t` how many examples have it.
    """
    pairs, counts, waiting = np.zeros(0, np.int64), np.zeros(0), []
    for slots in stream(store, layer.name, view, errors=False, watch=watch):
        rows = training.row_of_visit[slots.block.visits]
        tokens = slots.keys[:, 0].long().numpy()
        waiting.append((rows * layer.width + tokens)[rows >= 0])
        if sum(map(len, waiting)) > PAIRS:
            pairs, counts, waiting = (*_counted(pairs, counts, waiting), [])
    pairs, counts = _counted(pairs, counts, waiting)
    rows, tokens = torch.from_numpy(pairs // layer.width), pairs % layer.width
    names, places, holders = np.unique(tokens, return_inverse=True, return_counts=True)
    commonest = np.sort(np.argsort(-holders, kind="stable")[:WIDEST])
    column = np.full(len(names), -1)
    column[commonest] = np.arange(len(commonest))
    columns = torch.from_numpy(column[places])
    rarity = torch.from_numpy(np.log(len(training) / holders)[places])
    times = (torch.from_numpy(counts) / training.visits[rows].clamp(min=1)).clamp(min=1)
    kept = columns >= 0
    table = torch.zeros(len(training), len(commonest), dtype=store.compute)
    table[rows[kept], columns[kept]] = ((1 + times.log()) * rarity)[kept].to(table.dtype)
    return torch.nn.functional.normalize(table, dim=1)


def _counted(
    pairs: Int[np.ndarray, " p"], counts: Float[np.ndarray, " p"], waiting: list[Int[np.ndarray, " m"]]
) -> tuple[Int[np.ndarray, " q"], Float[np.ndarray, " q"]]:
    """Every pair once, with how often it came."""
    new = np.concatenate([np.zeros(0, np.int64), *waiting])
    names, places = np.unique(np.concatenate([pairs, new]), return_inverse=True)
    return names, np.bincount(places, np.concatenate([counts, np.ones(len(new))]), minlength=len(names))
