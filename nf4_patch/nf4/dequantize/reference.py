"""Dequantization in plain PyTorch, as the reference for the kernel in tests and before the kernel's first use."""

from __future__ import annotations

import torch

from ..codes import code_of
from ..weight import PackedWeight

SMALLEST_NORMAL = 2.0**-126


def flush(x: torch.Tensor, enabled: bool) -> torch.Tensor:
    """If enabled, replace fp32 subnormals by zeros of their sign, as --use_fast_math does."""
    return torch.where(x.abs() < SMALLEST_NORMAL, x * 0.0, x) if enabled else x


def multiply(a: torch.Tensor, b: torch.Tensor, flush_subnormals: bool) -> torch.Tensor:
    return flush(flush(a, flush_subnormals) * flush(b, flush_subnormals), flush_subnormals)


def block_scales(weight: PackedWeight, flush_subnormals: bool) -> torch.Tensor:
    """Return the fp32 scale of every block, [blocks].

    The scale in a nested weight is fp32(code2[absmax] * absmax2) + fp32(offset). The product and the sum are each rounded.
    """
    if not weight.nested():
        return weight.absmax
    assert weight.absmax2 is not None and weight.code2 is not None and weight.offset is not None
    second = weight.absmax2.repeat_interleave(weight.blocksize2)[: weight.blocks()]
    scales = multiply(weight.code2[weight.absmax.long()], second, flush_subnormals)
    return scales + weight.offset.float()


def dense(weight: PackedWeight, flush_subnormals: bool | None = None) -> torch.Tensor:
    """Return the dense weight, dtype(fp32(code[nibble] * scale)), each rounding to nearest even.

    ``flush_subnormals`` is by default True on CUDA, because bitsandbytes' CUDA library is built with --use_fast_math. Its
    CPU library keeps subnormals.

    Source: bitsandbytes' kDequantizeBlockwise; QLoRA (arXiv 2305.14314), section 3.
    """
    if flush_subnormals is None:
        flush_subnormals = weight.packed.is_cuda
    packed = weight.bytes()
    nibbles = torch.stack((packed >> 4, packed & 15), dim=-1).reshape(-1)[: weight.numel()]
    scales = block_scales(weight, flush_subnormals).repeat_interleave(weight.blocksize)[: weight.numel()]
    code = code_of(weight.quant_type, weight.packed.device)
    if flush_subnormals:
        # In FP4, nibble 8 means minus zero in bitsandbytes' CUDA tables, but plus zero in the code tensor.
        code[8] = torch.where(code[8] == 0, -0.0, code[8])
    values = multiply(code[nibbles.long()], scales, flush_subnormals)
    return values.to(weight.dtype).reshape(tuple(weight.shape))


def dequantize(weight: PackedWeight, flush_subnormals: bool | None = None) -> torch.Tensor:
    """Return the dense weight, transposed if the packed bytes are."""
    result = dense(weight, flush_subnormals)
    return result.t() if weight.transposed() else result
