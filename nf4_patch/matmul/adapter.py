"""The fused matmul with a LoRA adapter, which computes x @ weight.T + scale * (x @ A.T) @ B.T in two launches.

The first launch computes the inner product. It splits K into parts, and writes an fp32 sum for each part, without
atomics. The second, the fused matmul, adds these sums up in order and multiplies them by B, in fp32, so that the result
is rounded only once.
"""

from __future__ import annotations

from typing import Any

import torch

from ..nf4 import runtime
from ..nf4.runtime import KernelEntry, triton
from ..nf4.weight import PackedWeight
from ..patching.reasons import Reason
from . import small_m
from .launch import MatmulLaunch
from .small_m_ptx import AdapterLayout
from .tuning import SmallMConfig

if triton is not None:
    from . import kernels

PARTS = 16  # K is split into at most this many parts; 32 parts are slower at 8 rows (H200)
COLUMNS = 128  # the first kernel multiplies this many columns of x and A per step
# 16 rows of B take at most this many fragments, which allows a rank of 128 in bf16, or of 64 in fp32. A fragment is an
# operand of an mma, and takes four registers of a lane.
MOST_FRAGMENTS = 8
RANK_STEP = 4  # the rank must be a multiple of this, because a lane loads four columns of B
BF16, FP32 = torch.bfloat16, torch.float32
Adapter = tuple[torch.Tensor, torch.Tensor, float]  # A [rank, K], B [N, rank] and the scaling


def layout_of(a: torch.Tensor) -> AdapterLayout:
    """Return the layout of an adapter with A [rank, K]."""
    rank, k = a.shape
    return AdapterLayout(rank, a.dtype is FP32, -(-k // span_of(k)))


def span_of(k: int) -> int:
    """Return how many columns of x each part of K has."""
    return -(-k // (COLUMNS * PARTS)) * COLUMNS


def supports(x: torch.Tensor, m: int, n: int, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the kernels support shapes, dtypes and devices of x with m rows, A [rank, K] and B [n, rank]."""
    if a.dim() != 2 or b.dim() != 2 or a.dtype is not b.dtype or a.dtype not in (BF16, FP32) or x.dtype is not BF16:
        return False
    rank, k = a.shape
    if (
        rank == 0
        or rank % RANK_STEP
        or k != x.shape[-1]
        or b.shape != (n, rank)
        or not a.device == b.device == x.device
    ):
        return False
    if layout_of(a).fragments > MOST_FRAGMENTS:
        return False
    n_tiles = next((count for count in small_m.TILE_COUNTS if m <= 8 * count), 0)
    return n_tiles > 0 and layout_of(a).sum_bytes(n_tiles) > 0


def why_not(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, adapter: Adapter, m: int
) -> Reason | None:
    """Return the first Reason why the kernels cannot add the adapter's product for m rows of x, or None.

    Neither addresses nor contents of tensors are read.
    """
    n, a, b = weight.shape[0], *adapter[:2]
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != (n,) or bias.device != x.device):
        return Reason.MATMUL_OPERANDS
    if x.dtype is not BF16 or runtime.capability_of(x.device) < (8, 0) or weight.packed.device != x.device:
        return Reason.MATMUL_OPERANDS
    return None if supports(x, m, n, a, b) else Reason.LORA_OPERANDS


def key_of(x: torch.Tensor, adapter: Adapter) -> tuple[Any, ...]:
    """Return the part of a LoraLaunch's key that depends on x and the adapter."""
    a, b, _ = adapter
    return x.dtype, a.dtype, b.dtype, a.shape, b.shape, a.get_device(), b.get_device()


def is_readable(factor: torch.Tensor) -> bool:
    """Return whether the kernels can read ``factor``, which is the adapter's A or B.

    A readable factor is contiguous, 16-byte aligned and not lazily negated, and its storage holds all its elements.
    """
    return (
        factor.is_contiguous()
        and not factor.data_ptr() % 16
        and not factor.is_neg()
        and runtime.has_memory(factor)
    )  # fmt: skip


def constants(m: int, k: int, layout: AdapterLayout) -> dict[str, Any]:
    """Return the constexprs of the first launch's kernel for x [m, k], without DEPENDENT."""
    power = triton.next_power_of_2
    return {
        "K": k, "RANK": layout.rank, "WIDTH": 16 * layout.ranks, "BLOCK": max(16, power(layout.rank)), "SPAN": span_of(k),
        "ROWS": max(16, power(m)), "COLUMNS": COLUMNS, "WIDE": layout.wide,
    }  # fmt: skip


def inner_kernel(device: torch.device, m: int, k: int, layout: AdapterLayout) -> KernelEntry:
    """Return the compiled kernel of the first launch, for x [m, k] in bf16.

    Raises:
        KernelUnavailable: a kernel cannot be compiled, or is not compiled yet while a CUDA graph is being captured.
    """
    dependent = (
        runtime.capability_of(device) >= (9, 0)
        and runtime.TRITON_RELEASE >= (3, 6)
        and runtime.driver_version() >= 12030
    )
    values = constants(m, k, layout) | {"DEPENDENT": dependent}
    x, out = (torch.empty(0, dtype=dtype, device=device) for dtype in (BF16, FP32))
    options = {"num_warps": 4, "num_stages": 3} | ({"launch_pdl": True} if dependent else {})
    arguments = x, out if layout.wide else x, out, 2, 0.5
    return runtime.compiled(kernels.lora_inner_kernel, arguments, values, device, **options)


class LoraLaunch(MatmulLaunch):
    """The two launches for one weight, one shape of x and one layout of adapters. Each call passes its adapter."""

    def __init__(
        self, inner: KernelEntry, kernel: small_m.SmallMKernel, layout: AdapterLayout, x: torch.Tensor, weight: PackedWeight,
        bias: torch.Tensor | None,
    ):  # fmt: skip
        super().__init__(kernel, x, weight, bias)
        m = x.numel() // x.shape[-1]
        self.m, self.parts = m, layout.parts
        self.inner_numel = (layout.parts * m * 16 * layout.ranks,)
        self.inner, self.inner_head, self.inner_tail, _ = inner
        end = len(kernel.entry.tail)
        self.end = kernel.entry.tail
        self.tail = self.tail[: len(self.tail) - end]

    def add(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        """Multiply x by the weight, and add the adapter's product.

        x must have the shape, dtype and device of the x that ``resolve`` got. A and B must have the layout of the A
        that ``resolve`` got, and ``is_readable`` must be True for both.
        """
        device = self.device
        if runtime.current_device() != device:
            with runtime.on_device(device):
                return self.add(x, a, b, scale)
        start = x.data_ptr()
        if start % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
            start = x.data_ptr()
        empty, stream = runtime.empty_strided_cuda, runtime.current_stream(device)
        inner = empty(self.inner_numel, (1,), FP32)
        out: torch.Tensor = empty(self.shape, self.strides, self.dtype)
        address = inner.data_ptr()
        self.inner(
            self.parts, 1, 1, stream, *self.inner_head, start, a.data_ptr(), address, self.m, scale, *self.inner_tail
        )
        part = out if self.sum is None else empty(self.part, (1,), FP32)
        self.call(
            self.grid, 1, 1, stream, *self.head, start, *self.weight, part.data_ptr(), *self.tail, address, b.data_ptr(),
            *self.end,
        )  # fmt: skip
        if self.sum is not None:
            self.sum(self.sum_grid, 1, 1, stream, *self.sum_head, part.data_ptr(), out.data_ptr(), *self.sum_tail)
        return out


_kernels: dict[tuple[Any, ...], tuple[KernelEntry, small_m.SmallMKernel]] = {}


def resolve(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, config: SmallMConfig, a: torch.Tensor
) -> LoraLaunch:
    """Return the LoraLaunch for this weight, any x of this shape and any adapter with the layout of ``a``.

    The caller must have checked ``launch.supports`` and ``supports``.

    Raises:
        KernelUnavailable: a kernel cannot be compiled, or is not compiled yet while a CUDA graph is being captured.
    """
    n, k = weight.shape
    m, layout = x.numel() // k, layout_of(a)
    key = (x.device, weight.offset_dtype(), bias is None, m, n, k, weight.blocksize, weight.blocksize2, config, layout)
    if key not in _kernels:
        with runtime.on_device(x.device):
            capability, processors = runtime.capability_of(x.device), runtime.multiprocessors(x.device)
            division = small_m.plan(
                config,
                processors,
                m,
                n,
                k,
                False,
                weight.offset_dtype(),
                bias is not None,
                capability,
                weight.step(),
                layout,
            )
            first = inner_kernel(x.device, m, k, layout)
            _kernels[key] = (
                first,
                small_m.SmallMKernel(x.device, x.dtype, weight, division, m, bias is not None, layout),
            )
    first, kernel = _kernels[key]
    return LoraLaunch(first, kernel, layout, x, weight, bias)
