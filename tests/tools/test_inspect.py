"""``nf4-patch inspect``: counts from the machine code, for an architecture that need not be here."""

from __future__ import annotations

import json

import pytest
from subprocess_python import command
from test_machine_code import BUDGET


def test_counts_beside_bitsandbytes(tmp_path):
    """In a process of its own: the kernels may be under the interpreter here."""
    file = tmp_path / "report.json"
    done = command("inspect", "--json", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sm_75") == 6
    rows = {(row["dtype"], row["kernel"]): row for row in json.loads(file.read_text())["kernels"]}
    assert len(rows) == 6
    for dtype, budget in BUDGET.items():
        ours, theirs = rows[dtype, "nf4_patch"], rows[dtype, "bitsandbytes"]
        assert 5 < ours["instructions"] <= budget
        assert theirs["instructions"] > 2 * ours["instructions"]
        assert ours["registers"] <= 64 and ours["spills"] == 0


@pytest.mark.parametrize(
    ("arch", "found", "allowed"),
    [("volta", "'volta' is not an architecture", "sm_75, 75 or 7.5"),
     ("sm_70", "sm_70 is not supported", "sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120")],
)  # fmt: skip
def test_an_architecture_that_is_not_known_is_named_with_those_that_are(arch, found, allowed):
    done = command("inspect", "--arch", arch)
    assert done.returncode == 1
    assert found in done.stderr and allowed in done.stderr and "Traceback" not in done.stderr
