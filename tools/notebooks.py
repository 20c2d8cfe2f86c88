"""Run the notebooks of `examples/notebooks` and store their outputs: python tools/notebooks.py [NAME ...].

Pictures are stored as JPEG only. The notebooks run in an empty folder, which is removed afterwards.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def execute(path: Path, folder: str) -> nbformat.NotebookNode:
    """Return the notebook at `path` with the outputs of a new kernel that works in `folder`."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/jpeg" in data:
                data.pop("image/png", None)
                data.pop("text/plain", None)
    return notebook


def main() -> None:
    """Run the named notebooks, or all."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(execute(path, folder), path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
