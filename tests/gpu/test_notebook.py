"""examples/t4_colab.ipynb from its first cell to its last, on the GPU at hand.

The cells are plain Python and run in one namespace, in order, as a kernel would run them; no Jupyter is needed. The
first one finds everything installed and asks for nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "t4_colab.ipynb").read_text())


@pytest.mark.gpu
@pytest.mark.slow
def test_from_the_first_cell_to_the_last(tmp_path, monkeypatch):
    monkeypatch.setenv("NF4_NOTEBOOK_RESULTS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    report = (tmp_path / "report.txt").read_text()
    assert namespace["problems"] == []
    assert "none differs" in report
    assert "differ from" not in report and "bits differ" not in report
    assert "same losses and adapter: True" in report
    assert (tmp_path / "t4.png").stat().st_size > 10_000
    on, off = namespace["on"], namespace["off"]
    assert on["losses"] == off["losses"] and len(on["losses"]) == 10
    assert {row["unit"] for row in namespace["measured"]} == {"us"}
