"""Random and malformed states on the GPU end in the kernel or in a named fallback, with the original's bits and no
write outside the result.

``python scripts/check_kernel.py fuzz 40000 --seed 1`` does the same with more cases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_matmul import measured
from fuzz import FAULTS, fuzz, fuzz_products

from nf4_patch.matmul.tuning import SMALL_M_ROWS

pytestmark = pytest.mark.gpu
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.parametrize("blocksize", [32, 64])
def test_random_states(blocksize):
    report = fuzz(2000, seed=1, blocksizes=(blocksize,))
    assert not report.mismatches, report.mismatches[:5]
    assert not report.out_of_bounds, report.out_of_bounds[:5]
    assert report.hits > 1200
    assert len(report.faults) > len(FAULTS) / 2  # tools/test_fuzz.py tries each


@measured
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fused_matmul_refuses_no_state_that_the_dequantization_runs(dtype, nested):
    """Try 5,000 states in all, with every blocksize and K from 16 upwards, for sizes in the table.

    Only packed weights that are not 16-byte aligned are refused.
    """
    ended = fuzz_products(1250, 1, dtype, nested)
    assert ended["hits"] >= 800 and set(ended) <= {"hits", "NOT_FASTER", "unaligned"}, ended


@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="the CUDA toolkit's compute-sanitizer is not on this machine")
@pytest.mark.parametrize(
    ("what", "tool"),
    [
        ("dequantize", "memcheck"),
        ("dequantize", "racecheck"),
        ("small_m", "memcheck"),
        ("small_m", "racecheck"),
    ],
)
def test_compute_sanitizer(what, tool):
    """Turn PyTorch's caching allocator off, because inside its blocks no access would be out of bounds."""
    if what != "dequantize" and torch.cuda.get_device_capability() not in {row.capability for row in SMALL_M_ROWS}:
        pytest.skip("no row of the fused matmul's table is for this GPU")
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests.parent), str(tests / "support"), os.environ.get("PYTHONPATH", "")])
    watched = [sys.executable, str(tests / "programs" / "sanitized.py"), what]
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", *watched],
        capture_output=True,
        text=True,
        cwd=tests.parent,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "0 errors" in done.stdout.replace("0 hazards displayed (0 errors", "0 errors")
