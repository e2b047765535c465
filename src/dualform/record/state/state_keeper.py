"""What a memory keeps beside slots: the rest, now and then the optimiser's state, frozen weights once they change."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, optim

from dualform.store import Store

from ..plan import RecordingPlan, RecordOptions
from ..verify import Marks
from .create import states_of
from .frozen_weights import FrozenWeightTracker
from .rest_snapshots import RestSnapshots, auto_interval
from .state_checkpoints import StateCheckpoints


class StateKeeper:
    """Decides which tensors go whole into a shard. Where several processes train, only the ``first`` keeps them."""

    def __init__(
        self,
        plan: RecordingPlan,
        optimizers: Sequence[optim.Optimizer],
        options: RecordOptions,
        store: Store,
        marks: Marks,
        *,
        every: int,
        first: bool,
    ) -> None:
        self.rest = RestSnapshots(plan.snapshotted if first else {}, every, options.snapshot_every is None)
        self.checkpoints = StateCheckpoints(plan, partial(states_of, plan, optimizers) if first else None)
        self.frozen = FrozenWeightTracker(plan, store, options.resume or 0, marks)

    def changed(self, step: int, live: bool = True) -> Mapping[str, Tensor]:
        """Copies of what changed in the rest; frozen weights among it are marked."""
        return self.frozen.see_changed(self.rest.changed(step, live), step)

    def move_to_rest(self, plan: RecordingPlan, names: Sequence[str]) -> int:
        """Keep some parameters as snapshots from now on; returns the interval of snapshots."""
        every = self.rest.every
        if self.rest.automatic:  # a multiple, so that a look that is due by the new interval was due by the old one
            every *= math.ceil(auto_interval(plan.snapshotted) / every)
        self.rest.add({name: plan.tensors[name] for name in names}, every)
        self.checkpoints.names = [name for name in self.checkpoints.names if name not in names]
        return every
