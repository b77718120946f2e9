"""The machine code of every variant, for every GPU, with every Triton that matters. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import machine_code
import pytest
import torch
import triton
from subprocess_python import script, support

from nf4_patch.tools.report import why_no_gpu

# The lowest release that is supported, Colab's, and the newest.
RELEASES = ("3.2.0", "3.6.0", "3.9.0")
CACHE = Path(os.environ.get("NF4_TEST_TRITONS", Path.home() / ".cache" / "nf4_patch" / "triton"))


def release_of(name: str) -> Path | None:
    """Return the folder of a Triton release, which is downloaded from PyPI at first. None stands for the installed release."""
    if name in ("installed", triton.__version__):
        return None
    folder = CACHE / name
    if not (folder / "triton" / "__init__.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        done = subprocess.run([*pip, "--target", str(folder), f"triton=={name}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot fetch triton {name} here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module", params=["installed", "installed, every variant", *RELEASES])
def compiled(request):
    release, _, every = request.param.partition(", ")
    folder = release_of(release)
    other = {} if folder is None else {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    result = json.loads(support("compile_matrix", "full" if every else "main", **other)[-1])
    assert result["triton"] == (triton.__version__ if release == "installed" else release)
    return result


@pytest.mark.full
def test_every_gpu_is_compiled_for(compiled):
    release = tuple(map(int, compiled["triton"].split(".")[:2]))
    too_new = {machine_code.sm(c) for c, first in machine_code.FIRST_TRITON.items() if release < first}
    assert {arch for arch, _ in compiled["unsupported"]} == too_new
    assert {row["arch"] for row in compiled["rows"]} == {*map(machine_code.sm, machine_code.CAPABILITIES)} - too_new
    assert all(row["target"].startswith(f"sm_{row['arch']}") for row in compiled["rows"])


@pytest.mark.full
def test_registers_only(compiled):
    """No register spills, and nothing uses shared memory, as a layout conversion would."""
    for row in compiled["rows"]:
        assert row["stack"] == row["shared"] == 0, row
        assert row["registers"] <= 64, row  # 64: 1024 lanes still fit on a T4's SM


@pytest.mark.full
def test_packed_loads_are_wide(compiled):
    """Each step loads packed words of 32 bits with evict-first."""
    for row in compiled["rows"]:
        packed = [load.split(".") for load in row["loads"] if ".EF" in load]
        assert len(packed) == row["steps"], row
        assert not {"U8", "S8", "U16", "S16", "64", "128"}.intersection(*map(set, packed)), row


@pytest.mark.full
def test_no_fused_multiply_add(compiled):
    """The scale is rounded twice, after code2[absmax] * absmax2 and after + offset. A fused multiply-add would change bits."""
    for row in compiled["rows"]:
        assert "FFMA" not in row["names"] and row["ptx_fma"] == 0, row
        scales = row["steps"] + row["tail"] if row["nested"] else 0
        assert row["fadd"] == scales, row


# scripts/check_kernel.py: random states, and the code of an older GPU

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_kernel.py"


@pytest.mark.gpu
def test_random_states_are_repeated_by_their_seed(tmp_path):
    file = tmp_path / "report.json"
    done = script(SCRIPT, "fuzz", 3, "--seed", 1, "--json", file, check=False)
    assert done.returncode == 0, done.stderr
    assert "mismatches: 0, out of bounds: 0" in done.stdout and "3 cases of seed 1" in done.stdout
    report = json.loads(file.read_text())
    assert (report["cases"], report["hits"]) == (3, 3)


REFUSED = [  # the words, the exit code, what stderr says
    (("fuzz", 1, "--seed", "9" * 20), 2, ("'--seed': 99999999999999999999 is not in the range",)),
    (("older-gpu", "volta"), 1, ("'volta' is not an architecture", "sm_75, 75 or 7.5")),
    (("older-gpu", "sm_70"), 1, ("sm_70: the kernel begins at sm_75",)),
    *[
        (("older-gpu", "sm_75"), 1, ("PTX needs an NVIDIA GPU to run on",)),
        (("fuzz", 1), 1, (why_no_gpu(),)),
    ] * (not torch.cuda.is_available()),
]  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_what_cannot_be_done_is_said(words, code, said):
    done = script(SCRIPT, *words, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in said), done.stderr
