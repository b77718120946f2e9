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


def test_a_seed_that_no_generator_takes_is_refused():
    done = script(SCRIPT, "fuzz", 1, "--seed", "9" * 20, check=False)
    assert done.returncode == 2 and "'--seed': 99999999999999999999 is not in the range" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine with no GPU")
def test_an_older_gpu_needs_a_newer_one():
    done = script(SCRIPT, "older-gpu", "sm_75", check=False)
    assert done.returncode == 1 and "PTX needs an NVIDIA GPU to run on" in done.stderr


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


@pytest.mark.parametrize(
    ("arch", "found", "allowed"),
    [
        ("volta", "'volta' is not an architecture", "sm_75, 75 or 7.5"),
        ("sm_70", "sm_70 is not supported", "sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
    ],
)
def test_an_architecture_that_is_not_known_is_named_with_those_that_are(arch, found, allowed):
    done = script(SCRIPT, "instructions", "--arch", arch, check=False)
    assert done.returncode == 1
    assert found in done.stderr and allowed in done.stderr and "Traceback" not in done.stderr
