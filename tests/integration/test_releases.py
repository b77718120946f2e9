"""The release matrix: what was recorded is equal to the bit, and a light selection of its cells runs here; and the wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from subprocess_python import program

from nf4_patch.patching.targets import TARGETS
from nf4_patch.tools.report import DISTRIBUTIONS
from scripts import release_matrix as matrix

ROOT = Path(__file__).parents[2]
ROWS = json.loads(matrix.RECORD.read_text())


@pytest.mark.parametrize("row", [r for r in ROWS if "error" not in r], ids=lambda r: f"{r['cell']} on {r['place']}")
def test_every_row_that_ran_is_equal_to_the_bit(row):
    assert not matrix.failed(row)


RECORDED = [t for t in TARGETS if not t.only and not t.uncounted]


@pytest.mark.parametrize("target", RECORDED, ids=lambda t: t.name)
def test_what_a_target_calls_tested_was_run(target):
    ran = {
        row["releases"].get(target.library)
        for row in ROWS
        if "error" not in row and row["targets"].get(target.name) in ("patched", "wrapped")
    }
    assert set(target.tested) <= ran


def test_the_lower_bounds_of_pyproject_were_run():
    """Those of what a cell can put before the installed releases; torch and triton have a row of their own."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    (cell,) = (cell for cell in matrix.CELLS if cell.name == "lowest")
    ran = dict(package.split("==") for package in cell.packages)
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *extras["bench"]):
        name, _, bound = requirement.partition(";")[0].partition(">=")
        if name not in ("torch", "triton"):
            assert (ran[name] + ".").startswith(bound + "."), requirement
    rows = [row for row in ROWS if row["cell"] in ("lowest", "torch 2.6.0 (lowest)")]
    assert len(rows) == 2
    for row in rows:
        assert set(row["commands"]) == set(matrix.COMMANDS)
        assert {name: row["releases"].get(name, "") for name in ran if name in DISTRIBUTIONS}.items() <= ran.items()
    assert rows[1]["releases"]["torch"].startswith("2.6.0")


def test_a_garbage_collection_leaves_the_cached_weights(device):
    """Under every release of torch (nox -s torch): a cached weight belongs to a parameter that lives."""
    got = matrix.cached_step(device)
    assert got["equal"] and got["held"] == 1
    assert got["kept"] == 1
    assert got["hits"] >= 1


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine records rows of its own")
@pytest.mark.parametrize("name", ["installed", "wrapt 1.16.0"])
def test_light_selection(name, tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "CACHE", tmp_path)
    row = matrix.run(next(cell for cell in matrix.CELLS if cell.name == name))
    if row.get("error", "").startswith("pip"):
        pytest.skip("no package index")
    assert not matrix.failed(row), row
    if name != "installed":
        assert row["releases"]["wrapt"] == "1.16.0"


FULL = [pytest.param(change, "", marks=pytest.mark.full) for change in ("2051", "2049")]


@pytest.mark.parametrize(("change", "mode"), [("2035", ""), ("2035", "compiled"), *FULL])
def test_releases_to_come(change, mode):
    """Changes that pull requests of bitsandbytes make: the replacement serves."""
    program("releases_to_come", change, *mode.split(), interpreted=not torch.cuda.is_available())


@pytest.mark.full
def test_wheel_works_in_an_empty_environment():
    """Built and tried with nothing of this checkout: import, doctor, verify."""
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([ROOT / "scripts" / "wheel", "--light"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "none differs" in done.stdout and done.stdout.strip().endswith(".whl")
