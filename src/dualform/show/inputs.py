"""Inputs in the form that a model is called with."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from dualform.errors import QueryError


def arguments(model: nn.Module) -> list[str]:
    """The names of a model's arguments."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name for parameter in inspect.signature(model.forward).parameters.values() if parameter.kind in kinds
    ]


def beside(model: nn.Module) -> list[str]:
    """The names of a model's arguments beside its inputs, without labels."""
    return [name for name in arguments(model)[1:] if name not in ("inputs", "labels")]


def parse_rows(text: str) -> list[int]:
    """Parse row numbers: ``"0,3,5"``, and ``"10:14"`` for 10, 11, 12, 13."""
    try:
        rows: list[int] = []
        for part in text.split(","):
            first, colon, last = part.partition(":")
            rows += range(int(first or 0), int(last)) if colon else [int(part)]
    except ValueError as error:
        raise QueryError(f"cannot read the rows '{text}'. Write numbers and ranges, as in 0,3,5 or 10:14.") from error
    if not rows:
        raise QueryError(f"the rows '{text}' are empty. Write numbers and ranges, as in 0,3,5 or 10:14.")
    return rows


def as_inputs(data: Shaped[Tensor, "n ..."], model: nn.Module) -> Shaped[Tensor, "n ..."]:
    """Convert rows to the model's dtype. Integers stay integers if the model has an embedding: they are tokens."""
    tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if tokens and not data.is_floating_point():
        return data.long()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    return data.to(dtype)


def as_others(values_by_name: Mapping[str, Any], model: nn.Module) -> dict[str, Shaped[Tensor, "n ..."]]:
    """Convert further inputs: floating point numbers to the model's dtype, masks and integers unchanged."""
    tensors = {
        name: values if isinstance(values, Tensor) else torch.as_tensor(values)
        for name, values in values_by_name.items()
    }
    return {
        name: as_inputs(values, model) if values.is_floating_point() else values for name, values in tensors.items()
    }


def together(x: Shaped[Tensor, "n ..."], named_inputs: Mapping[str, Tensor], model: nn.Module) -> Any:
    """The inputs in the form a model is called with: a tensor, or a mapping from argument names to tensors."""
    return {arguments(model)[0]: x, **named_inputs} if named_inputs else x
