"""scripts/check_kernel.py: one command each for random states, an older GPU's code, and counts from machine code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from subprocess_python import script
from test_machine_code import BUDGET

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_kernel.py"


def test_random_states_are_repeated_by_their_seed(tmp_path):
    file = tmp_path / "report.json"
    done = script(SCRIPT, "fuzz", 3, "--seed", 1, "--json", file, check=False)
    assert done.returncode == 0, done.stderr
    assert "mismatches: 0, out of bounds: 0" in done.stdout and "3 cases of seed 1" in done.stdout
    report = json.loads(file.read_text())
    assert (report["cases"], report["hits"]) == (3, 3)
    assert report["elements"] == 20_520 or torch.cuda.is_available()  # where larger ones are drawn


def test_counts_next_to_bitsandbytes(tmp_path):
    file = tmp_path / "report.json"
    done = script(SCRIPT, "instructions", "--json", file)
    assert done.stdout.count("sm_75") == 6
    rows = {(row["dtype"], row["kernel"]): row for row in json.loads(file.read_text())["kernels"]}
    assert len(rows) == 6
    for dtype, budget in BUDGET.items():
        ours, theirs = rows[dtype, "nf4_patch"], rows[dtype, "bitsandbytes"]
        assert 5 < ours["instructions"] <= budget
        assert theirs["instructions"] > 2 * ours["instructions"]
        assert ours["registers"] <= 64 and ours["spills"] == 0


GPU = torch.cuda.is_available()
REFUSED = [  # the words, the exit code, what stderr says
    (("fuzz", 1, "--seed", "9" * 20), 2, ("'--seed': 99999999999999999999 is not in the range",)),
    (("instructions", "--arch", "volta"), 1, ("'volta' is not an architecture", "sm_75, 75 or 7.5")),
    (("instructions", "--arch", "sm_70"), 1, ("sm_70 is not supported", "sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120")),
    *[(("older-gpu", "sm_75"), 1, ("PTX needs an NVIDIA GPU to run on",))] * (not GPU),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_what_cannot_be_done_is_said(words, code, said):
    done = script(SCRIPT, *words, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in said), done.stderr
