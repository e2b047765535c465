"""The reason why a parameter belongs to the rest, or why nothing can be recorded."""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from dualform.types import LayerInfo

from ..layers import kind_of, refusal_of
from .parameter_owners import ParameterOwners


def reasons_for_rest(
    model: nn.Module, layers: Collection[LayerInfo], explained: Collection[str], owners: ParameterOwners
) -> dict[str, str]:  # fmt: skip
    """The reason for each parameter and buffer that is not explained, by its name."""
    kept = {name: layer for layer in layers for name in layer.parameters}
    reasons = {name: "it is a buffer" for name, _ in model.named_buffers()}
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            name = f"{path}.{own}" if path else own
            if parameter is not None and name not in explained:
                reasons[name] = _reason(path, module, parameter, kept.get(name), owners)
    return reasons


def _reason(
    path: str, module: nn.Module, parameter: Tensor, layer: LayerInfo | None, owners: ParameterOwners
) -> str:  # fmt: skip
    if parameter not in owners:
        return "no optimiser has it"
    if layer is not None:
        return f"its layer keeps too little to explain it (keep={layer.keep!r}, or an optimiser without a rule)"
    if kind_of(module) is None:
        return f"{type(module).__name__} is no layer that can be recorded as a linear map"
    refusal = refusal_of(path, module)
    return "its layer was not chosen to be recorded, or it is no part of a linear map" if refusal is None else refusal


def no_layer(model: nn.Module, layers: Mapping[str, nn.Module], owners: ParameterOwners) -> str:
    """Why there is nothing to record in a model, and what to do: the text of an error."""
    if layers:
        return (
            f"no layer of this {type(model).__name__} has a parameter in the optimiser (its layers: {list(layers)}). "
            "Pass the optimiser that trains them."
        )
    classes = {
        f"{type(module).__module__}.{type(module).__qualname__}": None
        for module in model.modules()
        if any(parameter in owners for parameter in module._parameters.values() if parameter is not None)
    }
    return (
        f"this {type(model).__name__} has no layer that can be recorded: its trained parameters belong to "
        f"{list(classes) or 'no module'}, and the layers that can be are nn.Linear, nn.Conv1d, nn.Conv2d, "
        "nn.Embedding, nn.RNN, nn.LSTM, nn.GRU and nn.MultiheadAttention, and subclasses of these. Use one of them for "
        "the maps that you want to ask about."
    )
