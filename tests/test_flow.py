"""The folders are the data flow: imports only look back, and importing the package brings in nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

FLOW = [
    "errors",
    "types",
    "progress",
    "arguments",
    "sizes",
    "data",
    "attention",
    "models",
    "tuning",
    "rules",
    "store",
    "engine",
    "tasks",
    "record",
    "replay",
    "explain",
    "svm",
    "evaluate",
    "log",
    "show",
    "__main__",
]
PACKAGE = "dualform"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE


def test_imports_only_look_back():
    for here, there, where in imports_between_folders(SOURCE):
        assert there in FLOW, f"{where}: import {there} from the folder that defines it, not from the public names"
        assert FLOW.index(there) <= FLOW.index(here), f"{where}: {here} must not use {there}"


def test_every_folder_has_its_place_in_the_flow():
    strangers = {folder_of(path, SOURCE) for path in modules(SOURCE)} - set(FLOW)
    assert not strangers, f"give {sorted(strangers)} a place in FLOW, where the data passes through"


@pytest.mark.parametrize("heavy", ["matplotlib", "pandas", "sklearn", "transformers", "fastapi"])
def test_importing_the_package_imports_no_heavy_extra(heavy, modules_after_import):
    assert heavy not in modules_after_import


@pytest.mark.parametrize(
    ("path", "line", "folders"),
    [
        ("store/store.py", "import dualform.types", ["types"]),
        ("store/store.py", "import dualform.show.commands.cli as cli, dualform.rules", ["show", "rules"]),
        ("store/store.py", "import dualform", ["dualform"]),
        ("store/store.py", "from dualform import __version__", ["__version__"]),
        ("store/store.py", "from dualform import rules, errors", ["rules", "errors"]),
        ("store/store.py", "from dualform.rules.sgd import Rule", ["rules"]),
        ("store/store.py", "from .tables import Call", ["store"]),
        ("store/store.py", "from . import tables", ["store"]),
        ("store/store.py", "from .. import show", ["show"]),
        ("store/store.py", "from ..show.cli import app", ["show"]),
        ("store/__init__.py", "from .store import Store", ["store"]),
        ("store/__init__.py", "from ..explain import Memory", ["explain"]),
        ("store/deep/er.py", "from ...record import record", ["record"]),
        ("types.py", "from .errors import SizeError", ["errors"]),
        ("types.py", "from . import errors", ["errors"]),
        ("types.py", "def lazy():\n    from dualform.show import cli", ["show"]),
        ("types.py", "if TYPE_CHECKING:\n    import dualform.record", ["record"]),
        ("types.py", "def lazy():\n    return importlib.import_module('dualform.show.commands.cli')", ["show"]),
        ("types.py", "def lazy():\n    return import_module('..show', 'dualform.store')", ["show"]),
        ("types.py", "def lazy():\n    return __import__('dualform.svm')", ["svm"]),
        ("types.py", "import torch, dualformer\nfrom os import path", []),
        ("__init__.py", "from .show import cli", []),
    ],
)
def test_the_flow_sees_every_way_to_import(tmp_path, path, line, folders):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line, encoding="utf-8")
    assert [there for _, there, _ in imports_between_folders(tmp_path)] == folders


@pytest.fixture(scope="module")
def modules_after_import() -> set[str]:
    program = f"import sys, {PACKAGE}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def imports_between_folders(source: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (importing folder, imported folder, file and line) for every import of the package inside itself."""
    for path in modules(source):
        package = ".".join([PACKAGE, *path.relative_to(source).parent.parts])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            for name in imported_names(node, package):
                if name == PACKAGE or name.startswith(f"{PACKAGE}."):
                    there = name.split(".")[:2][-1]  # the package itself where nothing follows
                    yield folder_of(path, source), there, f"{path.relative_to(source)}:{getattr(node, 'lineno', '?')}"


def imported_names(node: ast.AST, package: str) -> list[str]:
    """The absolute names of the modules that one node of a file in ``package`` imports."""
    match node:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases, level=level):
            base = resolve_name("." * level + (module or ""), package)
            return [f"{base}.{alias.name}" for alias in aliases] if base == PACKAGE else [base]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *rest],
        ):
            anchor = rest[0].value if rest and isinstance(rest[0], ast.Constant) else package
            return [resolve_name(name, anchor if isinstance(anchor, str) else package)]
        case _:
            return []


def modules(source: Path) -> list[Path]:
    """All files of the package but its own ``__init__.py``, which gathers the public names from everywhere."""
    return [path for path in sorted(source.rglob("*.py")) if path != source / "__init__.py"]


def folder_of(path: Path, source: Path) -> str:
    """The first step of the path: ``memory`` for ``memory/store.py``, ``types`` for ``types.py``."""
    return path.relative_to(source).with_suffix("").parts[0]
