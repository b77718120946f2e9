"""The fused matmul in plain torch: what tests compare it with."""

from __future__ import annotations

import ctypes

import torch

from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.weight import PackedWeight


def matmul(x: torch.Tensor, layout: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T (+ bias)``, [..., N]: the weight rounded to x's dtype, products and sums in fp32, one rounding at the end."""
    weight = reference.dequantize(layout._replace(dtype=x.dtype, packed=layout.bytes()))
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The CPU tensor whose memory begins at the address."""
    memory = (ctypes.c_char * (torch.Size(shape).numel() * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
