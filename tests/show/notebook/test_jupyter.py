"""Answers, figures and the explorer in a real Jupyter kernel and in marimo; the gallery shows what its notebooks give.

``make gallery`` runs this in an environment of its own.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat", reason="Jupyter is not installed: make gallery")
nbclient: Any = pytest.importorskip("nbclient", reason="Jupyter is not installed: make gallery")
pytest.importorskip("ipykernel", reason="Jupyter is not installed: make gallery")
pytestmark = pytest.mark.slow

GALLERY = Path(__file__).parents[3] / "docs" / "gallery"
NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def execute() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute", GALLERY / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kinds(cell: Any) -> list[list[str]]:
    return [sorted(output.get("data", [output.get("name")])) for output in cell.get("outputs", [])]


def words(cell: Any) -> str:
    """What a cell prints or shows beside its HTML, without numbers, bars of blocks and addresses in memory."""
    texts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", []))
    return NUMBER.sub("#", re.sub(r"[▁▂▃▄▅▆▇█]+|0x[0-9a-f]+", "", "\n".join(map("".join, texts))))


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_of_the_gallery_shows_what_it_gives(execute, path, tmp_path):
    saved, fresh = nbformat.read(path, as_version=4), execute.executed(path, str(tmp_path))
    assert [kinds(cell) for cell in saved.cells] == [kinds(cell) for cell in fresh.cells]
    for old, new in zip(saved.cells, fresh.cells, strict=True):
        assert sorted(words(old).splitlines()) == sorted(words(new).splitlines())
    shown = [kind for cell in fresh.cells for output in kinds(cell) for kind in output]
    assert "text/html" in shown


def run_cells(cells: list[str], folder: Path) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook


def test_a_kernel_shows_figures_without_magic_and_the_explorer_in_a_frame(recorded, tmp_path):
    setup = (
        "import torch, dualform; from dualform.models import MLP\n"
        f"memory, model = dualform.open({str(recorded.path)!r}), MLP(16, 8, 3); x = torch.rand(3, 16)\n"
        "spot = memory.attend(model, x); hits = spot.top(3, per='visit')"
    )
    cells = [
        setup, "dualform.plot.spotlight(hits)", "hits", "explorer = dualform.explore(memory, model, x); explorer",
        "from urllib.request import Request, urlopen; page, token = explorer.address.split('?token=')\n"
        "print(urlopen(Request(page + 'run', headers={'Authorization': f'Bearer {token}'})).status)",
        "explorer.close(); explorer",
    ]  # fmt: skip
    shown = run_cells(cells, tmp_path).cells
    figure, answer, frame, status, closed = (cell.outputs[0] for cell in shown[1:])
    assert figure.data["image/png"].startswith("iVBOR")
    assert "<table" in answer.data["text/html"] and "The 3 visits" in answer.data["text/plain"]
    assert "<iframe" in frame.data["text/html"] and len(shown[3].outputs) == 1  # nothing is printed beside the frame
    assert status.text.strip() == "200" and "closed" in closed.data["text/html"]


MARIMO = """
import marimo
app = marimo.App()

@app.cell
def _():
    import torch, dualform
    from dualform.models import MLP
    memory, model, x = dualform.open({path!r}), MLP(16, 8, 3), torch.rand(3, 16)
    spot = memory.attend(model, x)
    return dualform, memory, model, spot, x

{cells}

@app.cell
def _(dualform, memory, model, x):
    explorer = dualform.explore(memory, model, x)
    explorer
    return

if __name__ == "__main__":
    app.run()
"""

ANSWERS = ["spot", "spot.top(2)", "spot.by('label')", "spot.timeline('label')", "memory", "memory.certificate",
           "memory.ledger('label')"]  # fmt: skip


def test_marimo_shows_every_answer_and_the_explorer(recorded, tmp_path):
    pytest.importorskip("marimo", reason="marimo is not installed: make gallery")
    cells = "\n".join(f"@app.cell\ndef _(memory, spot):\n    {answer}\n    return\n" for answer in ANSWERS)
    (tmp_path / "book.py").write_text(MARIMO.format(path=str(recorded.path), cells=cells), encoding="utf-8")
    command = [sys.executable, "-m", "marimo", "export", "ipynb", "book.py", "--include-outputs", "-o", "book.ipynb"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    shown = json.dumps(json.loads((tmp_path / "book.ipynb").read_text(encoding="utf-8")))
    for part in ("Spotlight on 3 inputs", "The 2 examples", "adds to", "over training", "Certificate at", "Ledger at"):
        assert part in shown, part
    assert "<iframe" in shown and "The explorer is at" not in shown
