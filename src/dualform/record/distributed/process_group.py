"""The processes that train one model together (``torchrun``): each records its own part, and they exchange messages.

Processes that name the same path record one memory; processes that each name another path record alone.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from dualform.errors import RecordError, UserLine, warn

PATIENCE, SHORT = 60.0, 10.0
"""Seconds after which a waiting process warns; and seconds that a process waits for the others after an error."""

TOGETHER = (
    "All processes must take the same steps, call tape.flush() and leave the with-block: none of this belongs under "
    "`if rank == 0`."
)


class Ranks:
    """This process among those that record one memory. A single process is rank 0 of 1 and exchanges nothing."""

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None) -> None:
        self.rank, self.world, self._group = rank, world, group

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.world == 1

    @property
    def first(self) -> bool:
        """Whether this process writes the files that belong to all."""
        return self.rank == 0

    def gather(self, message: Any) -> list[Any]:
        """Send a message to all processes; returns the messages of all, in the order of their ranks."""
        if self.alone:
            return [message]
        messages: list[Any] = [None] * self.world
        with self._waiting():
            dist.all_gather_object(messages, message, group=self._group)
        return messages

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor with its sum over all processes, in place."""
        if self.alone or not tensors:
            return
        flat = torch.cat([tensor.double().flatten() for tensor in tensors])
        with self._waiting():
            dist.all_reduce(flat, group=self._group)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes run the block. If it fails in one of them, an error is raised in all."""
        error = None
        try:
            yield
        except Exception as failure:
            error = failure
        self._agree(error)

    @contextmanager
    def others_first(self) -> Iterator[None]:
        """The first process runs the block when all others have finished it; all wait for that. If it fails in one of
        them, an error is raised in all.
        """
        error = None
        if self.first:
            self._agree(None)
        try:
            yield
        except Exception as failure:
            error = failure
        if not self.first:
            self._agree(error)
        self._agree(error if self.first else None)

    def _agree(self, error: Exception | None) -> None:
        messages = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RecordError(f"process {rank} cannot go on. {message}")

    def all_here(self) -> bool:
        """Whether all processes reach this call within a few seconds: after an error some may not."""
        if self.alone:
            return True
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=SHORT))
        except RuntimeError:
            return False
        return True

    def leave(self) -> None:
        """Leave the process group; nothing can be exchanged afterwards."""
        if not self.alone and dist.is_initialized():
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self._group)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        message = f"process {self.rank} has been waiting for the others for {PATIENCE:.0f} s. {TOGETHER}"
        timer = threading.Timer(PATIENCE, warn, (message, UserLine.calling()))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            raise RecordError(f"process {self.rank} waited in vain for the others ({error}). {TOGETHER}") from error
        finally:
            timer.cancel()


def find_ranks(path: Path, *, averaged: bool) -> Ranks:
    """Find the processes that record to this path. ``averaged``: the gradients are averages over several processes."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    paths = ranks.gather(os.path.abspath(path))
    if len(set(paths)) == 1:
        return ranks
    ranks.leave()
    if averaged or len(set(paths)) < len(paths):
        raise RecordError(
            f"the processes record to different paths ({sorted(set(paths))}), but they train one model. Give all of "
            "them the same path; each writes its own part of the memory there."
        )
    return Ranks()
