"""The patch and its cache in the real Unsloth, on both sides of 2026.9.13, and under FSDP2, each in a process of its own.

The kernels run under the interpreter, and Unsloth's own CUDA launches are not reached: what they would have
computed is bitsandbytes' CPU result.
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
ORDERS = ["first", *(pytest.param(order, marks=pytest.mark.full) for order in ("last", "between"))]
# unsloth_zoo wraps dequantize_4bit: over ours, or beneath it
ZOO = {"first": "before", "last": "after", "between": "before"}


def test_fsdp2():
    assert "REFILLED" in program("cached_fsdp2", interpreted=True).stdout


@RELEASES
@pytest.mark.parametrize("order", ORDERS)
def test_unsloth(release, order, tmp_path):
    """Three programs in one process: an import of Unsloth takes longer than what they try."""
    programs = {f"unsloth_dequantize {TARGET[release]} {order}": "state patched", "cached_unsloth": "cached"}
    if release == "2026.10.9":
        programs[f"unsloth_zoo_wrapper {ZOO[order]}"] = "wrapper"
    said = with_unsloth(release, tmp_path, "in_turn", *programs).split("\n")
    assert [line for line in said if line in programs.values()] == [*programs.values()]
