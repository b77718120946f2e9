"""Divide the fused matmul of up to 64 rows of X among CTAs according to a config, and compile its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..nf4.dequantize.compilation import PTX_TYPES
from ..nf4.runtime import TRITON_RELEASE, KernelEntry, compiled, driver_version, triton
from ..nf4.weight import PackedWeight
from . import small_m_ptx
from .small_m_ptx import AdapterLayout
from .tuning import TILE_COUNTS, SmallMConfig

if triton is not None:
    from . import kernels

BLOCK = 1024  # number of elements that each program of sum_split_k_kernel computes


class SmallMPlan(NamedTuple):
    """How a config divides the work of one size on one GPU.

    The weight's rows are split evenly into ``sm_partitions`` partitions, and K into ``split_k`` parts. A multiprocessor
    computes one part of K for one partition. The indices of its CTAs in the grid are ``sm_partitions`` apart, because the
    GPU normally assigns CTAs to its multiprocessors round-robin.
    """

    sm_partitions: int  # partitions of the weight's rows
    ctas: int  # CTAs in the whole grid
    warps: int  # warps per CTA
    split_k: int  # number of parts of K; if K is split, a second launch adds up the partial sums
    ptx: str
    dependent: bool = False  # programmatic dependent launch, where the kernel may start before the previous kernel ends
    registers: int | None = None  # maximum number of registers per thread; with None, ptxas decides


def plan(
    config: SmallMConfig, processors: int, m: int, n: int, k: int, half: bool, offset: torch.dtype | None, bias: bool,
    capability: tuple[int, int] = (9, 0), step: int = 64,
    adapter: AdapterLayout | None = None,
) -> SmallMPlan:  # fmt: skip
    """Plan the work for x [m, k], with m up to 64, in fp16 (``half``) or bf16, and a weight [n, k].

    ``offset`` is the dtype of the weight's offset, or None for a flat weight, and ``step`` is ``PackedWeight.step()``.
    """
    # With a small step, a 128-bit load would cover weights with two scales, and packed rows would be only 8-byte aligned.
    if step < 32:
        config = config._replace(load_128bit=False)
    groups = -(-n // config.block_n)
    chunks = -(-k // 256)
    split_k = min(max(1, processors // groups), chunks) if config.split_k else 1
    sm_partitions = min(groups, max(1, processors // split_k))
    ctas = sm_partitions * min(config.ctas_per_sm, -(-groups // sm_partitions)) * split_k
    x_in_registers = config.load_128bit and chunks <= config.warps_k
    n_tiles = next(count for count in TILE_COUNTS if m <= 8 * count)
    tail, bias, offset_type = k % 256 != 0, bias and split_k == 1, PTX_TYPES[offset] if offset else ""
    ptx = small_m_ptx.program(
        config, n_tiles, x_in_registers, half, offset_type, step, tail, split_k > 1, bias, capability, adapter
    )  # fmt: skip
    # An older driver might run a dependent launch, but fail to capture it in a CUDA graph.
    dependent = "griddepcontrol" in ptx and TRITON_RELEASE >= (3, 6) and driver_version() >= 12030
    warps = config.warps_n * config.warps_k
    # A limit of 255 registers per thread makes the kernel faster. By itself, ptxas uses only 168 to 177 registers.
    # For 24 rows, 14336x4096, the kernel takes 25.6 us with the limit, and 33.4 us without it (H200, triton 3.6.0).
    registers = 255 if n_tiles > 1 and warps * config.ctas_per_sm <= 8 else None
    # An adapter takes more registers. With this limit, ``ctas_per_sm`` CTAs still fit on a multiprocessor.
    if adapter is not None:
        registers = min(255, 2048 // (warps * config.ctas_per_sm))
    return SmallMPlan(sm_partitions, ctas, warps, split_k, ptx, dependent, registers)


class SmallMKernel:
    """The compiled kernels for x [m, k] in ``dtype`` and any weight with the layout of ``weight``."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, weight: PackedWeight, division: SmallMPlan, m: int, bias: bool,
        adapter: AdapterLayout | None = None,
    ):  # fmt: skip
        n, k = weight.shape
        step = weight.step()
        blocks = (k // step, (weight.blocksize // step).bit_length() - 1, max(0, weight.blocksize2.bit_length() - 1))
        self.grid, self.part_numel = division.ctas, division.split_k * m * n
        self.sizes = (m, n, *blocks, division.sm_partitions, division.split_k)
        self.sum_grid, self.sum_sizes = -(-m * n // BLOCK), (m * n, n)
        # Triton compiles a kernel for the alignment of its example arguments. Later tensors are 16-byte aligned.
        # Empty tensors stand in for the tensors that a call allocates. Their address is 0, which is also aligned.
        out, part = (torch.empty(0, dtype=each, device=device) for each in (dtype, torch.float32))
        values: dict[str, Any] = {"PTX": division.ptx}
        arguments = (out, *weight.operands(), out if division.split_k == 1 else part, out, *self.sizes)
        kernel = kernels.matmul_4bit_kernel
        if adapter is not None:
            kernel, arguments = kernels.matmul_4bit_lora_kernel, (*arguments, part, part if adapter.wide else out)
        options = {"num_warps": division.warps, "maxnreg": division.registers}
        options |= {"launch_pdl": True} if division.dependent else {}
        self.entry = compiled(kernel, arguments, values, device, dtype, **options)
        self.sum: KernelEntry | None = None
        if division.split_k > 1:
            values = {"SPLIT_K": division.split_k, "BIAS": bias, "BLOCK": BLOCK}
            self.sum = compiled(kernels.sum_split_k_kernel, (part, out, out, *self.sum_sizes), values, device, dtype)
