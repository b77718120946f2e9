"""``import_order.py enabled-first|enabled-last``: functions that any module imported by name are patched too."""

import sys

import nf4_patch

if enabled_first := sys.argv[1] == "enabled-first":
    nf4_patch.enable(matmul="auto")
from bitsandbytes.functional import dequantize_4bit, gemv_4bit

if not enabled_first:
    nf4_patch.enable(matmul="auto")

import nf4_patch
import torch
import bitsandbytes.functional as F

packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
got = F.dequantize_4bit(packed, state)
assert torch.equal(dequantize_4bit(packed, state), got)
assert nf4_patch.status().hits == 2, nf4_patch.status()
assert gemv_4bit is F.gemv_4bit and hasattr(gemv_4bit, "__wrapped__")
nf4_patch.disable()
assert not any(hasattr(function, "__wrapped__") for function in (F.dequantize_4bit, F.gemv_4bit))
if not enabled_first:
    assert not hasattr(dequantize_4bit, "__wrapped__") and not hasattr(gemv_4bit, "__wrapped__")
assert torch.equal(got, F.dequantize_4bit(packed, state))
nf4_patch.enable()
F.dequantize_4bit(packed, state)
assert nf4_patch.status().hits == 3, nf4_patch.status()
