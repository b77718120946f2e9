"""Random and malformed states on the GPU: kernel or named fallback, the original's bits, nothing written outside.

`python scripts/check_kernel.py fuzz 40000 --seed 1` is the same with more cases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz import FAULTS, draw, fuzz, random_state

from nf4_patch.nf4.matmul.tuning import SMALL_M_ROWS

pytestmark = pytest.mark.gpu
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.parametrize("blocksize", [32, 64])
def test_random_states(blocksize):
    report = fuzz(2000, seed=1, blocksizes=(blocksize,))
    assert not report.mismatches, report.mismatches[:5]
    assert not report.out_of_bounds, report.out_of_bounds[:5]
    assert report.hits > 1500
    assert {name.split(":")[0] for name in report.faults} == set(FAULTS)


# The formula is the oracle: bitsandbytes' own kernel (0.50.2) fails memcheck on partial last blocks.
DEQUANTIZE = """
from fuzz import fuzz
report = fuzz(60, 7, blocksizes=(64,), oracle="formula")
assert report.hits and not report.exit_code
"""
# Quantized on the CPU for the same reason.
FUSED = """
import torch
from fused_matmul import one_hot
from oracle import layout_of, quantized
from nf4_patch.nf4.matmul import launch as matmul
from nf4_patch.nf4.matmul.tuning import HOPPER_ROWS, SMALL_M_ROWS
from nf4_patch.nf4.dequantize import reference

def check(n, k, m, nested, configs):
    layout = layout_of(*quantized((n, k), torch.bfloat16, "cpu", nested=nested))
    layout = layout._replace(**{name: t.cuda() for name, t in layout._asdict().items() if isinstance(t, torch.Tensor)})
    columns = torch.randint(0, k, (m,), device="cuda")
    x, want = one_hot(columns, k, torch.bfloat16), reference.dequantize(layout)[:, columns].t()
    for config in configs:
        assert torch.equal(matmul.matmul_4bit(x, layout, config=config), want)
"""
# Tails of N and K, every row of the table, slices of K.
SMALL_M = f"""{FUSED}
here = torch.cuda.get_device_capability()
for n, k in ((250, 320), (4003, 4416), (1003, 4096), (12003, 320)):
    for m in (1, 9, 17, 64):
        config = matmul.config_for(here, m, n, k) or next(row.config for row in SMALL_M_ROWS if row.max_m >= m)
        check(n, k, m, n != 250, [config])
"""
# Tails of M and N, one tile a CTA, several, and a tile in chunks.
HOPPER = f"""{FUSED}
for n, k, m in ((264, 512, 300), (136, 4096, 70), (8200, 64, 600)):
    check(n, k, m, n != 136, {{row.config for row in HOPPER_ROWS}})
"""


@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="the CUDA toolkit's compute-sanitizer is not on this machine")
@pytest.mark.parametrize(
    ("code", "tool"),
    [
        pytest.param(code, tool, id=f"{name}-{tool}")
        for name, code, tools in (
            ("dequantize", DEQUANTIZE, ("memcheck", "racecheck")),
            ("small_m", SMALL_M, ("memcheck", "racecheck")),
            ("hopper", HOPPER, ("memcheck",)),  # racecheck does not follow TMA and wgmma
        )
        for tool in tools
    ],
)
def test_compute_sanitizer(code, tool):
    """With PyTorch's caching allocator off: inside its blocks nothing is out of bounds."""
    if code is not DEQUANTIZE and torch.cuda.get_device_capability() not in {row.capability for row in SMALL_M_ROWS}:
        pytest.skip("no row of the fused matmul's table is for this GPU")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code],
        capture_output=True, text=True, cwd=root,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "0 errors" in done.stdout.replace("0 hazards displayed (0 errors", "0 errors")


def test_a_failure_can_be_repeated_from_its_seed_and_number():
    case = draw(5, 17, "cuda")
    assert case == draw(5, 17, "cuda")
    a, b = random_state(case, 5, torch.device("cuda", 0)), random_state(case, 5, torch.device("cuda", 0))
    assert torch.equal(a[0].contiguous().view(torch.uint8), b[0].contiguous().view(torch.uint8))
