"""Values that refer to a model's modules and tensors, made to refer to the copies of these.

A model's attributes hold more than its tables: modules in lists, a ``forward`` that was patched onto an instance, hooks
that are methods of another module, weak references to parameters. Each is rebuilt where it leads to the model. Plain
objects are looked into too, a few deep.
"""

import copy
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Copied = TypeVar("Copied")

ATOMS = (
    str, int, float, bool, complex, bytes, type(None), type, torch.dtype, torch.device, ModuleType, BuiltinFunctionType,
)  # fmt: skip
"""What refers to nothing."""

OPAQUE = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "pyarrow", "pandas", "transformers", "tokenizers", "datasets", "lightning", "pytorch_lightning",
}  # fmt: skip
"""Packages whose plain objects (trainers, configurations, optimisers, arrays) are shared as they are."""

DEPTH, LARGE = 3, 1000
"""How deep plain objects are looked into, and how many entries of a container inside one."""


class References:
    """Copies of values by the identity of what they are copies of. ``module`` and ``tensor`` make those of a model."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self._originals: list[Any] = []
        """What the memo knows by its identity, which another object must not get."""

    def module(self, module: nn.Module) -> nn.Module:
        """The copy of a module."""
        raise NotImplementedError

    def tensor(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor."""
        raise NotImplementedError

    def remember(self, value: Any, twin: Copied) -> Copied:
        """From now on a value has this copy."""
        self._originals.append(value)
        self.memo[id(value)] = twin
        return twin

    def own(self, value: Any) -> Any:
        """An attribute of a module. Containers and tensors are copied, as a forward pass may change them in place."""
        if type(value) in weakref.ProxyTypes:
            return self._proxy(value)
        if isinstance(value, Tensor):
            return self.memo[id(value)] if id(value) in self.memo else self.remember(value, self.tensor(value))
        if isinstance(value, list | dict | set | deque):
            return self._container(value, self.own, always=True)
        return self._leading(value, DEPTH)

    def _leading(self, value: Any, depth: int) -> Any:
        """The value itself, unless it leads to the model: then the same value leading to the copies."""
        if type(value) in weakref.ProxyTypes:
            return self._proxy(value)
        if isinstance(value, ATOMS):
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Tensor):
            return self.own(value) if isinstance(value, nn.Parameter) else value
        further = partial(self._leading, depth=depth)
        if isinstance(value, tuple | frozenset):
            return self._frozen(value, self.own if depth == DEPTH else further)
        if isinstance(value, list | dict | set | deque):
            return value if len(value) > LARGE else self._container(value, further)
        for kind, rebuilt in self._callables.items():
            if isinstance(value, kind):
                return rebuilt(value, further)
        return self._object(value, depth)

    @property
    def _callables(self) -> dict[type, Callable[[Any, Callable[[Any], Any]], Any]]:
        return {MethodType: _method, partial: _partial, FunctionType: self._function, weakref.ref: _reference}

    def _proxy(self, value: Any) -> Any:
        try:
            target = value.__repr__.__self__
        except ReferenceError:  # of something that is gone
            return value
        twin = self._leading(target, DEPTH)
        return value if twin is target else weakref.proxy(twin)

    def _container(self, value: Any, of: Callable[[Any], Any], always: bool = False) -> Any:
        """A container of copies; the same one where nothing in it leads to the model, unless copied ``always``."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        twin = self.remember(value, copy.copy(value))
        if isinstance(value, dict):
            pairs = [(key, of(key), item, of(item)) for key, item in list(value.items())]
            same = all(key is new_key and item is new_item for key, new_key, item, new_item in pairs)
            if not same:
                twin.clear()
                for _, key, _, item in pairs:
                    twin[key] = item
        else:
            items = list(value)
            copies = [of(item) for item in items]
            same = _all_same(items, copies)
            if not same:
                twin.clear()
                twin.update(copies) if isinstance(twin, set) else twin.extend(copies)
        if same and not always:
            del self.memo[id(value)]
            return value
        return twin

    def _frozen(self, value: Any, of: Callable[[Any], Any]) -> Any:
        items = list(value)
        copies = [of(item) for item in items]
        if _all_same(items, copies):
            return value
        return value._make(copies) if hasattr(value, "_make") else type(value)(copies)

    def _function(self, value: FunctionType, of: Callable[[Any], Any]) -> Any:
        """A function over copies of what it closes over. A compiled one is taken as it was before."""
        if (plain := vars(value).get("_torchdynamo_orig_callable")) is not None:
            return of(plain)
        contents = {id(cell): cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)}
        cells = {key: CellType() for key in contents}
        closure = None if value.__closure__ is None else tuple(cells.get(id(c), c) for c in value.__closure__)
        twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
        self.remember(value, twin)
        parts = [value.__defaults__, value.__kwdefaults__, vars(value), *contents.values()]
        copies = [of(part) for part in parts]
        if _all_same(parts, copies):
            del self.memo[id(value)]
            return value
        for cell, content in zip(cells.values(), copies[3:], strict=True):
            cell.cell_contents = content
        twin.__defaults__, twin.__kwdefaults__, twin.__qualname__ = copies[0], copies[1], value.__qualname__
        vars(twin).update(copies[2])
        return twin

    def _object(self, value: Any, depth: int) -> Any:
        """A plain object whose attributes lead to the model."""
        attributes = getattr(value, "__dict__", None)
        if not depth or not isinstance(attributes, dict) or _is_opaque(value):
            return value
        try:
            twin = object.__new__(type(value))
        except TypeError:  # it is made in another way, as those of C are
            return value
        self.remember(value, twin)
        copies = {name: self._leading(part, depth - 1) for name, part in list(attributes.items())}
        if all(copies[name] is attributes[name] for name in copies):
            del self.memo[id(value)]
            return value
        vars(twin).update(copies)
        return twin


def _method(value: MethodType, of: Callable[[Any], Any]) -> MethodType:
    function, owner = of(value.__func__), of(value.__self__)
    return value if owner is value.__self__ and function is value.__func__ else MethodType(function, owner)


def _partial(value: partial, of: Callable[[Any], Any]) -> partial:
    parts = [value.func, value.args, value.keywords, vars(value)]
    function, args, keywords, attributes = copies = [of(part) for part in parts]
    if _all_same(parts, copies):
        return value
    twin = type(value)(function, *args, **keywords)
    vars(twin).update(attributes)
    return twin


def _reference(value: weakref.ref, of: Callable[[Any], Any]) -> weakref.ref:
    target = value()
    twin = of(target)
    return value if twin is target else weakref.ref(twin)


def _all_same(values: Sequence[Any], copies: Sequence[Any]) -> bool:
    return all(value is made for value, made in zip(values, copies, strict=True))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 # an empty cell raises
    except ValueError:
        return False
    return True


def _is_opaque(value: Any) -> bool:
    return not isinstance(value, RemovableHandle) and type(value).__module__.partition(".")[0] in OPAQUE
