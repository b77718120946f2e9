"""bitsandbytes as the oracle, and the states to ask it about."""

from __future__ import annotations

import bitsandbytes.functional as F
import torch

from nf4_patch.nf4.layout import Layout
from nf4_patch.patching.quant_state import fields_of
from nf4_patch.tools.cases import ask_bitsandbytes

expected = ask_bitsandbytes
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def layout_of(packed: torch.Tensor, state: F.QuantState) -> Layout:
    return Layout(packed, *fields_of(state))


def quantized(shape, dtype, device, blocksize=64, nested=True, quant_type="nf4", storage=torch.uint8, seed=0):
    """A random weight of a transformer's scale, quantized by bitsandbytes."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 0.05).to(device=device, dtype=dtype)
    return F.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
    )


def every_pair(dtype: torch.dtype, device: torch.device, blocksize: int = 512) -> tuple[torch.Tensor, F.QuantState]:
    """All 65,536 pairs of an absmax byte and a packed byte: 256 runs of the 256 packed bytes, one absmax byte each."""
    packed = torch.arange(256, dtype=torch.uint8, device=device).repeat(256)
    absmax = torch.arange(256, dtype=torch.uint8, device=device).repeat_interleave(512 // blocksize)
    _, state = quantized((256, 512), dtype, device, blocksize)
    state.absmax = absmax
    second = torch.linspace(0.003, 3.7, -(-absmax.numel() // 256), device=device)
    state.state2.absmax = second
    state.offset = torch.tensor(0.0371, device=device)
    return packed.view(-1, 1), state
