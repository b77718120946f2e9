"""The recorded runs of the release matrix passed, one of its cells runs here, and the wheel works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nf4_patch.patching.targets import TARGETS
from nf4_patch.tools.report import DISTRIBUTIONS
from scripts import release_matrix as matrix

ROOT = Path(__file__).parents[2]
ROWS = json.loads(matrix.RECORD.read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['cell']} on {row['place']}")
def test_every_row_passed(row):
    """Older rows hold counts of states and calls. All of their results were bit-identical."""
    assert re.match(r"\d+ tests passed|\d+ states, \d+ calls: equal", row["result"])
    assert not re.search(r"FAILED|DIFFERENT", row["result"])
    assert "tests" not in row or "refused" not in row["targets"].values()


RECORDED = [t for t in TARGETS if not t.option and not t.uncounted]


@pytest.mark.parametrize("target", RECORDED, ids=lambda t: t.name)
def test_what_a_target_calls_tested_was_run(target):
    ran = {
        row["releases"].get(target.library) for row in ROWS if row["targets"].get(target.name) in ("patched", "wrapped")
    }
    assert set(target.tested) <= ran


def test_every_python_of_the_classifiers_has_a_session():
    claimed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    (sessions,) = re.findall(r"PYTHONS = .*(\(.*\))", (ROOT / "noxfile.py").read_text())
    (runs,) = re.findall(r"python: (\[.*?\])", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert claimed == re.findall(r"3\.\d+", sessions) == re.findall(r"3\.\d+", runs)


def test_the_lower_bounds_of_pyproject_were_run():
    """This covers the libraries that a cell can put before the installed releases. torch and triton have a separate row."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    ran = dict(package.split("==") for package in matrix.CELLS["lowest"].packages)
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *extras["bench"]):
        name, _, bound = requirement.partition(";")[0].partition(">=")
        if name not in ("torch", "triton"):
            assert (ran[name] + ".").startswith(bound + "."), requirement
    rows = [row for row in ROWS if row["cell"] in ("lowest", "torch 2.6.0 (lowest)")]
    assert len(rows) == 2
    for row in rows:
        assert row.get("commands") or set(matrix.EXAMPLES) <= set(row["tests"])
        assert {name: row["releases"].get(name, "") for name in ran if name in DISTRIBUTIONS}.items() <= ran.items()
    assert rows[1]["releases"]["torch"].startswith("2.6.0")


@pytest.mark.full
def test_the_installed_releases_go_together():
    """No package here forbids the release of another.

    Some of Unsloth's dependencies are missing, for which pip prints another message.
    """
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert not [line for line in done.stdout.splitlines() if " but you have " in line]


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine records rows of its own")
def test_a_cell_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "CACHE", tmp_path)
    monkeypatch.setitem(matrix.CELLS, "wrapt 1.16.0", matrix.Cell(("wrapt==1.16.0",), matrix.EVERY))
    row = matrix.run("wrapt 1.16.0")
    if "pip" in row["result"]:
        pytest.skip("no package index")
    assert re.match(r"[1-9]\d* tests passed, 1 skipped", row["result"]) and "FAILED" not in row["result"]
    assert row["releases"]["wrapt"] == "1.16.0" and row["place"] == matrix.CPU
    assert row["targets"]["bitsandbytes.functional.dequantize_4bit"] == "patched"


@pytest.mark.full
def test_a_test_that_fails_is_named_in_its_row(tmp_path, monkeypatch):
    file = tmp_path / "test_one.py"
    file.write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    monkeypatch.setitem(matrix.CELLS, "installed", matrix.Cell((), (f"{file}",)))
    assert matrix.run("installed")["result"] == "1 tests passed; FAILED: test_bad"


@pytest.mark.full
def test_wheel_works_in_an_empty_environment():
    """Build the wheel, and try it without this checkout: import, doctor, and a weight in the kernel."""
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([ROOT / "scripts" / "wheel", "--light"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "one weight, bit-identical" in done.stdout and done.stdout.strip().endswith(".whl")
