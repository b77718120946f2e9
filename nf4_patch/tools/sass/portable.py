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
from ...nf4.matmul import launch as matmul
from ...nf4.matmul import small_m
from ...nf4.matmul.tuning import SmallMConfig
from ...patching.quant_state import fields_of
from . import machine_code
from .machine_code import Capability, arch_of


class CannotRun(RuntimeError):
    """Code for that capability does not run on this machine; the message says why."""


def capability_of(arch: str) -> Capability:
    """(7, 5) of "sm_75", "75" or "7.5".

    Raises:
        ValueError: no capability is written so.
    """
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", arch)
    if not found:
        raise ValueError(f"{arch!r} is not an architecture; write it as sm_75, 75 or 7.5")
    return int(found[1]), int(found[2])


def check(capability: Capability, device: torch.device) -> None:
    """Raises CannotRun unless PTX for ``capability`` runs on ``device``."""
    if capability < compilation.MINIMUM_CAPABILITY:
        raise CannotRun(f"{arch_of(capability)}: the kernel begins at {arch_of(compilation.MINIMUM_CAPABILITY)}")
    if device.type != "cuda":
        raise CannotRun("PTX needs an NVIDIA GPU to run on; `nf4-patch inspect` compiles and counts without one")
    here = torch.cuda.get_device_capability(device)
    if capability > here:
        raise CannotRun(f"PTX for {arch_of(capability)} does not run on {arch_of(here)}")


@functools.lru_cache(maxsize=256)
def load(variant: Variant, capability: Capability, device: torch.device) -> tuple[Any, runtime.Entry]:
    """The compiled kernel with its PTX in the place of its cubin, and a function that launches it on ``device``."""
    compiled = machine_code.compile_variant(variant, capability)
    return compiled, entry_of(compiled, tuple(compilation.constants(variant, capability).values()), capability, device)


@functools.lru_cache(maxsize=256)
def load_fused_matmul(
    ptx_source: str, warps: int, capability: Capability, device: torch.device
) -> tuple[Any, runtime.Entry]:
    """As :func:`load`, for the PTX source of a fused matmul."""
    compiled = machine_code.compile_fused_matmul(ptx_source, warps, capability)
    return compiled, entry_of(compiled, tuple(small_m.constants(ptx_source).values()), capability, device)


def entry_of(compiled: Any, values: tuple[Any, ...], capability: Capability, device: torch.device) -> runtime.Entry:
    """What launches the PTX of a compiled kernel on ``device``."""
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target and target[1].startswith(arch_of(capability)), target
    compiled.kernel = compiled.asm["ptx"].encode() + b"\0"  # cuModuleLoadData reads PTX up to a zero byte
    with torch.cuda.device(device):
        return runtime.Entry.of(compiled, values)


def dequantize(layout: Layout, capability: Capability, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` (n elements, 16-byte aligned, on the layout's device) with code built for ``capability``."""
    device = out.device
    check(capability, device)
    variant = Variant.of(layout, compilation.config_for(capability, layout.numel()))
    _, entry = load(variant, capability, device)
    tensors = compilation.operands(layout, out)
    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # type: ignore[attr-defined]
        grid = -(-layout.numel() // compilation.elements_of(variant))
        entry.start(grid, stream, *(tensor.data_ptr() for tensor in tensors), layout.numel())
    return out


def multiply(
    x: torch.Tensor, layout: Layout, config: SmallMConfig, processors: int, capability: Capability, out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Fill ``out`` [m, n] with x [m, k] @ weight.T (+ bias) by code built for ``capability``, as a GPU of so many
    multiprocessors would launch it."""
    (m, k), n, device, nested = x.shape, layout.shape[0], out.device, layout.nested()
    check(capability, device)
    cut = small_m.plan(config, processors, m, n, k, x.dtype is torch.float16, nested, bias is not None, capability)
    warps = config.warps_n * config.warps_k
    _, entry = load_fused_matmul(cut.ptx, warps, capability, device)
    kernel = small_m.SmallMKernel(device, x.dtype, layout, cut, warps, m, bias is not None, entry)
    return matmul.MatmulLaunch(kernel, x, layout, bias)(x, out)


def dequantizer(capability: Capability) -> Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]:
    """What ``verify`` compares: (packed, quant_state, out) -> the weight, transposed where packed is."""

    def run(packed: torch.Tensor, state: Any, out: torch.Tensor) -> torch.Tensor:
        layout = Layout(packed, *fields_of(state))
        dequantize(layout, capability, out)
        return out.t() if layout.transposed() else out

    return run
