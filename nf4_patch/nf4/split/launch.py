"""An fp32 matrix of few rows as parts of bf16, for products at fp32's precision on bf16 tensor cores.

24 bits of mantissa are three times 8: an fp32 number is the sum of three in bf16, and their products are exact in fp32. A factor of
rank r, its three parts side by side, costs a product of rank 3r. Tensor cores add with a few bits less than fp32: they add CHUNK
products at a time, and what they added is summed in fp32.

On an H200 (torch 2.11), by CHUNK: the error of dA of a [4096, 4096] layer at 2,048 rows (4.0e-7 with fp32 products), and the GPU time of
a step of four 8B layers with fp32 adapters at 512 and 4,096 tokens (14.2 and 76.8 ms with peft's LoRA): 128: 2.9e-7, 14.1 and 59.7;
256: 4.5e-7, 12.0 and 55.2; 512: 8.8e-7, 11.0 and 52.8; all at once: 3.3e-6, 10.3 and 51.2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import runtime

if runtime.triton is not None:
    from . import kernels

CHUNK = 128
BLOCK = 512
WARPS = 4
HAS_OUT_DTYPE = torch.__version__ >= (2, 8)  # type: ignore[operator]  # of torch.bmm: 16 bits to fp32


class Parts(NamedTuple):
    """Of an fp32 matrix [r, n]: high + middle + low."""

    stored: Tensor  # bf16 [4r, n]: high, high, middle, low; of a right one low, high, middle, high
    right: bool

    def sum(self) -> Tensor:
        """[3r, n]: all three."""
        rank = self.stored.shape[0] // 4
        return self.stored[: 3 * rank] if self.right else self.stored[rank:]

    def product(self) -> Tensor:
        """[3r, n]: left.product().T @ right.product() is left.T @ right but for 2^-16 of it."""
        rank = self.stored.shape[0] // 4
        return self.stored[rank:] if self.right else self.stored[: 3 * rank]


@functools.cache
def entry_for(device: torch.device, parts: int, right: bool) -> runtime.KernelEntry:
    """
    Raises:
        KernelUnavailable: it cannot be compiled here, or not while a CUDA graph is captured.
    """
    x, out = (torch.empty(4, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    values = {"PARTS": parts, "RIGHT": right, "BLOCK": BLOCK}
    return runtime.compiled(kernels.split_kernel, (x, out, 1.0, *(2,) * 7), values, WARPS, device)


def is_used_for(z: Tensor) -> bool:
    """Whether products of z with an fp32 matrix are to be those of its parts."""
    if not (HAS_OUT_DTYPE and runtime.triton is not None and z.is_cuda and z.dtype is torch.bfloat16):
        return False
    try:
        return all(entry_for(z.device, *kind) for kind in ((1, True), (3, False)))
    except runtime.KernelUnavailable:
        return False


def split(x: Tensor, scale: float = 1.0, right: bool = False) -> Parts:
    """The parts of scale * x.

    Args:
        x: fp32 on a GPU, [r, n]; or [chunks, parts, r, n], whose sum over both is split. Any strides.
        right: it stands on the right of a ``product``.
    """
    x = x if x.dim() == 4 else x[None, None]
    chunks, parts, r, n = x.shape
    stored = torch.empty(4 * r, n, dtype=torch.bfloat16, device=x.device)
    grid, sizes = (r, -(-n // BLOCK)), (float(scale), r, n, chunks, *x.stride())
    if not x.is_cuda:  # Triton's interpreter
        kernels.split_kernel[grid](x, stored, *sizes, PARTS=parts, RIGHT=right, BLOCK=BLOCK)
    elif n:
        call, head, tail, _ = entry_for(x.device, parts, right)
        with torch.cuda.device_of(x):
            stream = runtime.current_stream(x.get_device())
            call(*grid, 1, stream, *head, x.data_ptr(), stored.data_ptr(), *sizes, *tail)
    return Parts(stored, right)


def in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices [m, k] and [k, n] in fp32, to be summed over its chunks: [chunks, m, n]."""
    count = max(a.shape[1] // CHUNK, 1)
    size = min(CHUNK, a.shape[1])
    whole = multiplied(
        a[:, : count * size].unflatten(1, (count, size)).transpose(0, 1), b[: count * size].unflatten(0, (count, size))
    )
    if count * size == a.shape[1]:
        return whole
    return torch.cat([whole, multiplied(a[None, :, count * size :], b[None, count * size :])])


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
