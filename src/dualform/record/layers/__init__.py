"""The layer kinds, one per file: which linear maps a module applies, and how their inputs and errors are captured."""

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
