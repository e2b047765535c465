"""Finds the optimiser inside a trainer's wrapper: hooks on it run exactly when a step is taken."""

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
"""Wrappers each of whose steps is at most one step of the optimiser inside. Others (Lookahead) change the step."""


def unwrapped(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimiser inside the wrappers that trainers put around one."""
    while any(f"{kind.__module__}.{kind.__qualname__}" in WRAPPERS for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def plain_optimizers(optimizers: optim.Optimizer | Sequence[optim.Optimizer]) -> list[optim.Optimizer]:
    """One optimiser or several, as a list without their wrappers."""
    optimizers = [optimizers] if isinstance(optimizers, optim.Optimizer) else list(optimizers)
    return [unwrapped(optimizer) for optimizer in optimizers]
