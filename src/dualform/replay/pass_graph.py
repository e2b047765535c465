"""One backward pass of a training loop that can be differentiated once more.

The gradient of a batch is held as a function of the weights and of each example's share in the loss. One backward pass
through it gives the curvature of the loss along an adjoint, and the influence of every example, at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing
from torch.utils.hooks import RemovableHandle

from dualform.errors import QueryError

from .rerun import PassTrace, Rerun
from .step_adjoint import pull_back

DIFFERENTIABLE = SDPBackend.MATH
"""Attention that can be differentiated twice: the fused kernels cannot."""


NO_SECOND_DERIVATIVE = ("is not implemented", "once_differentiable", "incompatible with .grad()")
"""What torch says where it cannot differentiate a backward pass."""

SECOND_DERIVATIVE = (
    "influence differentiates the backward pass of a batch once more, and this model has no second derivative"
)
WAY_OUT = "Replace that operation, or ask run.retrain(without=…)."

LARGEST_PART_MISSING = 1e-2
"""Of the gradient of a batch along an adjoint, what rounding may explain, also in bfloat16."""


class Statistic(NamedTuple):
    """What a batch puts into a running statistic of a normalisation, as a function of the weights."""

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
    """Parameters that take a gradient, and those that took one earlier."""
    share: Float[Tensor, " b"]
    gradient: Mapping[str, Tensor]
    read: Mapping[str, Tensor]
    """The running statistics that the pass is normalised by, if they changed earlier."""
    statistics: list[Statistic]
    buffers: Mapping[str, Tensor]
    """The model's buffers after the pass."""

    def pull(
        self, covectors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, queries: int, curved: bool
    ) -> Pulled:
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
        weights, read = (self.weights, self.read) if curved else ({}, {})
        try:
            influence, *found = pull_back(outputs, [self.share, *weights.values(), *read.values()], pulls)
        except RuntimeError as error:  # of torch, and by its words alone
            if not any(words in str(error) for words in NO_SECOND_DERIVATIVE):
                raise
            raise QueryError(f"{SECOND_DERIVATIVE} ({str(error).splitlines()[0]}). {WAY_OUT}") from error
        if influence is None:  # nothing that the target depends on has a gradient here
            influence = self.share.new_zeros(queries, len(self.share))
        self._require_all_shares(influence[0], covectors)
        curvature = {name: value for name, value in zip(weights, found, strict=False) if value is not None}
        for name, value in zip(read, found[len(weights) :], strict=True):
            if value is not None and name in before:
                before[name] = before[name] + value
        return Pulled(curvature, before, influence)

    def _require_all_shares(self, influence: Float[Tensor, " b"], covectors: Mapping[str, Tensor]) -> None:
        """Raise unless the shares of the examples make up the whole gradient along the first covector.

        The gradient is linear in them, so this holds whatever the model is; unless part of its backward pass is hidden.
        """
        products = [covectors[name][0] * value.detach() for name, value in self.gradient.items() if name in covectors]
        whole = sum(float(product.double().sum()) for product in products)
        size = sum(float(product.double().abs().sum()) for product in products) + float(influence.double().abs().sum())
        if abs(float(influence.double().sum()) - whole) > LARGEST_PART_MISSING * size:
            raise QueryError(
                f"{SECOND_DERIVATIVE} (the gradient of a batch is not the sum of what its examples add to it: an "
                f"operation with a backward pass of its own hides the rest). {WAY_OUT}"
            )


def build_graph(
    rerun: Rerun,
    one_pass: PassTrace,
    weights: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    settled: Iterable[str] = (),
) -> PassGraph:
    """Run one pass at the ``weights`` (leaves), which take the place of the model's own tensors meanwhile.

    Of the ``fixed`` parameters those that were trained earlier are leaves too. ``settled`` are modules that changed
    their running statistics earlier, and only read them now. The generator is left as it is after the forward pass.
    """
    statistics: list[Statistic] = []
    own = {name: buffer.clone() for name, buffer in buffers.items()}  # a forward pass changes them in place
    tensors = rerun.with_aliases({**weights, **fixed, **own})
    of_settled = {f"{module}.running_{which}" for module in settled for which in ("mean", "var")}
    read = {name: buffers[name].clone().requires_grad_() for name in statistics_of(rerun.model) if name in of_settled}
    batch = rerun.batch(one_pass)
    if one_pass.generator is not None:
        torch.set_rng_state(one_pass.generator)
    model = rerun.model
    with torch.enable_grad(), differentiable_twice(model), _by_frequency(model), _batch_statistics(model, statistics):
        # what torch.func.functional_call does around a forward pass, here around whatever the losses do with the model
        with _reparametrize_module(rerun.model, tensors), normalised_by(rerun.model, read):
            losses = rerun.losses(rerun.model, batch)
        share = torch.ones_like(losses, requires_grad=True, dtype=torch.promote_types(losses.dtype, torch.float32))
        gradient = torch.autograd.grad(
            (share * losses).sum(), list(weights.values()), create_graph=True, allow_unused=True
        )
    found = {name: value for name, value in zip(weights, gradient, strict=True) if value is not None}
    after = {name: tensors[name] for name in buffers}
    earlier = {name: tensor for name, tensor in fixed.items() if tensor.requires_grad}
    return PassGraph({**{name: weights[name] for name in found}, **earlier}, share, found, read, statistics, after)


class PlainWeightNorm(TorchFunctionMode):
    """Computes weight normalisation by its formula: the second derivative of torch's fused one is wrong."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "_weight_norm":
            return func(*args, **(kwargs or {}))
        v, g = args[:2]
        dim = args[2] if len(args) > 2 else 0
        return v * (g / torch.norm_except_dim(v, 2, dim))


@dataclass(frozen=True)
class SpecialLayers:
    """The layers of a model whose derivatives need care, looked up once: every pass asks for them."""

    norms: Mapping[str, _NormBase]
    """The normalisations (of batches, of instances) that keep running statistics."""
    divided: Sequence[nn.Embedding]
    """The embeddings that divide their gradients by how often a word is in the batch."""
    has_weight_norm: bool

    @classmethod
    def of(cls, model: nn.Module) -> "SpecialLayers":
        """Those of a model."""
        if (known := _SPECIAL_LAYERS.get(model)) is None:
            modules = dict(model.named_modules())
            hooks = [hook for module in modules.values() for hook in module._forward_pre_hooks.values()]
            kinds = {type(part).__name__ for part in (*modules.values(), *hooks)}
            norms = {
                name: module
                for name, module in modules.items()
                if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None
            }
            divided = [m for m in modules.values() if isinstance(m, nn.Embedding) and m.scale_grad_by_freq]
            known = _SPECIAL_LAYERS[model] = cls(norms, divided, bool(kinds & {"WeightNorm", "_WeightNorm"}))
        return known


_SPECIAL_LAYERS: WeakKeyDictionary[nn.Module, SpecialLayers] = WeakKeyDictionary()


@contextmanager
def differentiable_twice(model: nn.Module) -> Iterator[None]:
    """Attention that can be differentiated twice, and activations kept where the model would compute them again: the
    reentrant kind of checkpointing hides its second derivative, and the other one draws random numbers again.
    """
    function = checkpointing.CheckpointFunction
    own_hook = checkpointing._checkpoint_hook
    function.apply = staticmethod(lambda run, preserve_rng_state, *args: run(*args))
    checkpointing._checkpoint_hook = lambda frame: nullcontext()
    try:
        with (
            sdpa_kernel(DIFFERENTIABLE),
            PlainWeightNorm() if SpecialLayers.of(model).has_weight_norm else nullcontext(),
        ):
            yield
    finally:
        checkpointing._checkpoint_hook = own_hook
        del function.apply


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
    """Collects what normalisations put into their running statistics, as functions of the weights."""

    def collect(name: str, module: _NormBase, args: tuple) -> None:
        if not module.training:
            return
        x = _batched(module, args[0])
        assert module.num_batches_tracked is not None
        if isinstance(module, _BatchNorm):
            mean, variance = of_batch(x)
            momentum = 1.0 / (int(module.num_batches_tracked) + 1) if module.momentum is None else module.momentum
        else:
            mean, variance = of_instances(x)
            momentum = module.momentum or 0.0
        statistics.append(Statistic(f"{name}.running_mean", mean, momentum))
        statistics.append(Statistic(f"{name}.running_var", variance, momentum))

    def of_batch(x: Tensor) -> tuple[Tensor, Tensor]:
        axes = [axis for axis in range(x.ndim) if axis != 1]
        count = x.numel() // x.shape[1]
        return x.mean(axes), x.var(axes, unbiased=False) * (count / max(count - 1, 1))

    def of_instances(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(2)
        count = x.shape[2]
        return x.mean((0, 2)), x.var(2, unbiased=False).mean(0) * (count / max(count - 1, 1))

    norms = SpecialLayers.of(model).norms
    return _removed(module.register_forward_pre_hook(partial(collect, name)) for name, module in norms.items())


def normalised_by(model: nn.Module, statistics: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Normalisation in evaluation mode, by those of its statistics that autograd is to see."""

    def normalise(name: str, module: _NormBase, args: tuple, output: Tensor) -> Tensor:
        x = _batched(module, args[0])
        shape = [1, -1] + [1] * (x.ndim - 2)
        mean, variance = (statistics[f"{name}.running_{which}"].reshape(shape) for which in ("mean", "var"))
        out = (x - mean) / (variance + module.eps).sqrt()
        out = out if module.weight is None else out * module.weight.reshape(shape)
        out = out if module.bias is None else out + module.bias.reshape(shape)
        return out.reshape(output.shape).to(output.dtype)

    norms = SpecialLayers.of(model).norms.items()
    hooked = [(name, module) for name, module in norms if f"{name}.running_mean" in statistics]
    return _removed(module.register_forward_hook(partial(normalise, name)) for name, module in hooked)


@contextmanager
def _by_frequency(model: nn.Module) -> Iterator[None]:
    """Embeddings whose gradients are divided by how often a word is in the batch: torch leaves that out of its second
    derivative. Here the division is an operation of the first backward pass, and gone before the second one.
    """
    with ExitStack() as hooks:

        def embed(module: nn.Embedding, args: tuple, output: Tensor) -> Tensor:
            if not output.requires_grad:
                return output
            (x,) = args
            frequency = x.flatten().bincount()[x].unsqueeze(-1)
            out = F.embedding(x, module.weight, module.padding_idx)
            hooks.callback(out.register_hook(lambda error: error / frequency).remove)
            return out

        for module in SpecialLayers.of(model).divided:
            hooks.callback(module.register_forward_hook(embed).remove)
        yield


@contextmanager
def undivided(model: nn.Module) -> Iterator[None]:
    """Embeddings whose gradients are plain derivatives."""
    layers = SpecialLayers.of(model).divided
    for module in layers:
        module.scale_grad_by_freq = False
    try:
        yield
    finally:
        for module in layers:
            module.scale_grad_by_freq = True


def _batched(module: _NormBase, x: Tensor) -> Tensor:
    """The input of a normalisation with an axis of examples: that of instances also takes a single one."""
    return x[None] if isinstance(module, _InstanceNorm) and x.ndim == module._get_no_batch_dim() else x


@contextmanager
def _removed(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that stay until the block ends."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Their running statistics, by the names of the buffers."""
    return {
        f"{name}.running_{which}": getattr(module, f"running_{which}")
        for name, module in SpecialLayers.of(model).norms.items()
        for which in ("mean", "var")
    }
