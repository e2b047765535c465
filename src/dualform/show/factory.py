"""Models from a name: ``package.module:factory``, with literal arguments if the factory takes any."""

import importlib
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dualform.errors import DataNotFound, ModelMismatch, QueryError
from dualform.record import recording_refused
from dualform.store import FACTORY_FORM, parse_factory_name


def make_model(name: str) -> nn.Module:
    """Import the factory (the working folder counts too) and call it: ``"dualform.models:MLP(784, 128, 10)"``."""
    model = call(name, "the model")
    if not isinstance(model, nn.Module):
        raise QueryError(f"'{name}' gave a {type(model).__name__}, not a torch.nn.Module. {FACTORY_FORM}")
    return model


def call(name: str, role: str) -> Any:
    """The result of calling a factory; an object that cannot be called is returned itself."""
    parsed = parse_factory_name(name, role)
    try:
        attribute: Any = _import(parsed.module)
        for part in parsed.path.split("."):
            attribute = getattr(attribute, part)
        is_factory = callable(attribute) and not isinstance(attribute, nn.Module)
        return attribute(*parsed.args, **dict(parsed.kwargs)) if is_factory else attribute
    except Exception as error:
        raise QueryError(f"cannot make {role} '{name}': {type(error).__name__}: {error}. {FACTORY_FORM}") from error


def _import(module: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    reason = (
        f"importing '{module}' began to record a training, and a command needs only its factory. Put the training "
        'under if __name__ == "__main__": in that file.'
    )
    try:
        with recording_refused(reason):
            return importlib.import_module(module)
    finally:
        sys.path.remove(str(Path.cwd()))


def load_weights(model: nn.Module, file: Path) -> nn.Module:
    """Load a safetensors file into a model; every name must be in both."""
    if not file.is_file():
        raise DataNotFound(f"there is no file {file}. Save the weights with safetensors.torch.save_model(model, path).")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise QueryError(f"{file} is not a safetensors file ({error}). No other format is supported.") from error
    try:
        missing, unknown = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ModelMismatch(
            f"the weights in {file} do not fit this {type(model).__name__}: {_last_line(error)}"
        ) from error
    tied = {name for name, _ in model.named_parameters()}  # a file holds one name only of tied weights
    missing = [name for name in missing if name in tied]
    if missing or unknown:
        mismatch = f"'{missing[0]}' is not in the file" if missing else f"the model has no '{unknown[0]}'"
        raise ModelMismatch(f"the weights in {file} do not fit this {type(model).__name__}: {mismatch}.")
    return model


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
