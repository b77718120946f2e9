"""unsloth_zoo: its decode of 4-bit stacks of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..context import is_compiling
from ..deferral import deferred
from ..dequantizer import Dequantizer
from ..reasons import Reason
from ..switch import switch


def replace_nf4_dequant(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``nf4_dequant_triton``: a stack, or some experts of one, packed as [bytes, 1] or [experts, bytes].

    The original answers None where it does not run (fp4, another blocksize, switched off), upon which every caller
    asks bitsandbytes; the replacement decodes what it can instead.
    """
    dequantizer = Dequantizer(target)

    def decode(compiling, packed, state, shape, out):
        if deferred("unsloth_zoo", compiling):
            return Reason.DEFERRED
        if shape is not None and math.prod(shape) != math.prod(getattr(state, "shape", None) or shape):
            return Reason.SIZE_MISMATCH  # before ``out`` is written
        if isinstance(packed, torch.Tensor) and packed.shape[-1:] != (1,):
            packed = packed.reshape(-1, 1)  # one expert's bytes, [1, bytes], would ask for a transposed weight
        result = (dequantizer.trace if compiling else dequantizer.run)(packed, state, out)
        return result if type(result) is Reason or shape is None else result.view(shape)

    @functools.wraps(original)
    def nf4_dequant_triton(packed, quant_state, out_shape=None, out=None):
        if switch.on:
            compiling = is_compiling()
            if compiling:
                result = decode(True, packed, quant_state, out_shape, out)
            else:
                result = dequantizer.attempt(decode, False, packed, quant_state, out_shape, out)
            if type(result) is not Reason:
                return result
        into = () if out is None else (out,)  # before 2026.10.7 there is none
        return original(packed, quant_state, out_shape, *into)

    return nf4_dequant_triton
