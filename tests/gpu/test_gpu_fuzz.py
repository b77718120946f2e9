"""Random and malformed states on the GPU: kernel or named fallback, the original's bits, nothing written outside.

`nf4-patch verify --fuzz 40000 --seed 1` is the same with more cases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nf4_patch.tools.fuzz import FAULTS, fuzz

pytestmark = pytest.mark.gpu
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.parametrize("blocksize", [32, 64])
def test_random_states(blocksize):
    report = fuzz(2000, seed=1, blocksizes=(blocksize,))
    assert not report.mismatches, report.mismatches[:5]
    assert not report.out_of_bounds, report.out_of_bounds[:5]
    assert report.hits > 1500
    assert {name.split(":")[0] for name in report.faults} == set(FAULTS)


@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="the CUDA toolkit's compute-sanitizer is not on this machine")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool, tmp_path):
    """With PyTorch's caching allocator off: inside its blocks nothing is out of bounds.

    The formula is the oracle: bitsandbytes' own kernel (0.50.2) fails memcheck on partial last blocks.
    """
    code = "from nf4_patch.tools.fuzz import fuzz; r = fuzz(60, 7, blocksizes=(64,), oracle='formula'); assert r.hits and not r.exit_code"
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "0 errors" in done.stdout.replace("0 hazards displayed (0 errors", "0 errors")


def test_a_failure_can_be_repeated_from_its_seed_and_number():
    from nf4_patch.tools.fuzz import draw, make

    case = draw(5, 17, "cuda")
    assert case == draw(5, 17, "cuda")
    a, b = make(case, 5, torch.device("cuda", 0)), make(case, 5, torch.device("cuda", 0))
    assert torch.equal(a[0].contiguous().view(torch.uint8), b[0].contiguous().view(torch.uint8))
