"""The weights without some training, everything else held fixed: from a ledger where that is possible, else from slots.

- :func:`ledger_of`, :func:`ledger_of_time`: a ledger, one set of weights for each group of visits. Slow, once a column.
- :func:`_weights_by_ledger`: masks of whole groups, or whole stretches of training, sum the other groups. Immediate.
- :func:`_weights_by_slots`: all other masks sum the slots of the hidden visits, or of the shown ones. Slow, each time.

Each announces its work to the explorer's :class:`WorkQueue` with an estimate of the time.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dualform.explain import Ledger, Memory, stretch_edges
from dualform.progress import Progress

from ..explorer import Explorer
from ..work import PendingWork
from .masks import STRETCHES, WhatIfMasks, edges_of, groups_by_name


def masked_weights(
    explorer: Explorer, masks: WhatIfMasks, by: str, hidden: Bool[np.ndarray, " V"]
) -> dict[str, Tensor] | PendingWork:  # fmt: skip
    """The weights of the network without the hidden visits: from a ledger where that is possible, else from slots."""
    edges = edges_of(explorer)
    if masks.only_groups:
        of_name = groups_by_name(explorer, by)
        return _weights_by_ledger(
            explorer, masks, by, ledger_of(explorer, by), {of_name[group] for group in masks.groups}
        )
    if masks.only_time and masks.after in edges and masks.upto in edges:
        stretches = set(range(edges.index(masks.after), edges.index(masks.upto)))
        return _weights_by_ledger(explorer, masks, by, ledger_of_time(explorer), stretches)
    return _weights_by_slots(explorer, masks, by, hidden)


def _weights_by_ledger(
    explorer: Explorer, masks: WhatIfMasks, by: str, ledger: Ledger | PendingWork, hidden_groups: set[Any]
) -> dict[str, Tensor] | PendingWork:  # fmt: skip
    """The initial part and the groups that are not hidden, summed."""
    if isinstance(ledger, PendingWork):
        return ledger
    return explorer.work_queue.result(
        ("without", by, masks), "the weights without some groups", 0.0,
        lambda progress: sum_of_shown_groups(explorer.memory, ledger, hidden_groups),
    )  # fmt: skip


def sum_of_shown_groups(memory: Memory, ledger: Ledger, hidden_groups: set[Any]) -> dict[str, Tensor]:
    """Every parameter and buffer that the memory holds, without the parts of some groups of a ledger."""
    store, not_kept = memory.store, set(memory.store.not_kept(memory.step))
    shown = [parts for group, parts in ledger.groups.items() if group not in hidden_groups]
    weights = {}
    for p in store.manifest.parameters:
        if p.name in ledger.initial:
            parts = torch.stack([group[p.name] for group in shown]).sum(0) if shown else 0.0
            weights[p.name] = (ledger.initial[p.name] + parts).to(getattr(torch, p.dtype))
        elif p.name not in not_kept:
            weights[p.name] = store.snapshot(p.name, memory.step)
    return weights


def _weights_by_slots(
    explorer: Explorer, masks: WhatIfMasks, by: str, hidden: Bool[np.ndarray, " V"]
) -> dict[str, Tensor] | PendingWork:  # fmt: skip
    """All weights as a sum over slots, then that sum less the hidden slots, or the shown slots alone if they are fewer.

    Both are announced. The first sum stays in the store, which the second starts from.
    """
    memory, queue = explorer.memory, explorer.work_queue

    def rebuild(progress: Progress) -> bool:
        memory.held_weights(progress=progress)
        return True

    rebuilt = queue.result(("rebuilt", memory.step), "the weights as a sum", explorer.rebuild_seconds, rebuild)
    if isinstance(rebuilt, PendingWork):
        return rebuilt
    masked, hidden_share = memory.without(hidden), float(hidden.mean())
    explained = [p.name for p in memory.store.manifest.parameters if p.kind != "rest"]
    swept = any(memory.store.is_preconditioned(name) for name in explained)  # a sweep visits all steps for any mask
    seconds = explorer.rebuild_seconds * (1.0 if swept else min(hidden_share, 1 - hidden_share))
    return queue.result(
        ("without", by, masks), f"the weights without {int(hidden.sum()):,} visits", seconds,
        lambda progress: masked.held_weights(progress=progress),
    )  # fmt: skip


def ledger_of(explorer: Explorer, by: str) -> Ledger | PendingWork:
    """The ledger of a column."""
    return explorer.work_queue.result(
        ("ledger", by), f"the ledger by {by}", explorer.ledger_seconds(len(explorer.counts(by))),
        lambda progress: explorer.memory.ledger(by, progress=progress),
    )  # fmt: skip


def ledger_of_time(explorer: Explorer) -> Ledger | PendingWork:
    """The ledger of the stretches of training: its groups are the numbers of the stretches, from 0."""
    memory = explorer.memory
    edges = stretch_edges(memory.step, STRETCHES)
    stretch = np.searchsorted(edges, memory.store.visits["step"].to_numpy(), side="left") - 1
    return explorer.work_queue.result(
        ("ledger", None), "the ledger by time", explorer.ledger_seconds(STRETCHES),
        lambda progress: memory.ledger(stretch.tolist(), progress=progress),
    )  # fmt: skip
