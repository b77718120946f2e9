"""X[M, K] @ dequantize(weight)[N, K].T in one pass over the packed weight: which kernel, whether it can, and its launch."""

from __future__ import annotations

from typing import Any

import torch

from ..nf4 import runtime
from ..nf4.runtime import triton
from ..nf4.weight import PackedWeight
from . import small_m
from .tuning import (
    MIN_ELEMENTS,
    MIN_ELEMENTS_UNALIGNED,
    MULTIPROCESSORS,
    SMALL_M_ROWS,
    CalibratedRanges,
    SmallMConfig,
    SmallMRow,
)  # fmt: skip

if triton is not None:
    from . import kernels

STEP = 16  # a row of the weight is of whole steps
COPY_BLOCK = 1024  # words that a program copies


def first_config(
    rows: tuple[SmallMRow, ...], capability: tuple[int, int], m: int, n: int, k: int, processors: int = MULTIPROCESSORS
) -> SmallMConfig | None:
    """That of the first row, or the fullest with its limits, for ``m`` rows of X and an [n, k] weight; None: no row fits."""
    fitting = [r for r in rows if r.capability == capability and m <= r.max_m and k <= r.max_k and n >= r.min_n]
    if not fitting:
        return None
    alike = [row.config for row in fitting if row[:-1] == fitting[0][:-1]]
    return max(alike, key=lambda config: config.fill(n, processors))


def config_for(
    capability: tuple[int, int], m: int, n: int, k: int, processors: int = MULTIPROCESSORS,
    calibrated: CalibratedRanges = (),
) -> SmallMConfig | None:  # fmt: skip
    """The measured config for ``m`` rows of X and an [n, k] weight on so many multiprocessors; None where none is.

    Args:
        calibrated: what was measured on this GPU for this very n and k; it goes before the tables.
    """
    for max_m, config in calibrated:
        if m <= max_m:
            return config
    return first_config(SMALL_M_ROWS, capability, m, n, k, processors) if pays(MIN_ELEMENTS, m, n, k) else None


def pays(least: dict[int, int], m: int, n: int, k: int) -> bool:
    """Whether an [n, k] weight has as many elements as ``least`` asks of ``m`` rows."""
    return all(m <= rows or n * k >= elements for rows, elements in least.items())


def supports(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> bool:
    """Whether the kernel can run on these arguments, of a weight that passed its guards."""
    n, k = weight.shape
    if triton is None or x.device != weight.packed.device or x.is_neg():
        return False
    capability = runtime.capability_of(x.device)
    return (
        (x.dtype is torch.float16 or (x.dtype is torch.bfloat16 and capability >= (8, 0)))  # of the tensor cores
        and k % STEP == 0
        and weight.packed.data_ptr() % 4 == 0
        and (
            (weight.packed.data_ptr() % 16 == 0 and weight.step() >= 32)
            or pays(MIN_ELEMENTS_UNALIGNED, x.numel() // k, n, k)
        )
        and (bias is None or (bias.device == x.device and supports_bias(bias, x.dtype, n)))
    )


def supports_bias(bias: torch.Tensor, dtype: torch.dtype, n: int) -> bool:
    plain = bias.is_contiguous() and not bias.is_neg()
    return bias.dtype is dtype and bias.shape == (n,) and plain and bias.data_ptr() % 16 == 0


class MatmulLaunch:
    """The matmul with one weight of an x of one shape, resolved once: addresses, sizes and kernels as plain integers.

    It keeps no tensor alive and is valid for as long as the weight has the same ``key``, and the bias its address.

    Args:
        kernel: compiled for arguments like these: x [..., K], fp16 or bf16; weight [N, K]; bias [N], x's dtype.
    """

    def __init__(
        self, kernel: small_m.SmallMKernel, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
    ):
        operands = weight.operands()
        self.device, self.dtype = x.get_device(), x.dtype
        self.weight = tuple(tensor.data_ptr() for tensor in operands)
        spare = (operands[2] if bias is None else bias).data_ptr()  # unread without a bias
        # the kernels read 16 bytes at once: from a copy, if the weight does not start on 16
        self.copied_words = weight.nbytes() // 4 if self.weight[0] % 16 else 0
        if self.copied_words:
            words = torch.empty(8, dtype=torch.int32, device=x.device)
            arguments, values = (words[1:], words, 8), {"BLOCK": COPY_BLOCK}  # from 4 bytes to 16, and how many int32
            with runtime.on_device(x.device):
                self.copy = runtime.compiled(kernels.copy_kernel, arguments, values, 4, x.device)
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
        self.counter: Any = None  # the caller's counter

    def accepts(self, x: torch.Tensor, out: Any) -> bool:
        """Whether the kernels can write to ``out``: contiguous, of the result, and none of what they read."""
        fits = runtime.fits(out, self.shape, self.dtype, self.device)
        return fits and not runtime.overlap((runtime.span(x), *self.spans), *runtime.span(out))

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The result for an x of the shape, dtype and device it was resolved for, new or in ``out`` (contiguous)."""
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
        weight = self.weight
        if self.copied_words:
            count, (packed, *others) = self.copied_words, weight
            words = runtime.empty_strided_cuda((count,), (1,), torch.int32)
            self.copy.start(-(-count // COPY_BLOCK), stream, packed, words.data_ptr(), count)
            weight = (words.data_ptr(), *others)
        part = out if self.sum is None else runtime.empty_strided_cuda(self.part, (1,), torch.float32)
        self.call(self.grid, 1, 1, stream, *self.head, start, *weight, part.data_ptr(), *self.tail)
        if self.sum is not None:
            self.sum(self.sum_grid, 1, 1, stream, *self.sum_head, part.data_ptr(), out.data_ptr(), *self.sum_tail)
        return out


_kernels: dict[tuple[Any, ...], small_m.SmallMKernel] = {}


def resolve(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, config: SmallMConfig) -> MatmulLaunch:
    """What multiplies every x of this shape by this weight, decoded inside the kernel; fp32 accumulation.

    The weights it multiplies by are, bit for bit, those of dequantize in x's dtype; the weight's own dtype is not looked at.
    The same arguments give the same bits at every run: sums across warps and parts of K are taken in a fixed order. The
    caller answers for :func:`supports`.

    Raises:
        KernelUnavailable: it cannot be compiled; or it is not compiled yet and a CUDA graph is being captured.
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
