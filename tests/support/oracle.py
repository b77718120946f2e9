"""bitsandbytes as the oracle, and the states to ask it about."""

from __future__ import annotations

import bitsandbytes.functional as F
import torch

from nf4_patch.nf4.weight import Weight
from nf4_patch.patching import quant_state
from nf4_patch.tools import cases
from nf4_patch.tools.cases import Case, ask_bitsandbytes

expected = ask_bitsandbytes
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def layout_of(packed: torch.Tensor, state: F.QuantState) -> Weight:
    weight: Weight = quant_state.weight_of(packed, state)
    return weight


def quantized(shape, dtype, device, blocksize=64, nested=True, quant_type="nf4", storage=torch.uint8, seed=0):
    """A random weight of a transformer's scale, quantized by bitsandbytes."""
    return cases.quantized(Case("", shape, dtype, blocksize, nested, quant_type, storage=storage), seed, device)


def every_pair(dtype: torch.dtype, device: torch.device, blocksize: int = 512) -> tuple[torch.Tensor, F.QuantState]:
    """All 65,536 pairs of an absmax byte and a packed byte."""
    return cases.quantized(Case(cases.PAIRS, (256, 512), dtype, blocksize), 0, device)
