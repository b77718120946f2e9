"""Adapter for Unsloth's dequantization.

Newer releases of Unsloth have their own NF4 kernel. This adapter leaves a call to Unsloth's kernel, unless the call is
eager, and the weight cache can serve it or nf4_patch was measured to be faster on this GPU.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ..nf4 import runtime
from ..patching.context import is_compiling
from ..patching.counters import warn_once
from ..patching.dequantizer import served
from ..patching.reasons import Reason
from ..patching.replacement import Function
from ..patching.switch import switch
from ..patching.target import Target

MODULE = "unsloth.kernels.utils"
# The name of a global variable of Unsloth. Unsloth sets the variable to False if its own NF4 kernel fails.
USES_OWN_KERNEL = "_USE_NF4_KERNELS"
OWN_KERNEL_RELEASES = ">= 2026.10"
# SLOWER_ON lists the compute capabilities on which Unsloth's kernel was measured to be slower in eager calls.
# A call that writes into Unsloth's global buffer takes 7.6 us of host time with nf4_patch, 11.1 us with Unsloth.
# A call that allocates its result takes 9.4 us of host time with nf4_patch, 24.0 us with Unsloth.
# In GPU time nf4_patch is 1.02 times as fast for a weight of 591 MB (read and written), 1.35 times for 2.6 MB.
# These times were measured on an H200 with torch 2.11, triton 3.6.0 and Unsloth 2026.10.9.
SLOWER_ON = ((9, 0),)
OWN_KERNEL_ADVICE = (
    "Unsloth from 2026.10 on trains compiled layers, which keep Unsloth's own NF4 kernel and read nothing from the weight "
    'cache. On a fast GPU, enable(graphs="auto") makes their training faster.'
)


def uses_own_kernel() -> bool:
    """Return whether Unsloth is imported and dequantizes with its own NF4 kernel."""
    return bool(getattr(sys.modules.get(MODULE), USES_OWN_KERNEL, False))


@functools.cache
def keeps_eager_calls() -> bool:
    """Return whether eager calls run Unsloth's own kernel.

    They do, unless Unsloth's kernel was measured to be slower (SLOWER_ON) on every GPU of the machine.
    """
    return any(runtime.capability_of(device) not in SLOWER_ON for device in range(torch.cuda.device_count()))


def fast_dequantize(target: Target, original: Function) -> Function:
    """Return the replacement of ``fast_dequantize`` or, in newer releases, ``_fast_dequantize_bnb``.

    Compiled code runs Unsloth's own kernel in the releases that have one, because Inductor launches that kernel
    directly, but would call nf4_patch's op through PyTorch's dispatcher.
    """
    has_own_kernel, cache = hasattr(sys.modules.get(target.module), USES_OWN_KERNEL), switch.gates["cache"]

    def adapter(serve, W, quant_state=None, out=None, use_global_buffer=False, **kwargs) -> Any:
        # A caller with these arguments only reads the result. Only Unsloth's backward passes a transposed weight.
        only_read = use_global_buffer or (quant_state is not None and W.shape[0] == 1)
        if has_own_kernel and uses_own_kernel():
            is_cached = not is_compiling() and cache.on and only_read
            if not is_cached and (is_compiling() or keeps_eager_calls()):
                return Reason.DEFERRED
        return serve(W, quant_state, out, use_global_buffer, only_read)

    def advise(config: object) -> None:
        if cache.on and has_own_kernel and uses_own_kernel():
            warn_once(f"nf4_patch: cache= serves eager layers. {OWN_KERNEL_ADVICE}")

    switch.follow(advise)
    replacement: Function = served(readers="unsloth.")(adapter)(target, original)
    return replacement
