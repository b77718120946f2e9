"""Replacements for Unsloth's dequantization, and for its products of few rows with a packed weight.

Compiled calls keep the NF4 kernel of newer releases of Unsloth. Eager calls run nf4_patch instead if the weight cache can
serve them, if the weight is offloaded, or if nf4_patch was measured to be faster on the machine's GPUs.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch

from ...matmul.product import FusedMatmul, multiplied_first, unsupported
from ...nf4 import runtime
from ...nf4.weight import PackedWeight
from ...patching import dequantizer
from ...patching.context import is_compiling
from ...patching.counters import warn_once
from ...patching.dequantizer import served
from ...patching.reasons import Reason
from ...patching.replacement import Function
from ...patching.switch import switch
from ...patching.target import Target
from . import MODULE

# A global variable of Unsloth, which Unsloth sets to False if its own NF4 kernel fails.
USES_OWN_KERNEL = "_USE_NF4_KERNELS"
OWN_KERNEL_RELEASES = ">= 2026.10"
# The compute capabilities on which Unsloth's kernel was measured to be slower in eager calls.
# A call that writes into Unsloth's global buffer takes 9.2 us of host time with nf4_patch, and 11.1 us with Unsloth.
# A call that allocates its result takes 15.0 us of host time with nf4_patch, and 35.8 us with Unsloth.
# In GPU time, nf4_patch is 1.05 times as fast for a weight of 148 MB (read and written), and 1.31 times for 10.6 MB.
# These times are from an H200 with torch 2.11, triton 3.6.0 and Unsloth 2026.10.9.
SLOWER_ON = ((9, 0),)
OWN_KERNEL_ADVICE = (
    "Unsloth 2026.10 and newer trains compiled layers, which keep Unsloth's own NF4 kernel and read nothing from the weight "
    'cache. On a fast GPU, enable(graphs="auto") makes their training faster.'
)
BLOCK_COMPILE = "UNSLOTH_BLOCK_COMPILE"
OFFLOAD_ADVICE = (
    "nf4_patch: offload= prefetches for eager layers only. Unsloth 2026.10 and newer compiles its layers, which read offloaded "
    f"weights over the bus. To prefetch, set {BLOCK_COMPILE}=0"
)


def uses_own_kernel() -> bool:
    """Return whether Unsloth is imported and has its own NF4 kernel."""
    return bool(getattr(sys.modules.get(MODULE), USES_OWN_KERNEL, False))


def compiles_layers() -> bool:
    """Return whether Unsloth's environment variables let it compile decoder layers."""
    off = os.environ.get("UNSLOTH_COMPILE_DISABLE") in ("1", "partial")
    return not off and os.environ.get(BLOCK_COMPILE) != "0"


@functools.cache
def keeps_eager_calls() -> bool:
    """Return whether eager calls keep Unsloth's own kernel.

    They do unless nf4_patch was measured to be faster on all visible GPUs.
    """
    return any(runtime.capability_of(device) not in SLOWER_ON for device in range(torch.cuda.device_count()))


def fast_dequantize(target: Target, original: Function) -> Function:
    """Replace ``fast_dequantize`` or, in newer releases, ``_fast_dequantize_bnb``.

    Compiled code runs Unsloth's own kernel if there is one. Inductor launches it directly, without PyTorch's dispatcher.
    """
    has_own_kernel, cache = hasattr(sys.modules.get(target.module), USES_OWN_KERNEL), switch.gates["cache"]
    offload = switch.gates["offload"]

    def adapter(serve, W, quant_state=None, out=None, use_global_buffer=False, **kwargs) -> Any:
        # A caller with these arguments only reads the result. Only Unsloth's backward passes a transposed weight.
        only_read = use_global_buffer or (quant_state is not None and W.shape[0] == 1)
        if has_own_kernel and uses_own_kernel():
            if is_compiling():
                return Reason.DEFERRED
            # Unsloth's kernel would read an offloaded weight over the bus, three times per step.
            is_offloaded = dequantizer.prefetch.on and dequantizer.prefetch.holds(W)
            if keeps_eager_calls() and not is_offloaded and not (cache.on and only_read):
                return Reason.DEFERRED
        return serve(W, quant_state, out, use_global_buffer, only_read)

    def advise(config: object) -> None:
        if not (has_own_kernel and uses_own_kernel()):
            return
        if cache.on:
            warn_once(f"nf4_patch: cache= serves eager layers. {OWN_KERNEL_ADVICE}")
        if offload.on and compiles_layers():
            warn_once(OFFLOAD_ADVICE)

    switch.follow(advise)
    replacement: Function = served(readers="unsloth.")(adapter)(target, original)
    return replacement


@multiplied_first
def fast_gemv(fused: FusedMatmul, X, W, quant_state, out=None) -> torch.Tensor | Reason:
    """Replace ``fast_gemv`` and ``_fast_gemv_bnb``, which return [1, 1, N] for X [1, 1, K]."""
    return fused.one_row(X, W, quant_state, out)


@multiplied_first
def gemv_rows(fused: FusedMatmul, X, W, quant_state, out) -> torch.Tensor | Reason:
    """Replace ``_gemv_rows``, which returns [M, 1, N] for X [M, 1, K], or None if its caller has to dequantize."""
    return fused.of_state(X, W, quant_state, None, out)


@multiplied_first
def matmul_lora(fused: FusedMatmul, X, W, W_quant, A, B, s, out=None, use_global_buffer=False) -> torch.Tensor | Reason:
    """Replace ``matmul_lora``, which computes X @ W.T + (X @ A.T) @ B.T * s.

    Packed bytes [1, bytes] are not supported, because Unsloth computes X @ W without the transpose for them.
    """
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    adapted = A is not None and torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)
    # If autocast or the weight has a dtype other than X's, the results would differ. Unsloth multiplies in autocast's dtype,
    # and rounds a weight of another dtype twice. The fused matmul does neither.
    if adapted or autocast not in (False, X.dtype) or getattr(W_quant, "dtype", X.dtype) is not X.dtype:
        return unsupported(X)
    rows = X.view(-1, X.shape[-1])
    result = fused.of_state(rows, W, W_quant, out=out, transposed=False)
    if type(result) is Reason:
        return result
    if A is not None:
        result.addmm_(rows @ A.t().to(X.dtype), B.t().to(X.dtype), alpha=s)
    return result.view(*X.shape[:-1], -1)


def rows_of_tokens(original: Function, x: torch.Tensor, weight: PackedWeight, state: Any) -> Any:
    """Call a matmul of Unsloth, which takes x [m, k] as [m, 1, k]."""
    return original(x.unsqueeze(1), weight.packed, state, None)
