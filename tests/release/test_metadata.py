"""What pyproject.toml, the constraints, the workflow and the hooks say fits together."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TOOLS = {"ruff", "basedpyright", "playwright", "datasets", "hatchling", "sphinx", "docutils", "myst-parser", "furo"}
"""Of the extras dev and docs, what the tests of the core do not use."""


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {package.lower(): version for package, version in pins}


def claimed() -> dict[str, str]:
    """The lowest version of each package, for the library and its extras; those of one system alone are left out."""
    extras = PROJECT["optional-dependencies"].values()
    requirements = [*PROJECT["dependencies"], *(requirement for extra in extras for requirement in extra)]
    matches = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement) for requirement in requirements)
    return {match[1].lower(): match[2] for match in matches if match}


def commands(target: str) -> list[str]:
    """The commands of a target of the Makefile, without the folder of the tools."""
    body = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert body is not None, target
    return [line.strip().removeprefix("@").replace("$(BIN)", ".venv/bin") for line in body[1].splitlines()]


def test_the_lowest_versions_are_those_that_pyproject_claims():
    lowest, claims = pinned("constraints-lowest.txt"), claimed()
    assert set(lowest) == set(claims) - TOOLS
    for package, version in lowest.items():
        assert re.fullmatch(re.escape(claims[package]) + r"(\.0)*", version), package


def test_every_package_that_is_claimed_is_pinned_for_development():
    pins = pinned("constraints.txt")
    assert [
        package for package in claimed() if package.replace("_", "-") not in {p.replace("_", "-") for p in pins}
    ] == []


def test_the_dev_extra_holds_all_other_extras():
    extras = set(PROJECT["optional-dependencies"]) - {"dev", "docs"}  # `make docs` installs its own on demand
    named = {extra for line in PROJECT["optional-dependencies"]["dev"] for extra in re.findall(r"[a-z]+", line)
             if line.startswith("dualform[")}  # fmt: skip
    assert extras - named <= {"pandas", "plot"}, "those two are in the extra demo"


def test_the_authors_are_the_contributors_and_no_address_is_made_up():
    assert PROJECT["authors"] == [{"name": "dualform contributors"}] and "urls" not in PROJECT


def test_the_source_distribution_holds_every_folder_and_file_of_the_tree():
    """What git does not track, and what only builds know, aside."""
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in included if not (ROOT / name.lstrip("/")).exists()] == []
    for folder in ("src", "tests", "docs", "examples", "experiments", "benchmarks"):
        assert f"/{folder}" in included


def test_the_changelog_has_a_heading_for_this_version_and_one_for_the_next():
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(re.escape(PROJECT["version"]) + r" - \d{4}-\d\d-\d\d", headings[1])


def test_the_hooks_of_pre_commit_are_the_checks_of_make():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in config["repos"]] == ["local"], "other hooks would need the network"
    entries = [hook["entry"] for hook in config["repos"][0]["hooks"]]
    assert entries == [command.removesuffix(" .") for command in commands("check")]


def test_the_workflow_runs_targets_of_the_makefile_on_the_pythons_that_are_claimed():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {word for step in steps if step.startswith("make ") for word in step.split()[1:] if "=" not in word}
    assert targets >= {"check", "test", "docs"}
    assert [target for target in targets if f"\n{target}:" not in MAKEFILE] == []
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == pythons
    files = [word for step in steps for word in step.split() if word.endswith(".py")]
    assert files and [file for file in files if not (ROOT / file).is_file()] == []
