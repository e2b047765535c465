"""Models from a name: ``package.module:factory``, with literal arguments if the factory takes any."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dualform.errors import DataNotFound, ModelMismatch, QueryError

HOW = "Write package.module:factory, as in 'train:make_model' or 'dualform.models:MLP(784, 128, 10)'."


def make_model(name: str) -> nn.Module:
    """Import the factory (the working folder counts too) and call it: ``"dualform.models:MLP(784, 128, 10)"``."""
    model = call(name, "the model")
    if not isinstance(model, nn.Module):
        raise QueryError(f"'{name}' gave a {type(model).__name__}, not a torch.nn.Module. {HOW}")
    return model


def call(name: str, role: str) -> Any:
    """The result of calling a factory; an object that cannot be called is returned itself."""
    module_name, _, expression = name.partition(":")
    path, args, kwargs = _read(name, role, expression)
    try:
        attribute: Any = _import(module_name)
        for part in path.split("."):
            attribute = getattr(attribute, part)
        return attribute(*args, **kwargs) if callable(attribute) and not isinstance(attribute, nn.Module) else attribute
    except Exception as error:
        raise QueryError(f"cannot make {role} '{name}': {type(error).__name__}: {error}. {HOW}") from error


def is_name(text: str) -> bool:
    """Whether a text looks like package.module:factory, and not like a file (which may begin with a drive, ``C:/``)."""
    module, colon, rest = text.partition(":")
    return bool(colon and rest) and rest[0] not in "/\\" and all(part.isidentifier() for part in module.split("."))


def _read(name: str, role: str, expression: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse the dotted name and the arguments. Nothing is evaluated: arguments must be literals."""
    try:
        tree = ast.parse(expression, mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        args = [ast.literal_eval(value) for value in call.args]
        kwargs = {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
        path = ast.unparse(call.func)
    except (SyntaxError, ValueError) as error:
        raise QueryError(f"cannot read {role} '{name}'. {HOW}") from error
    if not all(part.isidentifier() for part in path.split(".")):
        raise QueryError(f"cannot read {role} '{name}'. {HOW}")
    return path, args, kwargs


def _import(module: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
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
