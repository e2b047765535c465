"""The source distribution builds and tests itself, and the wheel works in a clean environment. Needs a network."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.package]

ROOT = Path(__file__).parents[2]
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
MODEL = ["--model", "dualform.models:MLP(784, 128, 10)"]


def run(*command: object, folder: Path, **environment: str) -> str:
    """Run a command to its end; what it prints."""
    process = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1800,
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}"
    return process.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The source distribution of this tree, unpacked."""
    pytest.importorskip("hatchling", reason="the dev extra has hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, folder=ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(unpacked) -> Path:
    """The wheel, built from the source distribution alone."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", unpacked.parent, folder=unpacked)
    return next(unpacked.parent.glob("*.whl"))


class CleanEnvironment:
    """A virtual environment without the source tree, and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        venv.create(folder / "venv", with_pip=True)
        self.scripts = folder / "venv" / SCRIPTS

    def install(self, wheel: Path, extras: str = "") -> None:
        constraints = ROOT / "constraints.txt"
        run(self.scripts / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", constraints,
            f"dualform{extras} @ {wheel.as_uri()}", folder=self.folder)  # fmt: skip

    def python(self, code: str) -> str:
        return run(self.scripts / "python", "-I", "-c", code, folder=self.folder)

    def dualform(self, *arguments: object) -> str:
        return run(self.scripts / "dualform", *arguments, folder=self.folder)


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> CleanEnvironment:
    """The wheel without extras."""
    environment = CleanEnvironment(tmp_path_factory.mktemp("clean"))
    environment.install(wheel)
    return environment


@pytest.fixture(scope="module")
def environment(bare, wheel) -> CleanEnvironment:
    """The wheel with the extras of the demo and the explorer."""
    bare.install(wheel, "[demo,web]")
    return bare


@pytest.fixture(scope="module")
def demo(environment) -> Path:
    """What `dualform demo` leaves behind."""
    assert "Without the visits where" in environment.dualform("demo", "--steps", "60")
    return Path("runs/demo")


RECORD = """
import torch, dualform
model = torch.nn.Sequential(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dualform.record(model, optimizer, "runs/bare") as tape:
    tape.note(label=torch.arange(6))
    torch.nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
    optimizer.step()
for hit in dualform.open("runs/bare").attend(model, torch.randn(1, 4)).top(1, layer="0", per="slot"):
    print(hit.label, dualform.__file__)
"""


def test_without_extras_the_wheel_records_and_answers(bare):
    """This test stands first: the environment is given extras by the next ones."""
    printed = bare.python(RECORD)
    assert str(bare.scripts.parent) in printed, "dualform is imported from the environment, not from the source tree"
    assert "dualform demo" in bare.dualform("--help")
    assert "runs/bare" in bare.dualform("inspect", "runs/bare").replace("\\", "/")


def test_the_wheel_declares_who_wrote_it_and_its_types(bare):
    facts = bare.python(
        "from importlib.metadata import metadata, files\n"
        "facts = metadata('dualform')\n"
        "typed = [file.as_posix() for file in files('dualform') if file.name == 'py.typed']\n"
        "print(facts['Author'], facts['License-Expression'], *typed, sep=', ')"
    )
    assert facts.strip() == "dualform contributors, Apache-2.0, dualform/py.typed"


def test_the_quickstart_of_the_readme_runs_from_the_wheel(environment, unpacked):
    text = (unpacked / "README.md").read_text(encoding="utf-8")
    quickstart = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    printed = environment.python(quickstart)
    assert "made of:" in printed and "the parts sum to" in printed


def test_the_demo_writes_a_memory_and_figures(environment, demo):
    assert (environment.folder / demo / "memory" / "manifest.json").is_file()
    assert (environment.folder / demo / "report.html").is_file() and list((environment.folder / demo).glob("*.png"))


def test_the_report_is_one_file_with_templates_and_style(environment, demo):
    environment.dualform(
        "report", demo / "memory", *MODEL, "--data", demo / "train.npz", "--test", demo / "test.npz",
        "--examples", 2, "--weigh", 4, "-o", "report.html",
    )  # fmt: skip
    text = (environment.folder / "report.html").read_text(encoding="utf-8")
    assert "</html>" in text and "<style" in text and "<script src" not in text


@pytest.fixture(scope="module")
def address(environment, demo) -> Iterator[str]:
    """Where `dualform serve` of the wheel listens."""
    command = [environment.scripts / "dualform", "serve", demo / "memory", *MODEL, "--data", demo / "train.npz",
               "--test", demo / "test.npz", "--port", "0", "--no-open"]  # fmt: skip
    server = subprocess.Popen(
        [str(part) for part in command],
        cwd=environment.folder,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        lines = []
        assert server.stdout is not None
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"http://\S+/", line):
                yield found.group()
                break
        else:
            pytest.fail("dualform serve ended early:\n" + "".join(lines))
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)


def test_the_explorer_serves_its_pages_and_what_they_need(address):
    with urllib.request.urlopen(address, timeout=60) as answer:
        page = answer.read().decode()
    assert answer.status == 200 and "</html>" in page
    needed = re.findall(r'(?:href|src)="(/[^"]*\.(?:css|js|svg))"', page)
    assert len(needed) >= 3
    for link in needed:
        with urllib.request.urlopen(address.rstrip("/") + link, timeout=60) as answer:
            assert answer.status == 200 and answer.read()


# ---------------------------------------------------------------- the source distribution


def pytest_of(unpacked: Path, *arguments: object) -> str:
    """Run its tests with its own sources: whatever else is installed, the package of that folder is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return run(*command, folder=unpacked, PYTHONPATH=str(unpacked / "src"))


def test_the_source_distribution_holds_what_its_tests_import(unpacked):
    printed = pytest_of(unpacked, "--collect-only")
    assert re.search(r"\d{3,} tests collected", printed) and "error" not in printed.splitlines()[-1]


def test_a_part_of_the_suite_passes_from_the_source_distribution(unpacked):
    """Those that read files of the tree: documents, golden memories, benchmarks, experiments; and one of recording."""
    tests = ["tests/test_flow.py", "tests/test_names.py", "tests/test_optimiser_table.py", "tests/release",
             "tests/golden", "tests/show/test_documents.py", "tests/store/test_folder.py",
             "tests/record/test_step_hooks.py", "tests/record/test_edits.py"]  # fmt: skip
    printed = pytest_of(unpacked, "-m", "not slow", *tests)
    assert "passed" in printed.splitlines()[-1]
