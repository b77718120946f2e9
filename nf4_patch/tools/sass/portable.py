"""The kernel as another, older GPU would get it, run on the GPU at hand: PTX for sm_75 on an H200.

Triton compiles for the older capability with the configuration of the launch table for it. Its PTX, not its
cubin, is loaded, and the driver translates it for this GPU: the same instructions as far as PTX fixes them
(loads, shuffles, roundings, the integer bf16 rounding), another register allocation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from ...nf4 import runtime
from ...nf4.dequantize import compilation
from ...nf4.dequantize.compilation import Variant
from ...nf4.layout import Layout
from ...patching.quant_state import fields_of
from . import machine_code
from .machine_code import Capability, Unsupported, arch_of


def check(capability: Capability, device: torch.device) -> None:
    """Raises Unsupported unless PTX for ``capability`` runs on ``device``."""
    if capability < compilation.MINIMUM_CAPABILITY:
        raise Unsupported(f"{arch_of(capability)}: the kernel begins at {arch_of(compilation.MINIMUM_CAPABILITY)}")
    if device.type != "cuda":
        raise Unsupported("PTX needs an NVIDIA GPU to run on; `nf4-patch inspect` compiles and counts without one")
    here = torch.cuda.get_device_capability(device)
    if capability > here:
        raise Unsupported(f"PTX for {arch_of(capability)} does not run on {arch_of(here)}")


@functools.lru_cache(maxsize=256)
def load(variant: Variant, capability: Capability, device: torch.device) -> tuple[Any, runtime.KernelEntry]:
    """The compiled kernel with its PTX in the place of its cubin, and a function that launches it on ``device``."""
    compiled = machine_code.compile_variant(variant, capability)
    values = tuple(compilation.constants(variant, capability).values())
    return compiled, entry_of(compiled, values, capability, device)


def entry_of(
    compiled: Any, values: tuple[Any, ...], capability: Capability, device: torch.device
) -> runtime.KernelEntry:
    """What launches the PTX of a compiled kernel on ``device``."""
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target and target[1].startswith(arch_of(capability)), target
    compiled.kernel = compiled.asm["ptx"].encode() + b"\0"  # cuModuleLoadData reads PTX up to a zero byte
    with torch.cuda.device(device):
        return runtime.KernelEntry.of(compiled, values)


def dequantize(layout: Layout, capability: Capability, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` (n elements, 16-byte aligned, on the layout's device) with code built for ``capability``."""
    device = out.device
    check(capability, device)
    variant = Variant.of(layout, compilation.config_for(capability, layout.numel()))
    _, entry = load(variant, capability, device)
    tensors = compilation.operands(layout, out)
    with torch.cuda.device(device):
        grid = -(-layout.numel() // compilation.elements_of(variant))
        pointers = [tensor.data_ptr() for tensor in tensors]
        entry.start(grid, runtime.current_stream(device.index), *pointers, layout.numel())
    return out


def dequantizer(capability: Capability) -> Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]:
    """What ``verify`` compares: (packed, quant_state, out) -> the weight, transposed where packed is."""

    def run(packed: torch.Tensor, state: Any, out: torch.Tensor) -> torch.Tensor:
        layout = Layout(packed, *fields_of(state))
        dequantize(layout, capability, out)
        return out.t() if layout.transposed() else out

    return run
