"""A second tree of modules over a model's weights, in which the recorder tries out how the rows of a call lie.

Every module is copied shallowly, with tables of its own. Parameters are other leaves over the same storage, buffers are
copies, plain containers are copied. A model that needs more than that (its ``forward`` closes over a module) is
rejected with :class:`NoShadow`; the recorder then assumes the usual arrangement of its rows.

The shadow that answers questions (``dualform.explain.query.model_shadow``) is another one, for these reasons:

- The probe makes several shadows of each new arrangement of rows in the middle of training, so it follows references
  through plain containers only. A question is asked once, so its shadow follows functions, weak references and objects.
- The probe keeps the model's mode and runs the forward pass as training does; only batch normalisation evaluates. A
  question is always asked in evaluation mode.
- The probe drops the user's hooks behind the forward pass, which may log or count. A question keeps them, as they may
  change what the model says.
- The probe looks at errors alone: its parameters forget their gradients, and frozen ones need no leaf. A question may
  be asked with other weights, and about frozen layers.

Both leave out dualform's own hooks (:func:`is_own_hook`).
"""

from collections import OrderedDict
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .own_hooks import is_own_hook

HOOKS = (
    "_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
"""Tables that are empty in a shadow. Hooks before the forward pass stay: weight norm and pruning compute there."""


class NoShadow(Exception):
    """The model refers to its modules in a way that a shadow cannot follow."""


def probe_shadow(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """A shadow of each module of a model, that of the model itself first. Tied weights stay tied."""
    originals = list(model.modules())
    for module in originals:
        if is_opaque(module):
            raise NoShadow(f"{type(module).__name__}.forward was replaced by a function of its own")
    replaced: dict[int, Any] = {}
    for tensor in model.parameters():
        replaced[id(tensor)] = _leaf(tensor)
    for tensor in model.buffers():
        replaced[id(tensor)] = tensor.detach().clone()
    for module in originals:
        replaced[id(module)] = type(module).__new__(type(module))
    for module in originals:
        replaced[id(module)].__dict__.update({
            name: OrderedDict() if name in HOOKS else _follow(value, replaced)
            for name, value in module.__dict__.items()
        })  # fmt: skip
        _drop_own_hooks(replaced[id(module)])
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            replaced[id(module)].training = False  # batch statistics would mix the examples
    return {module: replaced[id(module)] for module in originals}


def is_opaque(module: nn.Module) -> bool:
    """Whether the module runs code that leads back to the model itself, not to its shadow."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, MethodType | partial):
        forward = forward.__func__ if isinstance(forward, MethodType) else forward.func
    if isinstance(module, torch.jit.ScriptModule):
        return True
    cells = (forward.__closure__ or ()) if isinstance(forward, FunctionType) else ()
    return any(isinstance(getattr(cell.cell_contents, "__self__", cell.cell_contents), nn.Module) for cell in cells)


def _leaf(parameter: nn.Parameter) -> Tensor:
    if type(parameter) is not nn.Parameter or not parameter.requires_grad:
        return parameter
    leaf = nn.Parameter(parameter.detach())
    leaf.register_post_accumulate_grad_hook(_forget_gradient)  # only errors are read
    return leaf


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _follow(value: Any, replaced: dict[int, Any]) -> Any:
    """Replace the model's modules and tensors in a value by those of the shadow."""
    if id(value) in replaced:
        return replaced[id(value)]
    if type(value) in (list, tuple, set):
        return type(value)(_follow(element, replaced) for element in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _follow(element, replaced)) for key, element in value.items())
    if isinstance(value, MethodType) and id(value.__self__) in replaced:
        return MethodType(value.__func__, replaced[id(value.__self__)])
    if type(value) is partial:
        return partial(_follow(value.func, replaced), *_follow(value.args, replaced), **value.keywords)
    return value


def _drop_own_hooks(module: nn.Module) -> None:
    """Remove the recorder's own hooks before the forward pass."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if is_own_hook(hook):
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
