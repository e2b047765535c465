"""A factory by its name, ``package.module:factory(…)``: read as text, never imported or evaluated here."""

import ast
from dataclasses import dataclass
from typing import Any

from dualform.errors import QueryError

FACTORY_FORM = "Write package.module:factory, as in 'train:make_model' or 'dualform.models:MLP(784, 128, 10)'."


@dataclass(frozen=True)
class FactoryName:
    """The module, the dotted name in it, and literal arguments."""

    module: str
    path: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


def parse_factory_name(name: str, role: str) -> FactoryName:
    """Parse a name and its arguments, which must be literals. ``role`` says in errors what it is the name of."""
    module, _, expression = name.partition(":")
    try:
        tree = ast.parse(expression, mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        args = tuple(ast.literal_eval(value) for value in call.args)
        kwargs = tuple((str(pair.arg), ast.literal_eval(pair.value)) for pair in call.keywords)
        path = ast.unparse(call.func)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise QueryError(f"cannot read {role} '{name}'. {FACTORY_FORM}") from error
    if not _is_dotted(path) or not _is_dotted(module):
        raise QueryError(f"cannot read {role} '{name}'. {FACTORY_FORM}")
    return FactoryName(module, path, args, kwargs)


def is_factory_name(text: str) -> bool:
    """Whether a text looks like package.module:factory, and not like a file (which may begin with a drive, ``C:/``)."""
    module, colon, rest = text.partition(":")
    return bool(colon and rest) and rest[0] not in "/\\" and _is_dotted(module)


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))
