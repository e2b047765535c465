"""The layer kinds that can be recorded, and what is refused by name."""

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

OTHERS: dict[str, LayerKind] = {TransposedLinearKind.CLASS: TransposedLinearKind()}
"""Layers of other packages, by the name of their class."""


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a module; None where it is none that can be recorded."""
    for cls in type(module).__mro__:
        if cls in KINDS:
            return KINDS[cls]
        if (name := f"{cls.__module__}.{cls.__qualname__}") in OTHERS:
            return OTHERS[name]
    return None


def owns_forward(module: nn.Module) -> bool:
    """Whether a module of a kind runs a forward pass of its own, so that its map is the functional call inside that."""
    kind = kind_of(module)
    return isinstance(kind, InnerMapKind) and not kind.is_plain(module)


def refusal_of(name: str, module: nn.Module) -> str | None:
    """Why a module cannot be recorded, if so: a sentence."""
    aside = f"Leave it to the rest (snapshots, unattributed) with keep={{{name!r}: 'nothing'}}."
    if isinstance(module, nn.Bilinear):
        return f"'{name}' is an nn.Bilinear: its output is not linear in one input, so it has no dual form. {aside}"
    kind = kind_of(module)
    if kind is None:
        return None
    if computed(module):
        return (
            f"the weight of '{name}' is computed from other parameters (weight or spectral norm), so it is not what is "
            f"trained. {aside}"
        )
    reason = kind.refusal(module)
    return None if reason is None else f"'{name}' {reason} {aside}"


def computed(module: nn.Module) -> bool:
    """Whether a weight is made from other parameters (weight or spectral norm) instead of being one."""
    kind = kind_of(module)
    if any(is_parametrized(part) for part in module.modules()):
        return True
    named = dict(module.named_parameters(remove_duplicate=False))
    return kind is not None and any(name not in named for each in kind.maps(module) for name, _ in each.weights)
