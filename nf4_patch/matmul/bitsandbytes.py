"""Replacements for the functions of bitsandbytes that multiply a few rows by a 4-bit weight."""

from __future__ import annotations

import inspect

from torch import Tensor

from ..patching.context import casts
from ..patching.quant_state import cpu_packing_or, linear_weight
from ..patching.reasons import Reason
from ..patching.replacement import Function, replacement_of
from ..patching.target import Target
from .product import FusedMatmul, multiplied_first


@multiplied_first
def gemm(
    fused: FusedMatmul, A, B, shapeB, absmax, blocksize, quant_type,
    bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None,
) -> Tensor | Reason:  # fmt: skip
    """Replace ``bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl``, bitsandbytes' own fused matmul."""
    packed = linear_weight(A.dtype, B, shapeB, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset)
    result = fused.run(A, packed, bias)
    return cpu_packing_or(result, absmax) if type(result) is Reason else result


def matmul_4bit(target: Target, original: Function) -> Function:
    """Make the replacement for ``bitsandbytes.autograd._functions.matmul_4bit``.

    If a gradient is required, the original runs.

    For few rows, the replacement runs the fused matmul directly and skips bitsandbytes' op, because the dispatch of the
    op takes longer than the matmul. Before bitsandbytes 0.50 the replacement accepts only a transposed packed weight.
    Since 0.50 it accepts both layouts.
    """
    fused = FusedMatmul(target.name)
    code = getattr(inspect.unwrap(original), "__code__", None)
    transposed = None if code is not None and "gemm_4bit" in code.co_names else True

    def multiply(A, B, quant_state, out=None, bias=None) -> Tensor | Reason:
        if casts(A):
            return Reason.MATMUL_OPERANDS
        return fused.of_state(A, B, quant_state, bias, out, transposed)

    return replacement_of(target, original, fused.fallbacks, multiply, is_body=True, refuses=True)


@multiplied_first
def gemv(fused: FusedMatmul, A, B, out=None, transposed_A=False, transposed_B=False, state=None) -> Tensor | Reason:
    """Replace ``bitsandbytes.functional.gemv_4bit``. Before bitsandbytes 0.50, Linear4bit calls it for one row."""
    return fused.one_row(A, B, state, out)
