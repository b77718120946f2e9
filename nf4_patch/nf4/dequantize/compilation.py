"""Compile the dequantize kernel, and compare it with the reference formula before its first use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import runtime
from ..codes import CODES
from ..runtime import KernelUnavailable, triton
from ..weight import PackedWeight
from . import ptx, reference

if triton is not None:
    from . import kernels

MINIMUM_CAPABILITY = (7, 5)
MEASURED = ((9, 0),)  # compute capabilities of the GPUs on which the times in docs/data were measured

# NUM_WARPS maps (lowest compute capability, smallest number of elements) to warps per CTA. The last fitting row is used.
# On sm_90, 8 and 16 warps were timed (H200, torch 2.11, triton 3.6.0).
# The times are compared with those of a kernel that moves the same bytes but decodes nothing.
# Percent of its speed with 8 warps: 512x2048 98.6, 1024x4096 97.9, 4096x4096 95.8, 14336x4096 96.9, 8192x8192 97.7.
# Percent of its speed with 16 warps: 512x2048 96.2, 1024x4096 96.7, 4096x4096 98.3, 14336x4096 98.8, 8192x8192 99.6.
# Other GPUs were not timed. sm_75 gets 4 warps, to keep the most CTAs in flight on a T4, the smallest GPU.
NUM_WARPS = {((7, 5), 0): 4, ((8, 0), 0): 8, ((9, 0), 2**23): 16}
UNROLL = 2  # steps per CTA; a thread decodes one group of elements per step. UNROLL in kernels.py must be equal.
PACKED_CONVERT = (8, 0)  # the lowest compute capability that has the instructions cvt.rn.{f16,bf16}x2.f32

PTX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


def warps_for(capability: tuple[int, int], numel: int) -> int:
    return NUM_WARPS[max(row for row in NUM_WARPS if row[0] <= capability and row[1] <= numel)]


class Variant(NamedTuple):
    """Everything that the compiled kernel depends on, except the device. The defaults are a usual QLoRA weight's."""

    num_warps: int
    dtype: torch.dtype
    offset_dtype: torch.dtype | None = torch.float32  # None for a flat weight
    blocksize: int = 64
    blocksize2: int = 256
    even: bool = True  # whether the weight's elements fill whole CTAs
    tail: bool = False  # whether the number of elements is not a multiple of 8
    wide: bool = False  # whether the number of elements needs 64 bits
    aligned: bool = True  # whether the packed weight is 16-byte aligned, not only 4-byte aligned

    @classmethod
    def of(cls, weight: PackedWeight, num_warps: int) -> Variant:
        n, aligned = weight.numel(), weight.packed.data_ptr() % 16 == 0
        variant = cls(
            num_warps, weight.dtype, weight.offset_dtype(), weight.blocksize, weight.blocksize2, aligned=aligned
        )
        return variant._replace(even=n % elements_of(variant) == 0, tail=n % 8 != 0, wide=n >= 2**31)


def elems_per_thread(variant: Variant) -> int:
    """Return how many elements a thread decodes per step: 16 bytes of output, or 8 with a blocksize of 32.

    ptx.py supports at most two quantization blocks per half warp.
    """
    return 16 // variant.dtype.itemsize // (2 if variant.blocksize == 32 else 1)


def elements_of(variant: Variant) -> int:
    return elems_per_thread(variant) * 32 * variant.num_warps * UNROLL


def constants(variant: Variant, capability: tuple[int, int]) -> dict[str, Any]:
    """Return the constexprs, in the order of the kernel's parameters."""
    elements = elems_per_thread(variant)
    blocks = 2 if 16 * elements > variant.blocksize else 1
    source, constraints = ptx.decode(PTX_TYPES[variant.dtype], elements, blocks, capability >= PACKED_CONVERT)
    return {
        "BLOCKSIZE": variant.blocksize,
        "BLOCKSIZE2": variant.blocksize2,
        "ELEMS_PER_THREAD": elements,
        "THREADS": 32 * variant.num_warps,
        "EVEN": variant.even,
        "TAIL": variant.tail,
        "FTZ": True,
        "PTX": source,
        "CONSTRAINTS": constraints,
    }


def operands(weight: PackedWeight, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight.bytes(), *weight.operands()[1:], out)


class CompiledKernel:
    """A variant of the kernel, compiled for one device and compared with the reference on a sample.

    If one bit differs, the constructor raises an error.
    """

    def __init__(self, variant: Variant, device: torch.device):
        if triton is None:
            raise KernelUnavailable(runtime.MISSING)
        capability = runtime.capability_of(device)
        self.elements = elements_of(variant)
        sample = sample_weight(variant, self.elements, device)
        out = torch.full((sample.numel(),), float("nan"), dtype=variant.dtype, device=device)
        values = constants(variant, capability)
        tensors = operands(sample, out)
        n = 2**31 if variant.wide else sample.numel()
        with runtime.on_device(device):
            options = {"num_warps": variant.num_warps, "enable_fp_fusion": False}
            self.compiled = runtime.compile_kernel(kernels.dequantize_kernel, (*tensors, n), values, **options)
            self.entry = runtime.KernelEntry.of(self.compiled, tuple(values.values()))
            for quant_type in CODES:  # compare both quant types, because only FP4 has a minus zero
                weight = sample._replace(quant_type=quant_type)
                pointers = [tensor.data_ptr() for tensor in operands(weight, out)]
                grid = -(-weight.numel() // self.elements), 1, 1
                self.entry.start(grid, runtime.current_stream(device.index), (*pointers, weight.numel()))
                if not runtime.same_bits(out, reference.dequantize(weight)):
                    raise KernelUnavailable(
                        f"the kernel's bits differ from the reference on {runtime.name_of(device)} "
                        f"with Triton {triton.__version__}, for {quant_type} and {variant}"
                    )
                out.fill_(float("nan"))


def sample_weight(variant: Variant, elements: int, device: torch.device) -> PackedWeight:
    """Build a small weight of this variant, on which the kernel is compared with the reference.

    It has every byte value, and ends with FP4's minus zero and zero. Random bytes would change the random state of the
    user's training.
    """
    n = 3 * elements if variant.even else 3 * elements + 8 + (3 if variant.tail else 0)
    blocks = -(-n // variant.blocksize)

    def bytes_of(count: int, stride: int) -> torch.Tensor:
        return (torch.arange(count, device=device) * stride % 256).to(torch.uint8)

    start = 0 if variant.aligned else 4
    packed = bytes_of(-(-n // 2) + start, 97)[start:]
    packed[-2:] = 0x80  # minus zero, zero
    absmax = bytes_of(blocks, 59)
    second: tuple[Any, Any, Any] = (None, None, None)
    if variant.offset_dtype is None:
        absmax = absmax.float() / 91
    else:
        code2 = torch.arange(-128, 128, device=device).float() / 127.7
        absmax2 = torch.arange(1, -(-blocks // variant.blocksize2) + 1, device=device).float() / 3.1
        second = (absmax2, code2, torch.full((), 0.37, dtype=variant.offset_dtype, device=device))
    return PackedWeight(packed, absmax, *second, variant.blocksize, variant.blocksize2, (n,), variant.dtype, "nf4")


_kernels: dict[tuple[Variant, torch.device], CompiledKernel | KernelUnavailable] = {}


def kernel_for(variant: Variant, device: torch.device) -> CompiledKernel:
    """Return the kernel, compiled at the first use. See :func:`runtime.built_once` for errors."""
    return runtime.built_once(_kernels, (variant, device), lambda: CompiledKernel(variant, device))


def compiled_kernels() -> dict[tuple[Variant, torch.device], CompiledKernel | KernelUnavailable]:
    """Return the kernels that were compiled so far, or the errors of their compilation."""
    return dict(_kernels)
