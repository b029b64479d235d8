"""The notebook runs from its first cell to its last, with a training of a few steps, and says what it should."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import load_program

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "transformer_from_the_paper.ipynb"
LARGEST = 300_000  # bytes, with its outputs


def execute(**environment: str) -> Any:
    for needed in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(needed)
    return load_program(ROOT / "notebooks" / "execute.py").execute(**environment)


def printed(cell: Any) -> str:
    """What a cell has written to standard output, and its last value."""
    texts = [output.get("text", "") for output in cell.outputs if output.get("name") == "stdout"]
    return "".join(texts + [output.data.get("text/plain", "") for output in cell.outputs if "data" in output])


def test_it_runs_and_its_blocks_are_the_packages() -> None:
    cells = [cell for cell in execute(NOTEBOOK_STEPS="3", JAX_PLATFORMS="cpu").cells if cell.cell_type == "code"]
    text = "\n".join(map(printed, cells))
    differences = [float(x) for x in re.findall(r"largest difference ([\d.e-]+)", text)]
    assert len(differences) == 3  # positions, attention, several heads
    assert max(differences) < 1e-6
    assert re.search(r"all +930,944", text)
    assert "2,000 days that it has never seen are right" in text
    assert "layer 2 head 4" in text
    assert "2021-02-30  ->" in text
    pictures = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 6  # positions, masks, loss, rate, curves, maps


def test_it_is_small_and_holds_the_outputs_of_one_run_in_order() -> None:
    assert NOTEBOOK.stat().st_size < LARGEST
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert "tmp" not in "".join("".join(output.get("text", "")) for output in outputs)  # a folder of one machine
