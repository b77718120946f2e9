"""The patch in the real Unsloth, on both sides of 2026.9.13: order, numbers, hits. No GPU is needed.

The kernels run under the interpreter, and Unsloth's own CUDA launches are not reached: what they would have
computed is bitsandbytes' CPU result.
"""

from __future__ import annotations

import pytest
import torch
from unsloth_releases import RELEASES, with_unsloth

TARGET = {
    "2026.10.9": "unsloth.kernels.utils._fast_dequantize_bnb",
    "2026.9.7": "unsloth.kernels.utils.fast_dequantize",
}
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the GPU has tests of its own: gpu/test_example_runs.py"
)
ORDERS = ["first", *(pytest.param(order, marks=pytest.mark.full) for order in ("last", "between"))]


@RELEASES
@pytest.mark.parametrize("order", ORDERS)
def test_unsloth(release, order, tmp_path):
    assert "state patched" in with_unsloth(release, tmp_path, "unsloth_dequantize", TARGET[release], order)
