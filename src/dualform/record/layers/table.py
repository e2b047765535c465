"""The table of layer kinds that can be recorded, and the reasons why a module is rejected."""

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .conv import ConvolutionKind
from .embedding import EmbeddingKind
from .inner_map import InnerMapKind
from .linear import LinearKind, TransposedLinearKind
from .multihead import MultiheadKind
from .protocol import LayerKind
from .recurrent import RecurrentKind

KINDS: dict[type, LayerKind] = {
    nn.Linear: LinearKind(),
    nn.Conv1d: ConvolutionKind(),
    nn.Conv2d: ConvolutionKind(),
    nn.Embedding: EmbeddingKind(),
    nn.RNNBase: RecurrentKind(),
    nn.MultiheadAttention: MultiheadKind(),
}

KINDS_BY_NAME: dict[str, LayerKind] = {TransposedLinearKind.CLASS: TransposedLinearKind()}
"""Layers of other packages, by the name of their class."""


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a module; None where no kind can record it."""
    for cls in type(module).__mro__:
        if cls in KINDS:
            return KINDS[cls]
        if (name := f"{cls.__module__}.{cls.__qualname__}") in KINDS_BY_NAME:
            return KINDS_BY_NAME[name]
    return None


def owns_forward(module: nn.Module) -> bool:
    """Whether a module has its own forward pass, so that its map is a functional call inside of it."""
    kind = kind_of(module)
    return isinstance(kind, InnerMapKind) and not kind.is_plain(module)


def refusal_of(name: str, module: nn.Module) -> str | None:
    """Why a module cannot be recorded, as a sentence; None where it can."""
    remedy = f"Leave it to the rest (snapshots, unattributed) with keep={{{name!r}: 'nothing'}}."
    if isinstance(module, nn.Bilinear):
        return f"'{name}' is an nn.Bilinear: its output is not linear in one input, so it has no dual form. {remedy}"
    kind = kind_of(module)
    if kind is None:
        return None
    if computed(module):
        return (
            f"the weight of '{name}' is computed from other parameters (weight or spectral norm), so it is not itself "
            f"trained. {remedy}"
        )
    reason = kind.refusal(module)
    return None if reason is None else f"'{name}' {reason} {remedy}"


def computed(module: nn.Module) -> bool:
    """Whether a weight is computed from other parameters (weight or spectral norm) instead of being a parameter."""
    kind = kind_of(module)
    if any(is_parametrized(part) for part in module.modules()):
        return True
    named = dict(module.named_parameters(remove_duplicate=False))
    return kind is not None and any(
        name not in named for linear_map in kind.maps(module) for name, _ in linear_map.weights
    )
