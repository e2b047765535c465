"""One backward pass of a training loop that can be differentiated once more.

The gradient of a batch is held as a function of the weights and of each example's share in the loss. One backward pass
through it gives the curvature of the loss along an adjoint, and the influence of every example, at once.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.hooks import RemovableHandle

from .rerun import PassTrace, Rerun
from .step_adjoint import pull_back

DIFFERENTIABLE = SDPBackend.MATH
"""Attention that can be differentiated twice: the fused kernels cannot."""


class Statistic(NamedTuple):
    """What a batch puts into a running statistic of batch normalisation, as a function of the weights."""

    buffer: str
    value: Tensor
    momentum: float


class Pulled(NamedTuple):
    """What a pass contributes to an adjoint."""

    weights: dict[str, Tensor]
    """The curvature of the loss along the adjoint of its gradient."""
    buffers: dict[str, Tensor]
    """The adjoint of the buffers before the pass."""
    influence: Float[Tensor, "queries b"]


@dataclass(frozen=True)
class PassGraph:
    """The gradient of one batch, by parameter, as a function of the ``weights`` and of the examples' ``share``."""

    weights: Mapping[str, Tensor]
    share: Float[Tensor, " b"]
    gradient: Mapping[str, Tensor]
    statistics: list[Statistic]
    buffers: Mapping[str, Tensor]
    """The model's buffers after the pass."""

    def pull(self, covectors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, curved: bool) -> Pulled:
        """Carry the adjoint of the gradient (and of the buffers after the pass) back to before the pass."""
        outputs = [value for name, value in self.gradient.items() if value.requires_grad and name in covectors]
        pulls = [covectors[name] for name, value in self.gradient.items() if value.requires_grad and name in covectors]
        before = dict(buffers)
        for buffer, value, momentum in reversed(self.statistics):  # a layer may be called several times
            if buffer not in before:
                continue
            if value.requires_grad:  # statistics of the inputs themselves do not depend on the weights
                outputs.append(momentum * value)
                pulls.append(before[buffer])
            before[buffer] = (1 - momentum) * before[buffer]
        names = [name for name in self.weights if curved]
        influence, *found = pull_back(outputs, [self.share, *(self.weights[name] for name in names)], pulls)
        assert influence is not None  # every example has a share of some gradient
        curvature = {name: value for name, value in zip(names, found, strict=True) if value is not None}
        return Pulled(curvature, before, influence)


def build_graph(
    rerun: Rerun,
    one_pass: PassTrace,
    weights: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> PassGraph:
    """Run one pass at the ``weights`` (leaves), which take the place of the model's own tensors meanwhile.

    The generator is left as it is after the forward pass.
    """
    statistics: list[Statistic] = []
    own = {name: buffer.clone() for name, buffer in buffers.items()}  # a forward pass changes them in place
    tensors = rerun.with_aliases({**weights, **fixed, **own})
    if one_pass.generator is not None:
        torch.set_rng_state(one_pass.generator)
    with torch.enable_grad(), sdpa_kernel(DIFFERENTIABLE), _batch_statistics(rerun.model, statistics):
        # what torch.func.functional_call does around a forward pass, here around whatever the losses do with the model
        with _reparametrize_module(rerun.model, tensors):
            losses = rerun.losses(rerun.model, rerun.batch(one_pass))
        share = torch.ones_like(losses, requires_grad=True)
        gradient = torch.autograd.grad(
            (share * losses).sum(), list(weights.values()), create_graph=True, allow_unused=True
        )
    found = {name: value for name, value in zip(weights, gradient, strict=True) if value is not None}
    after = {name: tensors[name] for name in buffers}
    return PassGraph({name: weights[name] for name in found}, share, found, statistics, after)


class SavedBytes(saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward passes, each piece of memory once."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        super().__init__(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    @property
    def total(self) -> int:
        return sum(self._sizes.values())


# ---------------------------------------------------------------------------------------------------- batch norm


def _batch_statistics(model: nn.Module, statistics: list[Statistic]) -> AbstractContextManager[None]:
    """Collects what batch normalisation puts into its running statistics, as functions of the weights."""

    def collect(name: str, module: _BatchNorm, args: tuple) -> None:
        if not module.training:
            return
        (x,) = args
        axes = [axis for axis in range(x.ndim) if axis != 1]
        count = x.numel() // x.shape[1]
        assert module.num_batches_tracked is not None
        momentum = 1.0 / (int(module.num_batches_tracked) + 1) if module.momentum is None else module.momentum
        variance = x.var(axes, unbiased=False) * (count / max(count - 1, 1))
        statistics.append(Statistic(f"{name}.running_mean", x.mean(axes), momentum))
        statistics.append(Statistic(f"{name}.running_var", variance, momentum))

    return _removed(
        module.register_forward_pre_hook(partial(collect, name)) for name, module in _batch_norms(model).items()
    )


def normalised_by(model: nn.Module, statistics: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Batch normalisation in evaluation mode, by statistics that autograd sees."""

    def normalise(name: str, module: _BatchNorm, args: tuple, output: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (args[0].ndim - 2)
        mean, variance = (statistics[f"{name}.running_{which}"].reshape(shape) for which in ("mean", "var"))
        out = (args[0] - mean) / (variance + module.eps).sqrt()
        return out if module.weight is None else out * module.weight.reshape(shape) + module.bias.reshape(shape)

    layers = _batch_norms(model) if statistics else {}
    return _removed(module.register_forward_hook(partial(normalise, name)) for name, module in layers.items())


@contextmanager
def _removed(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that stay until the block ends."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def _batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch normalisation layers that keep running statistics."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Their running statistics, by the names of the buffers."""
    return {
        f"{name}.running_{which}": getattr(module, f"running_{which}")
        for name, module in _batch_norms(model).items()
        for which in ("mean", "var")
    }
