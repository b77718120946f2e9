"""Prototype: the fused matmul of few rows with a LoRA adapter, x @ weight.T + s * (x @ A.T) @ B.T, in two launches.

The first launch computes the inner product s * x @ A.T of up to three layers that share x. Its parts of K are fp32 sums without
atomics. The second launch is the fused matmul. It adds the parts in order, rounds them to x's dtype like peft, and adds the
product with B to its fp32 sums.
"""

from __future__ import annotations

from typing import Any

import torch

from ..nf4 import runtime
from ..nf4.weight import PackedWeight
from . import small_m
from .launch import config_for

if runtime.triton is not None:
    from . import kernels


def span_of(k: int, parts: int) -> int:
    """Return the columns of K per part, a multiple of 128."""
    return -(-k // (128 * parts)) * 128


class InnerLaunch:
    """The first launch: fp32 [layers, parts, m, rank] for x [m, k] and the A [rank, k] of one to three layers."""

    def __init__(self, a: list[torch.Tensor], m: int, parts: int = 16, scale: float = 1.0, dependent: bool = True):
        rank, k = a[0].shape
        self.a, self.m, self.scale, span = a, m, float(scale), span_of(k, parts)
        self.parts = -(-k // span)
        rows = min(64, max(16, 1 << (m - 1).bit_length()))
        self.grid = self.parts, len(a), -(-m // rows)
        self.shape = len(a), self.parts, m, rank
        self.options: dict[str, Any] = {
            "K": k, "RANK": rank, "SPAN": span, "ROWS": rows, "COLUMNS": 128, "DEPENDENT": dependent, "num_warps": 4
        }  # fmt: skip
        if dependent:
            self.options["launch_pdl"] = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device=x.device)
        a = self.a
        kernels.lora_inner_kernel[self.grid](x, a[0], a[len(a) > 1], a[-1], out, self.m, self.scale, **self.options)
        return out


class LoraMatmul:
    """The second launch, for x [m, k], one weight [n, k] and its B [n, rank]. Addresses are resolved once."""

    def __init__(self, x: torch.Tensor, weight: PackedWeight, b: torch.Tensor, parts: int):
        n, k = weight.shape
        m = len(x)
        capability, processors = runtime.capability_of(x.device), runtime.multiprocessors(x.device)
        config = config_for(capability, m, n, k, processors)
        if config is None or b.shape[1] % 16:
            raise ValueError(f"no config for {m} rows and {n}x{k}, or a rank of {b.shape[1]} that is no multiple of 16")
        half = x.dtype is torch.float16
        cut = small_m.plan(
            config, processors, m, n, k, half, weight.offset_dtype(), False, capability, weight.step(),
            b.shape[1] // 16, parts,
        )  # fmt: skip
        self.b, self.m, self.n, self.split = b, m, n, cut.split_k
        step = weight.step()
        blocks = (k // step, (weight.blocksize // step).bit_length() - 1, max(0, weight.blocksize2.bit_length() - 1))
        sizes = (m, n, *blocks, cut.sm_partitions, cut.split_k)
        out, part = (torch.empty(0, dtype=each, device=x.device) for each in (x.dtype, torch.float32))
        arguments = (out, *weight.operands(), part if cut.split_k > 1 else out, out, *sizes, part, out)
        options = {"maxnreg": cut.registers} | ({"launch_pdl": True} if cut.dependent else {})
        entry = runtime.compiled(
            kernels.matmul_4bit_lora_kernel, arguments, {"PTX": cut.ptx}, cut.warps, x.device, x.dtype, options=options
        )
        self.entry, self.grid, self.sizes, self.dtype = entry, cut.ctas, sizes, x.dtype
        self.weight = tuple(tensor.data_ptr() for tensor in weight.operands())
        if cut.split_k > 1:
            values = {"SPLIT_K": cut.split_k, "BIAS": False, "BLOCK": small_m.BLOCK}
            self.sum = runtime.compiled(
                kernels.sum_split_k_kernel, (part, out, out, m * n, n), values, 4, x.device, x.dtype
            )

    def __call__(self, x: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Multiply x [m, k]. ``inner`` is fp32 [parts, m, rank], contiguous."""
        out = torch.empty((self.m, self.n), dtype=self.dtype, device=x.device)
        to = out
        if self.split > 1:
            to = torch.empty((self.split, self.m, self.n), dtype=torch.float32, device=x.device)
        stream, spare = runtime.current_stream(x.get_device()), self.weight[1]
        self.entry.start(
            self.grid, stream, x.data_ptr(), *self.weight, to.data_ptr(), spare, *self.sizes, inner.data_ptr(),
            self.b.data_ptr(),
        )  # fmt: skip
        if self.split > 1:
            total = self.m * self.n
            grid = -(-total // small_m.BLOCK)
            self.sum.start(grid, stream, to.data_ptr(), out.data_ptr(), spare, total, self.n)
        return out
