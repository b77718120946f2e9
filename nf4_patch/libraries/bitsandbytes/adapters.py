"""Replacements for bitsandbytes' dequantization, and for its forward of 4-bit linear layers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...matmul.product import FusedMatmul, multiplied_first, unsupported
from ...memory.spare import spare
from ...nf4.weight import PackedWeight
from ...patching.context import casts
from ...patching.counters import warn_once
from ...patching.dequantizer import Dequantizer, served
from ...patching.quant_state import cpu_packing_or, linear_weight
from ...patching.reasons import Reason
from ...patching.replacement import Fallbacks, Function, instead, replacement_of
from ...patching.switch import switch
from ...patching.target import Target
from . import AUTOGRAD
from .cpu import corrected

COMPUTES_IN_FP32 = (
    "nf4_patch: 4-bit layers compute in fp32, which is slow. load_in_4bit=True alone means fp32: also set "
    "bnb_4bit_compute_dtype=torch.bfloat16 in BitsAndBytesConfig (torch.float16 on a T4)"
)
TARGET = "bitsandbytes.functional.dequantize_4bit"


def agrees(state: Any, absmax: Any, blocksize: Any, quant_type: Any) -> bool:
    """Return whether each argument is the default of ``dequantize_4bit`` or equal to the quant_state's field."""
    return (
        (absmax is None or absmax is getattr(state, "absmax", None))
        and (blocksize is None or blocksize in (64, getattr(state, "blocksize", None)))
        and (quant_type == "fp4" or quant_type == getattr(state, "quant_type", None))
    )


@served(readers=AUTOGRAD)
def dequantize_4bit(serve, A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4") -> Any:
    """Replace ``bitsandbytes.functional.dequantize_4bit``."""
    # Checking the defaults here saves a call of ``agrees``, which takes 0.07 us (2-core CPU machine, Python 3.11).
    defaults = absmax is None and blocksize is None and quant_type == "fp4"
    if quant_state is None or not (defaults or agrees(quant_state, absmax, blocksize, quant_type)):
        return Reason.ARGUMENTS
    result = serve(A, quant_state, out, False, True)
    if type(result) is Reason and (dense := corrected(TARGET, A, quant_state, out)) is not None:
        return dense
    return result


def dequant_linear(target: Target, original: Function) -> Function:
    """Replace ``bitsandbytes.backends.cuda.ops._dequant_linear_fallback``, which decodes to the dtype of ``A`` and multiplies.

    torch.compile never traces the replacement, because the original is the body of a custom op.
    """
    dequantizer = Dequantizer(target.name)
    multiply, gate = FusedMatmul(target.name, dequantizer.fallbacks).run, switch.gates["matmul"]

    def attempt(
        A, B, shapeB, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None
    ) -> Any:
        packed = linear_weight(
            A.dtype, B, shapeB, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset
        )
        if A.dtype is torch.float32:
            warn_once(COMPUTES_IN_FP32)
        missed = None
        if gate.on and not casts(A):
            result = multiply(A, packed, bias)
            if type(result) is not Reason:
                return result
            missed = result
        if spare.users:
            spare.observe(A)
        weight = dequantizer.run(packed, None, False, True)
        if type(weight) is Reason:
            return cpu_packing_or(weight, absmax)
        if missed is not None and not missed.is_expected:
            dequantizer.fallbacks.count(missed)
        # If the packed bytes have the shape [1, bytes], ``weight`` is transposed, so transpose it back for F.linear.
        return F.linear, A, weight.t() if B.shape[0] == 1 else weight, bias

    return replacement_of(target, original, dequantizer.fallbacks, attempt, is_body=True, refuses=True)


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
    """Replace ``bitsandbytes.autograd._functions.matmul_4bit`` in calls that require no gradient.

    For few rows, the replacement skips bitsandbytes' op, whose dispatch takes longer than the matmul. Before
    bitsandbytes 0.50, the fused matmul runs only if the packed weight is transposed.
    """
    fused = FusedMatmul(target.name)
    code = getattr(inspect.unwrap(original), "__code__", None)
    transposed = None if code is not None and "gemm_4bit" in code.co_names else True

    def multiply(A, B, quant_state, out=None, bias=None) -> Tensor | Reason:
        if casts(A):
            return unsupported(A)
        return fused.of_state(A, B, quant_state, bias, out, transposed)

    return replacement_of(target, original, fused.fallbacks, multiply, is_body=True, refuses=True)


@multiplied_first
def gemv(fused: FusedMatmul, A, B, out=None, transposed_A=False, transposed_B=False, state=None) -> Tensor | Reason:
    """Replace ``bitsandbytes.functional.gemv_4bit``, which bitsandbytes before 0.50 calls for one row."""
    return fused.one_row(A, B, state, out)


def call_gemm(original: Function, x: Tensor, weight: PackedWeight, _state: Any) -> Any:
    return original(
        x, weight.packed, weight.shape, weight.absmax2, weight.blocksize, weight.quant_type,
        absmax_8bit=weight.absmax, absmax_code=weight.code2, absmax_offset=weight.offset,
    )  # fmt: skip


def call_gemv(original: Function, x: Tensor, weight: PackedWeight, state: Any) -> Any:
    return original(x.unsqueeze(1), weight.packed, state=state)


def observed(target: Target, original: Function) -> Function:
    """Replace an autograd function's ``forward(ctx, A, ...)``, to report the size of ``A`` to the users of spare memory."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if spare.users and len(args) > 1:
            spare.observe(args[1])
        return original(*args, **kwargs)

    return replacement_of(target, original, Fallbacks(target.name), instead(forward))
