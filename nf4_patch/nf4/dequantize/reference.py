"""The reference formula in plain torch. Tests and the first use of each kernel compare with it."""

from __future__ import annotations

import torch

from ..codes import code_of
from ..weight import PackedWeight

SMALLEST_NORMAL = 2.0**-126


def flush(x: torch.Tensor, enabled: bool) -> torch.Tensor:
    """Flush fp32 subnormals to zeros of the same sign, like a CUDA library built with --use_fast_math."""
    return torch.where(x.abs() < SMALLEST_NORMAL, x * 0.0, x) if enabled else x


def multiply(a: torch.Tensor, b: torch.Tensor, flush_subnormals: bool) -> torch.Tensor:
    return flush(flush(a, flush_subnormals) * flush(b, flush_subnormals), flush_subnormals)


def block_scales(weight: PackedWeight, flush_subnormals: bool) -> torch.Tensor:
    """Return the fp32 scale of every block, [blocks]: fp32(code2[absmax] * absmax2) + fp32(offset), rounded twice."""
    if not weight.nested():
        return weight.absmax
    assert weight.absmax2 is not None and weight.code2 is not None and weight.offset is not None
    second = weight.absmax2.repeat_interleave(weight.blocksize2)[: weight.blocks()]
    scales = multiply(weight.code2[weight.absmax.long()], second, flush_subnormals)
    return scales + weight.offset.float()


def dense(weight: PackedWeight, flush_subnormals: bool | None = None) -> torch.Tensor:
    """Return the dense weight in ``weight.shape`` and ``weight.dtype``: dtype(fp32(code[nibble] * scale)).

    Every rounding is to nearest even.

    Args:
        flush_subnormals: treat fp32 subnormals as zeros, like bitsandbytes' CUDA library, built with --use_fast_math.
            By default True for a weight on CUDA. bitsandbytes' CPU library does not flush.

    Source: bitsandbytes' kDequantizeBlockwise; QLoRA (arXiv 2305.14314), section 3.
    """
    if flush_subnormals is None:
        flush_subnormals = weight.packed.is_cuda
    packed = weight.bytes()
    nibbles = torch.stack((packed >> 4, packed & 15), dim=-1).reshape(-1)[: weight.numel()]
    scales = block_scales(weight, flush_subnormals).repeat_interleave(weight.blocksize)[: weight.numel()]
    code = code_of(weight.quant_type, weight.packed.device)
    if flush_subnormals:
        # FP4's nibble 8 becomes minus zero, as in bitsandbytes' CUDA tables. In the code tensor it is plus zero.
        code[8] = torch.where(code[8] == 0, -0.0, code[8])
    values = multiply(code[nibbles.long()], scales, flush_subnormals)
    return values.to(weight.dtype).reshape(tuple(weight.shape))


def dequantize(weight: PackedWeight, flush_subnormals: bool | None = None) -> torch.Tensor:
    """Return the dense weight, transposed if the packed bytes are transposed."""
    result = dense(weight, flush_subnormals)
    return result.t() if weight.transposed() else result
