"""The fused matmul in plain torch, as the reference for tests."""

from __future__ import annotations

import ctypes

import torch

from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.weight import PackedWeight


def matmul(x: torch.Tensor, layout: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T (+ bias)``, [..., N].

    The weight is rounded to x's dtype, products and sums are in fp32, and the result is rounded once.
    """
    weight = reference.dequantize(layout._replace(dtype=x.dtype, packed=layout.bytes()))
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the CPU tensor whose memory begins at the address."""
    memory = (ctypes.c_char * (torch.Size(shape).numel() * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
