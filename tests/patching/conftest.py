"""Fixtures for the tests of the replacements."""

from __future__ import annotations

import pytest
import torch

import nf4_patch
from nf4_patch.moe import launch
from nf4_patch.nf4.dequantize import reference
from nf4_patch.patching.quant_state import linear_weight


@pytest.fixture(autouse=True)
def experts_in_pytorch(monkeypatch):
    """Run the experts in PyTorch, with the bits of transformers' forward.

    test_experts_forward.py runs the kernels. Interpreted kernels take a second for the rows of a hundred tokens.
    """
    monkeypatch.setattr(launch, "supports", lambda tensor: False)


@pytest.fixture
def linear_op(device, monkeypatch):
    """Let bitsandbytes 0.50's forward run on the CPU as it runs on a GPU."""
    if device.type == "cpu":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    import bitsandbytes.backends.cuda.ops as cuda_ops

    def gemm_4bit(A, B, shapeB, absmax, blocksize, quant_type, bias=None, *second):
        if nf4_patch.is_enabled():
            return cuda_ops._dequant_linear_fallback(A, B, shapeB, absmax, blocksize, quant_type, bias, *second)
        weight = linear_weight(A.dtype, B, shapeB, absmax, blocksize, quant_type, *(second or (None,) * 3))
        return torch.nn.functional.linear(A, reference.dense(weight), bias)

    with torch.library._scoped_library("bitsandbytes", "IMPL") as library:
        if device.type == "cpu":
            library.impl("gemm_4bit", gemm_4bit, "CPU")
        yield device
        nf4_patch.disable()
