"""unsloth_zoo: its decode of 4-bit stacks of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..context import is_compiling
from ..dequantizer import Dequantizer
from ..reasons import Reason
from ..switch import switch
from .unsloth import deferred

# Capabilities where an eager call was measured to be at least as fast as unsloth_zoo's own kernel, and the measurement;
# elsewhere, and in every compiled region, unsloth_zoo's keeps its calls.
FASTER_ON_STACKS = {
    (9, 0): "H200, torch 2.11, triton 3.6.0, Unsloth 2026.10.9: 248 us against 276 for Qwen3-30B-A3B's larger stack, "
    "1.03x (not nested) to 1.11x for whole stacks, 1.11x to 1.20x for eight experts",
}


@functools.cache
def measured_everywhere() -> bool:
    devices = range(torch.cuda.device_count())
    return all(torch.cuda.get_device_capability(device) in FASTER_ON_STACKS for device in devices)


def replace_nf4_dequant(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``nf4_dequant_triton``: a stack, or some experts of one, packed as [bytes, 1] or [experts, bytes].

    The original answers None where it does not run (fp4, another blocksize, switched off), upon which every caller
    asks bitsandbytes; the replacement decodes what it can instead.
    """
    dequantizer = Dequantizer(target)

    def decode(compiling, packed, state, shape, out):
        if deferred(compiling, measured_everywhere):
            return Reason.DEFERRED
        if packed.shape[-1] != 1:  # one expert's bytes, [1, bytes], would ask for a transposed weight
            packed = packed.reshape(-1, 1)
        result = (dequantizer.trace if compiling else dequantizer.run)(packed, state, out)
        if type(result) is Reason or shape is None:
            return result
        return result.view(shape) if result.numel() == math.prod(shape) else Reason.SIZE_MISMATCH

    @functools.wraps(original)
    def nf4_dequant_triton(packed, quant_state, out_shape=None, out=None):
        if switch.on:
            compiling = is_compiling()
            if compiling:
                result = decode(True, packed, quant_state, out_shape, out)
            else:
                try:
                    result = decode(False, packed, quant_state, out_shape, out)
                except Exception as error:
                    result = dequantizer.failed(error)
            if type(result) is not Reason:
                return result
            if not compiling:
                dequantizer.fall_back(result)
        into = () if out is None else (out,)  # before 2026.10.7 there is none
        return original(packed, quant_state, out_shape, *into)

    return nf4_dequant_triton
