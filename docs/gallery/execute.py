"""Run the notebooks of the gallery and keep what they show: ``make gallery``."""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def executed(path: Path, folder: str) -> nbformat.NotebookNode:
    """A notebook with fresh outputs, run in a folder; what a cell raises is raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}  # the version of Python is not part of the page
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the day
    return notebook


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, folder), path)
        print(path.name)
