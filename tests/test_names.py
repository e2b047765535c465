"""One word, one thing: what a stranger must be able to rely on when reading the names of the package."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dualform"

GENERIC = frozenset(
    [
        "all_",
        "asked",
        "each",
        "found",
        "given",
        "got",
        "held",
        "here",
        "it",
        "item",
        "known",
        "made",
        "mine",
        "obj",
        "of",
        "one",
        "ones",
        "other",
        "others",
        "said",
        "seen",
        "some",
        "stuff",
        "taken",
        "tell",
        "that",
        "them",
        "there",
        "these",
        "thing",
        "things",
        "this",
        "those",
        "told",
        "tmp",
        "what",
        "whatever",
        "which",
        "whole",
    ]
)
"""Words that say nothing about what a variable holds."""

SHARED = {"RecordCallback"}
"""Class names that two trainers may share: each is imported from the module of its trainer."""

FAMILIES = {"attention"}
"""Folders with one member of a family a file."""

CROWDED = 14
"""How many modules a folder may hold."""


def test_every_class_and_alias_has_a_name_of_its_own():
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in class_names(ast.parse(path.read_text(encoding="utf-8"))):
            places[name].append(str(path.relative_to(SOURCE)))
    shared = {name: files for name, files in places.items() if len(files) > 1 and name not in SHARED}
    assert not shared


def test_variables_are_named_after_what_they_hold():
    names = Counter(name for path in SOURCE.rglob("*.py") for name in bindings(path))
    generic = {name: count for name, count in names.items() if name in GENERIC}
    share = sum(generic.values()) / names.total()
    assert share < 0.01, f"{share:.1%} of {names.total()} bindings: {generic}"


def test_no_folder_is_crowded():
    crowded = {
        str(folder.relative_to(SOURCE)): len(modules)
        for folder in folders()
        if len(modules := [path for path in folder.glob("*.py") if path.name != "__init__.py"]) > CROWDED
    }
    assert not crowded.keys() - FAMILIES, crowded


def test_rooms_are_entered_through_their_door():
    past = sorted({f"{path.relative_to(SOURCE)}: {name}" for path in SOURCE.rglob("*.py") for name in past_doors(path)})
    assert not past, "\n".join(past)


def class_names(tree: ast.Module) -> Iterator[str]:
    """The classes of a file, and its aliases of types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


def bindings(path: Path) -> Iterator[str]:
    """Every name that a file binds: by assignment, in loops and comprehensions, as arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                if name not in ("self", "cls", "_"):
                    yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def folders() -> list[Path]:
    return sorted({path.parent for path in SOURCE.rglob("*.py")})


def past_doors(path: Path) -> Iterator[str]:
    """Imports that reach into a folder from outside, past the names that its ``__init__`` offers, and private names."""
    inside = path.relative_to(SOURCE).parent.parts
    package = ".".join(["dualform", *inside])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
        if base.split(".")[0] != "dualform":
            continue
        target = SOURCE.joinpath(*base.split(".")[1:])
        room = target if target.is_dir() else target.parent
        parts = room.relative_to(SOURCE).parts
        if not target.is_dir() and parts != inside[: len(parts)]:
            yield base
        for alias in node.names:
            is_module = target.is_dir() and (target / f"{alias.name}.py").is_file()
            if is_module and parts != inside[: len(parts)] and alias.name not in offered(target):
                yield f"{base}.{alias.name}"
            if alias.name.startswith("_") and not alias.name.startswith("__"):
                yield f"{base}.{alias.name} is private"


def offered(room: Path) -> set[str]:
    """The names that a folder's ``__init__`` binds."""
    tree = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


@pytest.mark.parametrize("line", ["from dualform.engine.scan import scan", "from ..engine.scan import _hidden"])
def test_an_import_past_a_door_is_seen(tmp_path, monkeypatch, line):
    monkeypatch.setattr("test_names.SOURCE", tmp_path)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "scan.py").touch()
    (tmp_path / "show").mkdir()
    (tmp_path / "show" / "page.py").write_text(line, encoding="utf-8")
    assert list(past_doors(tmp_path / "show" / "page.py"))
