"""The kernel for another, older GPU, run on this GPU: PTX for sm_75 on an H200.

Triton compiles for the older capability, with the launch table's configuration for it. The driver then translates the
PTX, not the cubin, for this GPU. The instructions are the same as far as PTX fixes them (loads, shuffles, roundings,
the integer bf16 rounding), but the register allocation differs.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import machine_code
import torch
from machine_code import Capability, Unsupported, arch_of
from oracle import layout_of

from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import compilation
from nf4_patch.nf4.dequantize.compilation import Variant
from nf4_patch.nf4.weight import PackedWeight
from nf4_patch.tools import cases, verify
from nf4_patch.tools.report import Progress, silent


def check(capability: Capability, device: torch.device) -> None:
    """Raise Unsupported unless PTX for ``capability`` runs on ``device``."""
    if capability < compilation.MINIMUM_CAPABILITY:
        raise Unsupported(f"{arch_of(capability)}: the kernel begins at {arch_of(compilation.MINIMUM_CAPABILITY)}")
    if device.type != "cuda":
        raise Unsupported("PTX needs an NVIDIA GPU to run on")
    here = torch.cuda.get_device_capability(device)
    if capability > here:
        raise Unsupported(f"PTX for {arch_of(capability)} does not run on {arch_of(here)}")


@functools.lru_cache(maxsize=256)
def load(variant: Variant, capability: Capability, device: torch.device) -> tuple[Any, runtime.KernelEntry]:
    """Return the compiled kernel with its PTX in place of its cubin, and a function that launches it on ``device``."""
    compiled = machine_code.compile_variant(variant, capability)
    values = tuple(compilation.constants(variant, capability).values())
    return compiled, entry_of(compiled, values, capability, device)


def entry_of(
    compiled: Any, values: tuple[Any, ...], capability: Capability, device: torch.device
) -> runtime.KernelEntry:
    """Return a function that launches the PTX of a compiled kernel on ``device``."""
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target and target[1].startswith(arch_of(capability)), target
    compiled.kernel = compiled.asm["ptx"].encode() + b"\0"  # cuModuleLoadData reads PTX up to a zero byte
    with torch.cuda.device(device):
        return runtime.KernelEntry.of(compiled, values)


def dequantize(layout: PackedWeight, capability: Capability, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` (n elements, 16-byte aligned, on the layout's device) with code for ``capability``."""
    device = out.device
    check(capability, device)
    variant = Variant.of(layout, compilation.warps_for(capability, layout.numel()))
    _, entry = load(variant, capability, device)
    tensors = compilation.operands(layout, out)
    with torch.cuda.device(device):
        grid = -(-layout.numel() // compilation.elements_of(variant))
        pointers = [tensor.data_ptr() for tensor in tensors]
        entry.start((grid, 1, 1), runtime.current_stream(device.index), (*pointers, layout.numel()))
    return out


def verified(capability: Capability, tell: Progress = silent) -> verify.VerifyReport:
    """Run ``nf4-patch verify`` on the code for this older capability, with its launch configuration.

    Raises:
        Unsupported: this code does not run on this machine.
    """
    check(capability, cases.device_here())

    def run(packed: torch.Tensor, state: Any, out: torch.Tensor) -> torch.Tensor:
        layout = layout_of(packed, state)
        dequantize(layout, capability, out)
        return out.t() if layout.transposed() else out

    report = verify.verify(tell=tell, dequantize=run)
    report.notes.append(
        f"Compared is the code of {arch_of(capability)}: its PTX and its launch configuration, translated for this GPU by "
        "the driver."
    )
    return report
