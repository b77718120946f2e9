"""Which calls a library's own fused kernel keeps: those where ours was not measured to be at least as fast."""

from __future__ import annotations

import functools
import sys

import torch

from .switch import switch

HOPPER = (9, 0)
# By library: capabilities where an eager call was measured to be at least as fast as the library's own kernel, and the
# measurement. Compiled regions stay the library's everywhere: Unsloth's kernel is a triton_op, which Inductor launches
# without the dispatcher that our op goes through.
FASTER = {
    "unsloth": {
        HOPPER: "H200, torch 2.11, triton 3.6.0, Unsloth 2026.10.9: 7.6 us of the host per call against 11.1 into the global "
        "buffer and 9.4 against 24.0 into a new tensor; 1.02x (591 MB) to 1.35x (2.6 MB) on the GPU",
    },
    "unsloth_zoo": {
        HOPPER: "H200, torch 2.11, triton 3.6.0, unsloth_zoo 2026.10.9: 248 us against 276 for Qwen3-30B-A3B's larger stack, "
        "1.03x (not nested) to 1.11x for whole stacks, 1.11x to 1.20x for eight experts",
    },
    "axolotl": {  # nested states only: for a flat one axolotl takes one kernel too, and we copy the experts first
        HOPPER: "H200, torch 2.11, triton 3.6.0, axolotl 0.19.0: 27 us against 54 for 8 experts of Qwen3-30B-A3B's larger "
        "stack, 187 against 204 for 64, 363 against 376 for all 128",
    },
}


OWN_KERNEL = {"unsloth": ">= 2026.10", "unsloth_zoo": ">= 0", "axolotl": ">= 0"}  # releases that have one
# What the library keeps for it, by default, and what to do.
KEPT = {
    "unsloth": "Unsloth from 2026.10 on trains compiled layers, which keep its own NF4 kernel: training gains only with "
    'enable(cache="auto") or a size, where these layers read weights that were dequantized once.',
    "unsloth_zoo": "Compiled mixtures of experts keep unsloth_zoo's own kernel.",
    "axolotl": "Compiled mixtures of experts keep axolotl's own kernel.",
}


def own_kernel(library: str) -> bool:
    """Whether the imported library uses an NF4 kernel of its own."""
    if library != "unsloth":
        return library in OWN_KERNEL
    return bool(getattr(sys.modules.get("unsloth.kernels.utils"), "_USE_NF4_KERNELS", False))


def deferred(library: str, compiling: bool = False) -> bool:
    """Whether the library's own kernel keeps a call: by NF4_PATCH_DEFER, or by what was measured on every GPU here."""
    if switch.defer != "auto":
        return switch.defer == "always"
    return compiling or not measured_everywhere(library)


@functools.cache
def measured_everywhere(library: str) -> bool:
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return all(capability in FASTER[library] for capability in capabilities)
