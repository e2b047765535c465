"""The rest: parameters and buffers that no rule explains, kept as snapshots so that every step stays a whole model."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

SMALL = 1 << 20
"""The rest may take about this many bytes a step; a larger one is compared less often."""


def auto_interval(rest: Mapping[str, Tensor]) -> int:
    """The number of steps between two snapshots of the rest, without frozen parameters: these are kept once."""
    return _steps_for(t for t in rest.values() if not _frozen(t))


class RestSnapshots:
    """Finds the tensors of the rest that changed since their last snapshot. The interval is ``automatic`` unless the
    user gave it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], every: int, automatic: bool = True) -> None:
        self.tensors, self.every, self.automatic = dict(tensors), every, automatic
        self._rarely = every * _steps_for(t for t in self.tensors.values() if _frozen(t))
        self._kept = {name: _state(tensor, None) for name, tensor in self.tensors.items()}
        self._after_step = {name: t.detach().clone() for name, t in self.tensors.items() if _moves_between_steps(t)}

    def stand(self) -> None:
        """A step is complete: copy the tensors that the next forward pass may change."""
        for name, copy in self._after_step.items():
            tensor = self.tensors[name]
            if copy.shape == tensor.shape:
                copy.copy_(tensor)
            else:  # observers of quantisation resize their buffers
                self._after_step[name] = tensor.detach().clone()

    def changed(self, step: int, live: bool = True) -> dict[str, Tensor]:
        """Copies of the tensors that changed, under their names in the memory. Frozen ones are compared now and then.

        Buffers are read as they are now (``live``), or as they were when the last step was complete.
        """
        copies, states, compare_frozen = {}, {}, step % self._rarely == 0
        for name, tensor in self._tensors(live).items():
            before = self._kept[name]
            if _frozen(tensor) and not compare_frozen and _written_alike(tensor, before):
                continue
            if _same(tensor, before):
                continue
            copy = tensor.detach().to("cpu", copy=True)
            states[name] = _state(tensor, copy)
            copies[f"{name}@{step}"] = copy
        self._kept |= states
        return copies

    def add(self, tensors: Mapping[str, Tensor], every: int) -> None:
        """Keep further tensors from now on, which are unchanged since recording began."""
        self.tensors |= tensors
        self._kept |= {name: _state(tensor, None) for name, tensor in tensors.items()}
        self.every = every
        self._rarely = every * _steps_for(t for t in self.tensors.values() if _frozen(t))

    def all(self, step: int, live: bool = True) -> dict[str, Tensor]:
        """Copies of everything, changed or not."""
        return {f"{name}@{step}": t.detach().to("cpu", copy=True) for name, t in self._tensors(live).items()}

    def _tensors(self, live: bool) -> Mapping[str, Tensor]:
        return self.tensors if live else {**self.tensors, **self._after_step}

    def due(self, step: int) -> bool:
        """Whether the rest is compared after this step."""
        return step % self.every == 0


def _moves_between_steps(tensor: Tensor) -> bool:
    """Whether forward passes may change it, as running statistics are; it has to be small to be copied so often."""
    return not isinstance(tensor, nn.Parameter) and _small(tensor)


def same_bits(tensor: Tensor, kept: Tensor) -> bool:
    """Whether a tensor equals its snapshot in every bit, also where it is NaN."""
    return torch.equal(tensor.detach().cpu().reshape(-1).view(torch.uint8), kept.reshape(-1).view(torch.uint8))


def _frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _steps_for(tensors: Iterable[Tensor]) -> int:
    return max(1, math.ceil(sum(t.numel() * t.element_size() for t in tensors) / SMALL))


def _small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= SMALL


def _state(tensor: Tensor, copy: Tensor | None) -> tuple[Tensor | None, int, int]:
    # kernels that update running statistics do not count versions, so small tensors are compared by value
    kept = (tensor.detach().to("cpu", copy=True) if copy is None else copy) if _small(tensor) else None
    return kept, tensor._version, tensor.data_ptr()


def _same(tensor: Tensor, before: tuple[Tensor | None, int, int]) -> bool:
    return _written_alike(tensor, before) if before[0] is None else same_bits(tensor, before[0])


def _written_alike(tensor: Tensor, before: tuple[Tensor | None, int, int]) -> bool:
    """Whether it was not written to since, by torch's count of writes."""
    return (tensor._version, tensor.data_ptr()) == before[1:]
