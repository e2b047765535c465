"""Copies of values that refer to a model's modules and tensors: each copy refers to the copies of these.

A model's attributes hold more than its tables: modules in lists, a ``forward`` that was patched onto an instance, hooks
that are methods of another module, weak references to parameters. Each is rebuilt if it leads to the model. Attributes
of plain objects are followed too, a few levels deep.
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
"""Types whose values refer to nothing."""

OPAQUE = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "pyarrow", "pandas", "transformers", "tokenizers", "datasets", "lightning", "pytorch_lightning",
}  # fmt: skip
"""Packages whose plain objects (trainers, configurations, optimisers, arrays) are shared as they are."""

DEPTH, LARGE = 3, 1000
"""How many levels of plain objects are followed, and how many entries a container inside one may have for that."""


class References:
    """Copies of values by the identity of the originals. Subclasses copy modules and tensors."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self._originals: list[Any] = []
        """Kept alive, so that no other object gets an identity that the memo holds."""

    def module(self, module: nn.Module) -> nn.Module:
        """The copy of a module."""
        raise NotImplementedError

    def tensor(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor."""
        raise NotImplementedError

    def remember(self, value: Any, twin: Copied) -> Copied:
        """Use this copy of a value from now on."""
        self._originals.append(value)
        self.memo[id(value)] = twin
        return twin

    def own(self, value: Any) -> Any:
        """Copy an attribute of a module, with its containers and tensors: a forward pass may change them in place."""
        if type(value) in weakref.ProxyTypes:
            return self._proxy(value)
        if isinstance(value, Tensor):
            return self.memo[id(value)] if id(value) in self.memo else self.remember(value, self.tensor(value))
        if isinstance(value, list | dict | set | deque):
            return self._container(value, self.own, always=True)
        return self._leading(value, DEPTH)

    def _leading(self, value: Any, depth: int) -> Any:
        """The value itself, or a copy that leads to the copies if the value leads to the model."""
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
        except ReferenceError:  # its target is gone
            return value
        twin = self._leading(target, DEPTH)
        return value if twin is target else weakref.proxy(twin)

    def _container(self, value: Any, copy_of: Callable[[Any], Any], always: bool = False) -> Any:
        """A container of copies; the same one where nothing in it leads to the model, unless copied ``always``."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        twin = self.remember(value, copy.copy(value))
        if isinstance(value, dict):
            pairs = [(key, copy_of(key), part, copy_of(part)) for key, part in list(value.items())]
            same = all(key is new_key and part is new_part for key, new_key, part, new_part in pairs)
            if not same:
                twin.clear()
                for _, new_key, _, new_part in pairs:
                    twin[new_key] = new_part
        else:
            parts = list(value)
            copies = [copy_of(part) for part in parts]
            same = _all_same(parts, copies)
            if not same:
                twin.clear()
                twin.update(copies) if isinstance(twin, set) else twin.extend(copies)
        if same and not always:
            del self.memo[id(value)]
            return value
        return twin

    def _frozen(self, value: Any, copy_of: Callable[[Any], Any]) -> Any:
        parts = list(value)
        copies = [copy_of(part) for part in parts]
        if _all_same(parts, copies):
            return value
        return value._make(copies) if hasattr(value, "_make") else type(value)(copies)

    def _function(self, value: FunctionType, copy_of: Callable[[Any], Any]) -> Any:
        """The same function with copies in its closure, defaults and attributes. A compiled one becomes uncompiled."""
        if (plain := vars(value).get("_torchdynamo_orig_callable")) is not None:
            return copy_of(plain)
        contents = {id(cell): cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)}
        cells = {key: CellType() for key in contents}
        closure = None if value.__closure__ is None else tuple(cells.get(id(c), c) for c in value.__closure__)
        twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
        self.remember(value, twin)
        parts = [value.__defaults__, value.__kwdefaults__, vars(value), *contents.values()]
        copies = [copy_of(part) for part in parts]
        if _all_same(parts, copies):
            del self.memo[id(value)]
            return value
        for cell, content in zip(cells.values(), copies[3:], strict=True):
            cell.cell_contents = content
        twin.__defaults__, twin.__kwdefaults__, twin.__qualname__ = copies[0], copies[1], value.__qualname__
        vars(twin).update(copies[2])
        return twin

    def _object(self, value: Any, depth: int) -> Any:
        """A copy of a plain object, if its attributes lead to the model."""
        attributes = getattr(value, "__dict__", None)
        if not depth or not isinstance(attributes, dict) or _is_opaque(value):
            return value
        try:
            twin = object.__new__(type(value))
        except TypeError:  # types written in C are made in another way
            return value
        self.remember(value, twin)
        copies = {name: self._leading(part, depth - 1) for name, part in list(attributes.items())}
        if all(copies[name] is attributes[name] for name in copies):
            del self.memo[id(value)]
            return value
        vars(twin).update(copies)
        return twin


def _method(value: MethodType, copy_of: Callable[[Any], Any]) -> MethodType:
    function, owner = copy_of(value.__func__), copy_of(value.__self__)
    return value if owner is value.__self__ and function is value.__func__ else MethodType(function, owner)


def _partial(value: partial, copy_of: Callable[[Any], Any]) -> partial:
    parts = [value.func, value.args, value.keywords, vars(value)]
    function, args, keywords, attributes = copies = [copy_of(part) for part in parts]
    if _all_same(parts, copies):
        return value
    twin = type(value)(function, *args, **keywords)
    vars(twin).update(attributes)
    return twin


def _reference(value: weakref.ref, copy_of: Callable[[Any], Any]) -> weakref.ref:
    target = value()
    twin = copy_of(target)
    return value if twin is target else weakref.ref(twin)


def _all_same(values: Sequence[Any], copies: Sequence[Any]) -> bool:
    return all(value is twin for value, twin in zip(values, copies, strict=True))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 # an empty cell raises
    except ValueError:
        return False
    return True


def _is_opaque(value: Any) -> bool:
    return not isinstance(value, RemovableHandle) and type(value).__module__.partition(".")[0] in OPAQUE
