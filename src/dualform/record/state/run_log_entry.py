"""What the manifest says, from the beginning, of a run that can be run again."""

from collections.abc import Sequence

import torch
from torch import optim

from dualform.rules import path_of
from dualform.store import OptimizerInfo, RunLog

from ..plan import RecordingPlan, RecordOptions


def run_log_of(
    plan: RecordingPlan, optimizers: Sequence[optim.Optimizer], options: RecordOptions
) -> RunLog | None:  # fmt: skip
    """The entry of the manifest; None if the run is not recorded to be run again."""
    if options.replay is None:
        return None
    names = {id(tensor): name for name, tensor in plan.tensors.items()}
    infos = tuple(
        OptimizerInfo(
            path_of(type(optimizer)),
            tuple(tuple(names.get(id(p), "") for p in group["params"]) for group in optimizer.param_groups),
        )
        for optimizer in optimizers
    )
    return RunLog(options.replay.only, torch.get_num_threads(), infos)
