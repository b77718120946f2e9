"""examples/t4_colab.ipynb is what tests/gpu/test_notebook.py runs: plain Python, no output kept."""

from __future__ import annotations

import ast
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "t4_colab.ipynb"


def test_cells_are_plain_python_without_output():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["metadata"]["accelerator"]) == (4, "GPU")
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "a number belongs to the GPU that measured it"
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))  # no magics: what is tested is what Colab runs


def test_its_commands_exist():
    from nf4_patch.tools.cli import VERBS

    text = NOTEBOOK.read_text()
    for verb in ("doctor", "verify", "inspect", "bench"):
        assert verb in VERBS
        assert f'\\"{verb}\\"' in text
