"""Whose code a recipe may run: only dualform's own networks and data sets, until the user agrees to more.

A memory can come from a stranger, and importing a module runs it. What the user agreed to is kept outside of the
memory, in ``~/.config/dualform/trusted-recipes.json``, for the path of the memory, the text of its recipe, and the
files that its modules are: a recipe that has changed asks again, and so does another module of the same name.
"""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import dualform.data
import dualform.models
from dualform.errors import ConsentNeeded
from dualform.store import Recipe, parse_factory_name

OWN = {"dualform.models": dualform.models.__all__, "dualform.data": dualform.data.__all__}
"""What may be called without asking: the public names of these two modules."""


def is_own(factory: str) -> bool:
    """Whether a name is that of a network or a data set of dualform."""
    parsed = parse_factory_name(factory, "the factory")
    return parsed.path in OWN.get(parsed.module, ())


def require_consent(
    memory: Path, recipe: Recipe, factories: Sequence[str], *, trust: bool, typed: Collection[str] = (),
    model_flag: str = "--model", trust_flag: str = "--trust",
) -> None:  # fmt: skip
    """Raise an error if a recipe names factories that the user has not agreed to.

    ``factories`` are those of the recipe that would run now. The user agrees with ``trust``, which is remembered, or
    by having ``typed`` the names; if these are all of the recipe's, that is remembered, too.
    """
    sources = (recipe.train, recipe.test)
    every = [recipe.model, *(source.factory for source in sources if source is not None)]
    foreign = [name for name in every if name is not None and not is_own(name)]
    strange = [name for name in factories if name in foreign]
    if not foreign:
        return
    agreement = _agreement(recipe, foreign)
    if trust or set(foreign) <= set(typed):
        _remember(memory, agreement)
    elif strange and _remembered().get(_key(memory)) != agreement:
        files = {module: _file_of(module) for module in (parse_factory_name(name, "it").module for name in strange)}
        modules = " and ".join(f"the module '{module}' ({file})" for module, file in files.items())
        raise ConsentNeeded(
            f"the recipe of {memory} names {' and '.join(map(repr, strange))}, which is not dualform's own. To use it, "
            f"{modules} would be imported, and that runs it. If you trust it, ask once more with {trust_flag}, which "
            f"is remembered, or give your own with {model_flag} and the options for data."
        )


def consent_file() -> Path:
    """The file that remembers what the user agreed to."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dualform" / "trusted-recipes.json"


def _key(memory: Path) -> str:
    return str(memory.resolve())


def _agreement(recipe: Recipe, factories: Sequence[str]) -> str:
    """A checksum of the recipe and of the places of its modules."""
    modules = sorted({parse_factory_name(name, "it").module for name in factories})
    text = json.dumps([recipe.text, {module: _file_of(module) for module in modules}])
    return hashlib.sha256(text.encode()).hexdigest()


def _file_of(module: str) -> str:
    """Where Python would find the outermost package of a module, looked up without importing anything."""
    spec = PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path])
    if spec is None:
        return "on no path"
    return str(spec.origin or next(iter(spec.submodule_search_locations or ()), "on no path"))


def _remembered() -> dict[str, str]:
    try:
        agreements = json.loads(consent_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return agreements if isinstance(agreements, dict) else {}


def _remember(memory: Path, agreement: str) -> None:
    file, agreements = consent_file(), _remembered()
    if agreements.get(_key(memory)) == agreement:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({**agreements, _key(memory): agreement}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)
