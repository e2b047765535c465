"""A second tree of modules over a model's weights, so that a question never touches the user's model.

Every module is copied shallowly, without its ``__init__``: same class, own attributes, own tables of parameters,
buffers, children and hooks. What is shared stays shared (modules, tied parameters), and whatever refers to a module of
the model refers to the copy of it (:mod:`.object_references`). Parameters are leaves of their own on the memory of the
model's, or hold other weights; buffers and other tensors are copies, since forward passes write into them.
All modules are in evaluation mode, by their flag alone: ``train()`` may be overridden and merge weights, as in loralib.

Each question makes a shadow of its own, so that several threads can ask one model, also while it is trained. The shadow
in which the recorder tries out a model is a cheaper and stricter one: ``dualform.record.hooks.probe_shadow`` lists the
differences.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QueryError
from dualform.record.hooks import is_own_hook

from .object_references import References

READS_ONLY = frozenset(("torch", "transformers", "timm", "peft", "dualform"))
"""Packages whose layers do not write into their parameters in evaluation mode, so that these need not be copied."""


def shadow_of(
    model: nn.Module, weights: Mapping[str, Tensor] | None = None, *, differentiable: bool = False
) -> nn.Module:
    """A copy of a model in evaluation mode, with the model's own weights or with ``weights``.

    If it is ``differentiable``, gradients reach all its parameters, frozen or not.
    """
    weights = weights or {}
    merged = bool(weights) and any(_may_be_merged(module) for module in model.modules())
    builder = _ShadowBuilder(model, {} if merged else weights, differentiable=differentiable, copies=merged)
    shadow = builder.module(model)
    if merged:
        with torch.no_grad():
            shadow.train()
    if weights:
        _require_unmerged(shadow)
    if merged or any(isinstance(module, torch.jit.ScriptModule) for module in shadow.modules()):
        _replace_weights(shadow, weights)
    for module in shadow.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            vars(module)["training"] = False
    return shadow


def _require_unmerged(shadow: nn.Module) -> None:
    """Raise if an adapter is merged into its layer: the merged part would keep the model's weights."""
    for name, module in shadow.named_modules():
        if getattr(module, "merged", False) is True:
            raise QueryError(
                f"the adapter of '{name}' is merged into its layer, so the memory's weights cannot take the place of "
                "the model's. Take it apart (peft: model.unmerge_adapter()), or pass a model that is not merged."
            )


def _replace_weights(shadow: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the weights of a finished shadow."""
    for name, tensor in _named_tensors(shadow).items():
        if name in weights:
            weight = weights[name].to(tensor.device)
            tensor.data = weight if isinstance(tensor, nn.Parameter) else weight.clone()


def _may_be_merged(module: nn.Module) -> bool:
    """Whether a module is in evaluation mode and overrides ``train()``.

    Its weights may then be merged (loralib) while the memory's are not; training mode takes them apart again.
    """
    return not module.training and type(module).train is not nn.Module.train


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class _ShadowBuilder(References):
    """Copies the modules and tensors of a model for one shadow."""

    def __init__(
        self, model: nn.Module, weights: Mapping[str, Tensor], *, differentiable: bool, copies: bool
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.differentiable = model, differentiable
        tensors = _named_tensors(model) if weights else {}
        self._weights = {id(tensors[name]): weight for name, weight in weights.items() if name in tensors}
        self._written = {
            id(p)
            for module in model.modules()
            if copies or _may_write(module)
            for p in module.parameters(recurse=False)
        }

    def module(self, module: nn.Module) -> nn.Module:
        """The copy of a module."""
        if id(module) in self.memo:
            return self.memo[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return self.remember(module, copy.deepcopy(module).eval().requires_grad_(self.differentiable))
        inner = _wrapped(module)
        twin = self.remember(module, object.__new__(type(module) if inner is None else PassThrough))
        attributes = vars(module)
        if inner is not None:
            attributes = {name: attributes[name] for name in vars(nn.Module()) if name in attributes}
        for name, value in list(attributes.items()):
            vars(twin)[name] = self._attribute(name, value)
        return twin

    def _attribute(self, name: str, value: Any) -> Any:
        if name == "_compiled_call_impl":  # nn.Module.compile: it would call the user's module
            return None
        if name in ("_parameters", "_buffers", "_modules"):
            table = self.remember(value, copy.copy(value))
            for key, part in list(value.items()):
                table[key] = None if part is None else self.own(part)
            return table
        if name.endswith("_hooks") and isinstance(value, dict):
            table = self.remember(value, copy.copy(value))
            table.clear()
            table.update({key: self.own(hook) for key, hook in list(value.items()) if not is_own_hook(hook)})
            return table
        return self.own(value)

    def tensor(self, tensor: Tensor) -> Tensor:
        """A parameter as a leaf of its own, any other tensor as a copy."""
        if nn.parameter.is_lazy(tensor):
            raise QueryError(
                f"this {type(self.model).__name__} has a lazy layer without weights yet. Run one batch through the "
                "model before asking it."
            )
        weight = self._weights.get(id(tensor))
        data = tensor.detach() if weight is None else weight.detach().to(tensor.device)
        if not isinstance(tensor, nn.Parameter):
            return data.clone()
        if data.is_inference() or id(tensor) in self._written:
            data = data.clone()
        flag = tensor.requires_grad or (self.differentiable and data.is_floating_point())
        if issubclass(type(tensor), nn.Parameter):
            twin = torch.Tensor._make_subclass(type(tensor), data, flag)
        else:  # a tensor of another class, as quantised or sharded ones are
            twin = nn.Parameter(data, requires_grad=flag)
        vars(twin).update(vars(tensor))
        return twin


def _may_write(module: nn.Module) -> bool:
    """Whether the forward pass of a module may write into its own parameters."""
    limited = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    return limited or type(module).__module__.partition(".")[0] not in READS_ONLY


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper of ``torch.compile`` or of several processes or devices; None for other modules."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return module.module
    return module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


class PassThrough(nn.Module):
    """Stands for a wrapper of a network in a shadow; it only passes its inputs on."""

    @property
    def inner(self) -> nn.Module:
        """What is wrapped."""
        return next(self.children())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped network says."""
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)
