"""Hooks on the optimisers: they notice when a step begins and when it is complete.

Optimisers that step one after the other, without a backward pass in between, take one step of the memory together (Muon
for the matrices, AdamW for all other parameters).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import optim

from dualform.rules import Rule

from .hooks import Interrupts, uncompiled
from .plan import RecordingPlan
from .shards import ShardBuilder
from .training import Clock


class OptimizerHooks(ABC):
    """Watches the optimisers. A step counts when it is complete."""

    def __init__(
        self, plan: RecordingPlan, clock: Clock, interrupts: Interrupts, shard_builder: ShardBuilder
    ) -> None:  # fmt: skip
        self.plan, self.clock, self.interrupts, self.shard_builder = plan, clock, interrupts, shard_builder

    def hook(self, optimizers: Sequence[optim.Optimizer]) -> list[Any]:
        """Put the hooks in place; returns their handles. A copy or a pickle of an optimiser has no hooks."""
        handles = []
        for optimizer, rule in zip(optimizers, self.plan.rules, strict=True):
            before = uncompiled(self.interrupts.around(partial(self._before, rule)))
            after = uncompiled(self.interrupts.around(partial(self._after, rule)))
            handles.append(optimizer.register_step_pre_hook(partial(self._begin, before)))
            handles.append(optimizer.register_step_post_hook(after))
        return handles

    @staticmethod
    def _begin(
        before: Callable[..., tuple[tuple, dict] | None], optimizer: optim.Optimizer, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A step begins. Only here, before a compiled graph breaks, it is seen whether there is one."""
        return before(torch.compiler.is_compiling(), optimizer, args, kwargs)

    def _before(
        self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:  # fmt: skip
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimiser
        if closure is None:
            self._stage(rule, compiled, optimizer)
            return None

        def closed() -> Any:  # the gradients of this step come with the closure
            loss = closure()
            self.interrupts.around(self._stage)(rule, compiled, optimizer)
            return loss

        return (optimizer, closed), {key: value for key, value in kwargs.items() if key != "closure"}

    @abstractmethod
    def _stage(self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer) -> None:
        """The gradients are final, and the optimiser is about to change the weights."""

    @abstractmethod
    def _after(self, rule: Rule | None, optimizer: optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """The optimiser has taken its step."""

    @property
    def _all_stepped(self) -> bool:
        """Whether every optimiser has taken its part of the last step."""
        return self.clock.joined == len(self.plan.rules)
