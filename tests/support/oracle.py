"""bitsandbytes as the oracle, and the states to compare."""

from __future__ import annotations

import bitsandbytes.functional as F
import torch

from nf4_patch.nf4.weight import PackedWeight
from nf4_patch.patching import quant_state
from nf4_patch.tools import cases
from nf4_patch.tools.cases import Case

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def expected(packed: torch.Tensor, state: F.QuantState) -> torch.Tensor:
    """Return the weight as bitsandbytes dequantizes it.

    On the CPU, pass bitsandbytes a flat shape. Otherwise 0.50.2 starts a new block at every row if the row length is
    even and no multiple of the blocksize. Its CUDA library does not.
    """
    if packed.is_cuda:
        return F.dequantize_4bit(packed, state)
    shape = state.shape
    state.shape = torch.Size((shape.numel(),))
    try:
        weight = F.dequantize_4bit(packed.reshape(-1, 1), state).reshape(shape)
    finally:
        state.shape = shape
    return weight.t() if packed.shape[0] == 1 else weight


def layout_of(packed: torch.Tensor, state: F.QuantState) -> PackedWeight:
    weight: PackedWeight = quant_state.weight_of(packed, state)
    return weight


def quantized(shape, dtype, device, blocksize=64, nested=True, quant_type="nf4", storage=torch.uint8, seed=0):
    """Return a random weight with values as in a transformer, quantized by bitsandbytes."""
    return cases.quantized(Case("", shape, dtype, blocksize, nested, quant_type, storage=storage), seed, device)


def every_pair(dtype: torch.dtype, device: torch.device, blocksize: int = 512) -> tuple[torch.Tensor, F.QuantState]:
    """Return a weight with all 65,536 pairs of an absmax byte and a packed byte."""
    return cases.quantized(Case(cases.PAIRS, (256, 512), dtype, blocksize), 0, device)
