"""Executes the notebook and writes it with its outputs: `python notebooks/execute.py [--output FILE]`.

NOTEBOOK_STEPS in the environment sets the steps of its training. Needs nbformat, nbclient and ipykernel, which the
extra `test` installs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("transformer_from_the_paper.ipynb")
ROOT = NOTEBOOK.parents[1]


def execute(notebook: Path = NOTEBOOK, timeout: int = 1800, **environment: str) -> Any:
    """The notebook with the outputs of a run in a fresh kernel, which imports the package of this checkout. A cell
    that fails, or takes longer than `timeout` seconds, raises an error of nbclient that shows it."""
    node: Any = nbformat.read(notebook, as_version=4)
    options: dict[str, Any] = {"kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    client = NotebookClient(node, timeout=timeout, startup_timeout=timeout, **options)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client.execute(env={**os.environ, "PYTHONPATH": path, **environment})
    return node


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the notebook and write it with its outputs.")
    parser.add_argument("--output", type=Path, default=NOTEBOOK, help="where to write it (in its place)")
    options = parser.parse_args()
    nbformat.write(execute(), options.output)


if __name__ == "__main__":
    main()
