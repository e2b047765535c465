"""The options for model and data that several commands have: told here once, and read into a ``Described``."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..described import DataOptions, MemoryToOpen

MemoryPath = Annotated[Path, Argument(help="Folder of a memory written by dualform.record.", show_default=False)]
ModelOption = Annotated[
    str | None,
    Option(
        help="Model factory as package.module:factory, with literal arguments in parentheses if it takes any. Default, "
        "as for all that follows: the memory's recipe."
    ),
]
TrainingOption = Annotated[
    str | None,
    Option(
        help="Training examples in index order: .csv, .parquet, .npz, .npy, .safetensors, the folder of a saved data "
        "set, or package.module:factory."
    ),
]
TestsOption = Annotated[str | None, Option(help="Examples to ask about, in one of the forms of the training examples.")]
ClassesOption = Annotated[str | None, Option(help="Names of the classes: cat,dog,…")]
TokensOption = Annotated[
    str | None, Option(help="Vocabulary of token ids: 'bytes', a .json or .txt list, or a tokenizer.json.")
]
IndexOption = Annotated[
    str | None, Option(help="Column that holds the index of each visit's training example. Default: index.")
]
LengthOption = Annotated[
    int | None, Option(help="Tokens per example of a text; 100 if the data is one long text.", min=1)
]
ColumnsOption = Annotated[
    str | None,
    Option("--columns", "--key", help="Input columns of a table, in order: a,b,c. Or the array of an .npz."),
]
LabelOption = Annotated[str | None, Option(help="Column of the labels. Default: label, if there is one.")]
CategoriesOption = Annotated[str | None, Option(help="Columns of words, one number per word: colour,shape.")]
TrustOption = Annotated[
    bool, Option("--trust", help="Agree that the modules named in the memory's recipe are imported; remembered.")
]

BEHIND: dict[str, Any] = {
    "classes": ClassesOption, "tokens": TokensOption, "index": IndexOption, "length": LengthOption,
    "columns": ColumnsOption, "label": LabelOption, "categories": CategoriesOption, "trust": TrustOption,
}  # fmt: skip
"""The options that come after those for the model and the examples."""


def takes_data(
    *, train: str = "data", test: str | None = "test", without: tuple[str, ...] = (), opened: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose first parameter is a ``Described`` the options that make one.

    ``train`` and ``test`` name the options for the two kinds of examples. Without ``test`` there is none for these. A
    command that opens the memory itself, not ``opened``, gets a ``MemoryToOpen``.
    """
    names = {role: name for role, name in (("train", train), ("test", test)) if name is not None}
    kinds: dict[str, Any] = {"train": TrainingOption, "test": TestsOption}
    # the option --data comes first, whatever it holds
    examples = {name: kinds[role] for role, name in sorted(names.items(), key=lambda item: item[1])}
    options = {"model": ModelOption, **examples, **{name: kind for name, kind in BEHIND.items() if name not in without}}
    flags = (f"--{train}", f"--{test or 'test'}")

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(path: Path, **values: Any) -> None:
            told = {name: values.pop(name) for name in options}
            trust = told.pop("trust")
            told |= {role: told.pop(name) for role, name in names.items()}
            source = MemoryToOpen(path, DataOptions(**told, flags=flags), trust)
            command(source.open() if opened else source, **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [inspect.Parameter("path", keyword, annotation=MemoryPath)]
        parameters += [
            inspect.Parameter(name, keyword, default=False if name == "trust" else None, annotation=kind)
            for name, kind in options.items()
        ]
        parameters += [parameter.replace(kind=keyword) for parameter in own]
        vars(run).pop("__wrapped__")
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return with_options
