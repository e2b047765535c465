"""The optimiser inside a trainer's wrapper: hooks on it see the steps that are really taken."""

from collections.abc import Sequence

from torch import optim

WRAPPERS = frozenset(
    (
        "accelerate.optimizer.AcceleratedOptimizer",
        "lightning.pytorch.core.optimizer.LightningOptimizer",
        "pytorch_lightning.core.optimizer.LightningOptimizer",
        "lightning.fabric.wrappers._FabricOptimizer",
        "lightning_fabric.wrappers._FabricOptimizer",
    )
)
"""Wrappers each of whose steps is one step of the optimiser inside, or none at all. Others (Lookahead) step
differently."""


def unwrapped(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimiser inside the wrappers that trainers put around one."""
    while any(f"{kind.__module__}.{kind.__qualname__}" in WRAPPERS for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def plain_optimizers(given: optim.Optimizer | Sequence[optim.Optimizer]) -> list[optim.Optimizer]:
    """All given optimisers, without their wrappers."""
    several = [given] if isinstance(given, optim.Optimizer) else list(given)
    return [unwrapped(optimizer) for optimizer in several]
