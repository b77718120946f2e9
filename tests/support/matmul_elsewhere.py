"""Compile the fused matmul for another GPU, and run it on this GPU as that GPU would launch it."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import machine_code
import portable
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nf4_patch.matmul import kernels, small_m
from nf4_patch.matmul.launch import MatmulLaunch
from nf4_patch.matmul.tuning import SmallMConfig
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.weight import PackedWeight

Capability = tuple[int, int]
POINTERS = ("x", "packed", "absmax", "code", "absmax2", "code2", "offset", "out", "bias")
NUMBERS = ("m", "n", "blocks", "shift", "shift2", "sm_partitions", "split_k")


def compile_matmul(cut: small_m.SmallMPlan, capability: Capability) -> Any:
    """Return Triton's CompiledKernel of a plan of the fused matmul."""
    signature = dict.fromkeys(POINTERS, "*u8") | dict.fromkeys(NUMBERS, "i32")
    values = {"PTX": cut.ptx}
    if runtime.TRITON_RELEASE >= (3, 3):
        signature |= dict.fromkeys(values, "constexpr")
    source = ASTSource(kernels.matmul_4bit_kernel, signature, values)
    target = GPUTarget("cuda", machine_code.sm(capability), 32)
    return triton.compile(
        source, target=target, options={"num_warps": cut.warps, "num_stages": 1, "maxnreg": cut.registers}
    )


def code_of(cut: small_m.SmallMPlan, capability: Capability) -> machine_code.Code:
    return machine_code.disassemble(compile_matmul(cut, capability).asm["cubin"])


@functools.lru_cache(maxsize=256)
def load(cut: small_m.SmallMPlan, capability: Capability, device: torch.device) -> tuple[Any, runtime.KernelEntry]:
    """Load a plan of the fused matmul, as portable.load does."""
    compiled = compile_matmul(cut, capability)
    return compiled, portable.entry_of(compiled, (cut.ptx,), capability, device)


def multiply(
    x: torch.Tensor, layout: PackedWeight, config: SmallMConfig, processors: int, capability: Capability, out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Fill ``out`` [m, n] with x [m, k] @ weight.T (+ bias) by code for ``capability``, launched as on a GPU with
    ``processors``.
    """
    (m, k), n, device, offset = x.shape, layout.shape[0], out.device, layout.offset_dtype()
    portable.check(capability, device)
    half, biased = x.dtype is torch.float16, bias is not None
    cut = small_m.plan(config, processors, m, n, k, half, offset, biased, capability, layout.step())
    _, entry = load(cut, capability, device)
    compiled = small_m.compiled

    def built(kernel: Any, *arguments: Any, **options: Any) -> runtime.KernelEntry:
        return entry if kernel is kernels.matmul_4bit_kernel else compiled(kernel, *arguments, **options)

    with mock.patch.object(small_m, "compiled", built):
        kernel = small_m.SmallMKernel(device, x.dtype, layout, cut, m, biased)
    return MatmulLaunch(kernel, x, layout, bias)(x, out)
