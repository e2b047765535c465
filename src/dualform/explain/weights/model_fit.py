"""Whether a model has the parameters of the recorded one: their names and shapes."""

from collections.abc import Iterable

from torch import nn

from dualform.errors import ModelMismatch
from dualform.types import ParameterInfo


def first_difference(recorded: Iterable[ParameterInfo], model: nn.Module, *, alone: bool = False) -> str | None:
    """The first parameter that a model lacks or has in another shape, as a clause; None if there is none.

    ``alone``: a parameter that the recorded model did not have is a difference, too.
    """
    recorded = list(recorded)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for parameter in recorded:
        tensor = tensors.get(parameter.name)
        kept = f"it recorded '{parameter.name}' of shape {parameter.shape}"
        if tensor is None:
            names = [f"'{name}'" for name, _ in model.named_parameters()]
            listed = ", ".join([*names[:4], *(["…"] if len(names) > 4 else [])]) or "no parameters"
            return f"{kept}, the model has {listed}"
        if nn.parameter.is_lazy(tensor):
            raise ModelMismatch(
                f"'{parameter.name}' of this {type(model).__name__} has no shape yet, as its layer is lazy. Run one "
                "batch through the model first."
            )
        if isinstance(tensor, nn.Parameter) and tuple(tensor.shape) != parameter.shape:  # buffers grow in training
            return f"{kept}, the model has one of shape {tuple(tensor.shape)}"
    if alone:
        names = {parameter.name for parameter in recorded}
        for name, tensor in model.named_parameters():
            if name not in names:
                shape = "" if nn.parameter.is_lazy(tensor) else f" of shape {tuple(tensor.shape)}"
                return f"the model has '{name}'{shape}, which the recorded one did not have"
    return None
