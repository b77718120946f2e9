"""The patch and its cache in the real Unsloth, before and after 2026.9.13, and under FSDP2. Each case has its own process.

The kernels are interpreted. Unsloth's own CUDA launches are not reached, so bitsandbytes' CPU result stands for their
results.
"""

from __future__ import annotations

import pytest
import torch
from subprocess_python import program
from unsloth_releases import RELEASES, with_unsloth

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="gpu/test_cache_gpu.py and gpu/test_example_runs.py train on the GPU"
)
TARGET = {
    "2026.10.9": "unsloth.kernels.utils._fast_dequantize_bnb",
    "2026.9.7": "unsloth.kernels.utils.fast_dequantize",
}


@pytest.mark.full
def test_fsdp2():
    assert "REFILLED" in program("cached_fsdp2", interpreted=True).stdout


@pytest.mark.full
@RELEASES
@pytest.mark.parametrize("order", ["first", "last", "between"])
def test_unsloth(release, order, tmp_path):
    said = with_unsloth(release, tmp_path, "unsloth_eager", TARGET[release], order).split("\n")
    assert said[-3:] == ["state patched", "cached", ""]


@pytest.mark.full
def test_unsloth_without_a_gpu(tmp_path):
    """test_faults.py has the same test for the other libraries."""
    with_unsloth("2026.10.9", tmp_path, "without_gpu", tmp_path / "model", "unsloth", interpreted=False)
