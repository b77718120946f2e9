"""unsloth_zoo: its decode of 4-bit stacks of experts."""

from __future__ import annotations

import math

from torch import Tensor

from ..deferral import deferred
from ..dequantizer import Dequantizer
from ..reasons import Reason
from ..replacement import Function, tried_first
from ..targets import Target


def nf4_dequant(target: Target, original: Function) -> Function:
    """For ``nf4_dequant_triton``: a stack, or some experts of one, packed as [bytes, 1] or [experts, bytes].

    The original answers None where it does not run (fp4, another blocksize, switched off), upon which every caller
    asks bitsandbytes; the replacement decodes what it can instead.
    """
    dequantizer = Dequantizer(target.name)

    def decode(compiling, packed, state, shape, out) -> Tensor | Reason:
        if deferred("unsloth_zoo", compiling):
            return Reason.DEFERRED
        if shape is not None and math.prod(shape) != math.prod(getattr(state, "shape", None) or shape):
            return Reason.SIZE_MISMATCH  # before ``out`` is written
        if isinstance(packed, Tensor) and packed.shape[-1:] != (1,):
            packed = packed.reshape(-1, 1)  # one expert's bytes, [1, bytes], would ask for a transposed weight
        result = (dequantizer.trace if compiling else dequantizer.run)(packed, state, out)
        return result if type(result) is Reason or shape is None else result.view(shape)

    def attempt(packed, quant_state, out_shape=None, out=None) -> Tensor | Reason:
        return decode(False, packed, quant_state, out_shape, out)

    def trace(packed, quant_state, out_shape=None, out=None) -> Tensor | Reason:
        return decode(True, packed, quant_state, out_shape, out)

    return tried_first(original, dequantizer.fallbacks, attempt, trace)
