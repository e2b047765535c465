"""One layer kind a file: which linear maps a module applies, and how their inputs and errors are found."""

from ..hooks import Hook
from .protocol import ErrorPoint, LayerKind, LinearMap, MapRows, ModuleCall, OnCall, OnUnseen
from .table import KINDS, computed, kind_of, owns_forward, refusal_of

__all__ = [
    "KINDS",
    "ErrorPoint",
    "Hook",
    "LayerKind",
    "LinearMap",
    "MapRows",
    "ModuleCall",
    "OnCall",
    "OnUnseen",
    "computed",
    "kind_of",
    "owns_forward",
    "refusal_of",
]
