"""Launch the fused matmul, which computes X[M, K] @ dequantize(weight)[N, K].T in one pass over the packed weight."""

from __future__ import annotations

from typing import Any

import torch

from ..nf4 import runtime
from ..nf4.runtime import triton
from ..nf4.weight import PackedWeight
from . import small_m
from .tuning import MIN_ELEMENTS, MIN_ELEMENTS_SHORT_STEP, MULTIPROCESSORS, SMALL_M_ROWS, SmallMConfig, SmallMRow

STEP = 16  # K is a multiple of this


def first_config(
    rows: tuple[SmallMRow, ...], capability: tuple[int, int], m: int, n: int, k: int, processors: int = MULTIPROCESSORS
) -> SmallMConfig | None:
    """Return the config of the first entry in ``rows`` whose limits allow this size, or None.

    Of entries with the same limits, choose the one that keeps the most ``processors`` (multiprocessors) busy.
    """
    fitting = [r for r in rows if r.capability == capability and m <= r.max_m and k <= r.max_k and n >= r.min_n]
    if not fitting:
        return None
    alike = [row.config for row in fitting if row[:-1] == fitting[0][:-1]]
    return max(alike, key=lambda config: config.fill(n, processors))


def config_for(
    capability: tuple[int, int], m: int, n: int, k: int, processors: int = MULTIPROCESSORS
) -> SmallMConfig | None:
    """Return the shipped table's config, or None if the table has none for this size or dequantize + matmul is faster."""
    return first_config(SMALL_M_ROWS, capability, m, n, k, processors) if pays(MIN_ELEMENTS, m, n, k) else None


def pays(least: dict[int, int], m: int, n: int, k: int) -> bool:
    """Return whether the weight is large enough for the fused matmul to be faster.

    More than ``rows`` rows need ``least[rows]`` elements.
    """
    return all(m <= rows or n * k >= elements for rows, elements in least.items())


def supports(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> bool:
    """Return whether the kernel supports these operands. The caller must have checked the weight with ``guards.why_not``."""
    n, k = weight.shape
    if triton is None or x.device != weight.packed.device or x.is_neg():
        return False
    capability = runtime.capability_of(x.device)
    return (
        (x.dtype is torch.float16 or (x.dtype is torch.bfloat16 and capability >= (8, 0)))  # dtypes of the tensor cores
        and k % STEP == 0
        and weight.packed.data_ptr() % 16 == 0
        and (weight.step() >= 32 or pays(MIN_ELEMENTS_SHORT_STEP, x.numel() // k, n, k))
        and (bias is None or (bias.device == x.device and supports_bias(bias, x.dtype, n)))
    )


def supports_bias(bias: torch.Tensor, dtype: torch.dtype, n: int) -> bool:
    plain = bias.is_contiguous() and not bias.is_neg()
    return bias.dtype is dtype and bias.shape == (n,) and plain and bias.data_ptr() % 16 == 0


class MatmulLaunch:
    """Multiplies any x [..., K] of one shape in fp16 or bf16 by one weight [N, K], and adds a bias [N] in x's dtype.

    Addresses are plain integers, so a launch keeps no tensor alive. It is valid while the weight's fingerprint and the
    bias's address stay the same.
    """

    def __init__(
        self, kernel: small_m.SmallMKernel, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
    ):
        operands = weight.operands()
        self.device, self.dtype = x.get_device(), x.dtype
        self.weight = tuple(tensor.data_ptr() for tensor in operands)
        # The kernel always gets an address for the bias, but does not read this address if there is no bias.
        spare = (operands[2] if bias is None else bias).data_ptr()
        self.grid = kernel.grid
        self.call, self.head, tail, _ = kernel.entry
        self.tail = (spare, *kernel.sizes, *tail)
        result = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")
        self.shape, self.strides = tuple(result.shape), result.stride()
        self.sum: Any = None
        if kernel.sum is not None:
            self.part, self.sum_grid = (kernel.part_numel,), kernel.sum_grid
            self.sum, self.sum_head, tail, _ = kernel.sum
            self.sum_tail = (spare, *kernel.sum_sizes, *tail)
        self.spans = runtime.spans(*operands, *(() if bias is None else (bias,)))
        self.counter: Any = None  # hit counter, set by the caller

    def accepts(self, x: torch.Tensor, out: Any) -> bool:
        """Return whether ``out`` fits the result and overlaps no operand."""
        fits = runtime.fits(out, self.shape, self.dtype, self.device)
        return fits and not runtime.overlap((runtime.span(x), *self.spans), *runtime.span(out))

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x into ``out`` or a new tensor.

        x must have the shape, dtype and device that this launch was resolved for.
        """
        device = self.device
        if runtime.current_device() != device:
            with runtime.on_device(device):
                return self(x, out)
        if out is not None and out.data_ptr() % 16:
            return out.copy_(self(x))
        start = x.data_ptr()
        if start % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
            start = x.data_ptr()
        if out is None:
            out = runtime.empty_strided_cuda(self.shape, self.strides, self.dtype)
        stream = runtime.current_stream(device)
        part = out if self.sum is None else runtime.empty_strided_cuda(self.part, (1,), torch.float32)
        self.call(self.grid, 1, 1, stream, *self.head, start, *self.weight, part.data_ptr(), *self.tail)
        if self.sum is not None:
            self.sum(self.sum_grid, 1, 1, stream, *self.sum_head, part.data_ptr(), out.data_ptr(), *self.sum_tail)
        return out


_kernels: dict[tuple[Any, ...], small_m.SmallMKernel] = {}


def resolve(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, config: SmallMConfig) -> MatmulLaunch:
    """Return the launch that multiplies every x of this shape by this weight, with fp32 accumulation.

    The weight is decoded to x's dtype, not ``weight.dtype``, bit-identically to dequantize. Results are deterministic,
    because sums are added in a fixed order. Call :func:`supports` first.

    Raises:
        KernelUnavailable: the kernel cannot be compiled, or is not compiled yet while a CUDA graph is being captured.
    """
    n, k = weight.shape
    m = x.numel() // k
    key = (x.device, x.dtype, weight.offset_dtype(), bias is None, m, n, k, weight.blocksize, weight.blocksize2, config)
    kernel = _kernels.get(key)
    if kernel is None:
        half, biased = x.dtype is torch.float16, bias is not None
        with runtime.on_device(x.device):
            capability, processors = runtime.capability_of(x.device), runtime.multiprocessors(x.device)
            division = small_m.plan(
                config, processors, m, n, k, half, weight.offset_dtype(), biased, capability, weight.step()
            )
            kernel = small_m.SmallMKernel(x.device, x.dtype, weight, division, m, biased)
        _kernels[key] = kernel
    return MatmulLaunch(kernel, x, weight, bias)
