"""bitsandbytes: its dequantization, its 4-bit linear forward, and its matmul of a few rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from .. import fused_matmul
from ..cache import cache
from ..context import is_compiling
from ..dequantizer import Dequantizer
from ..fused_matmul import FusedMatmul
from ..quant_state import linear_fields
from ..reader import reader, replace_reader
from ..reasons import Reason
from ..switch import switch

__all__ = ["replace_reader"]  # for ``MatMul4Bit.forward`` and ``.backward``


def output_of(state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out`` among the arguments of ``dequantize_4bit`` after a state; ARGUMENTS where another differs from the state.

    None, a default written out and what the state says as well change nothing.
    """
    given = {"absmax": None, "out": None, "blocksize": 64, "quant_type": "fp4"}
    names = [*list(given)[: len(args)], *kwargs]
    known = len({*names}) == len(args) + len(kwargs) and given.keys() >= {*names}
    given.update(zip(names, (*args, *kwargs.values()), strict=False))
    agrees = (
        known
        and (given["absmax"] is None or given["absmax"] is getattr(state, "absmax", None))
        and given["blocksize"] in (None, 64, getattr(state, "blocksize", None))
        and given["quant_type"] in ("fp4", getattr(state, "quant_type", None))
    )
    return given["out"] if agrees else Reason.ARGUMENTS


def replace_dequantize_4bit(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.functional.dequantize_4bit``."""
    dequantizer = Dequantizer(target)
    run, trace = dequantizer.run, dequantizer.trace

    @functools.wraps(original)
    def dequantize_4bit(A, quant_state=None, *args, **kwargs):
        if switch.on:
            out: Any = None
            if args or kwargs:
                alone = not args and kwargs.keys() == {"out"}
                out = kwargs["out"] if alone else output_of(quant_state, args, kwargs)
            if quant_state is None or type(out) is Reason:
                result: Any = Reason.ARGUMENTS
            elif is_compiling():
                result = trace(A, quant_state, out)
            else:
                try:
                    result = None
                    if cache.on and reader.bitsandbytes and out is None:
                        result = dequantizer.cached_state(A, quant_state, reader.bitsandbytes == "backward")
                    if result is None:
                        result = run(A, quant_state, out)
                except Exception as error:
                    result = dequantizer.failed(error)
            if type(result) is not Reason:
                return result
            if not is_compiling():
                dequantizer.fall_back(result)
        return original(A, quant_state, *args, **kwargs)

    return dequantize_4bit


def replace_dequant_linear(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.backends.cuda.ops._dequant_linear_fallback``: dequantize to A's dtype, then F.linear.

    It is the body of an opaque op: torch.compile never traces it.
    """
    dequantizer = Dequantizer(target)
    multiply = FusedMatmul(dequantizer).run

    @functools.wraps(original)
    def _dequant_linear_fallback(
        A, B, shapeB, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None
    ):
        if switch.on:
            fields = linear_fields(A, shapeB, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
            try:
                if switch.matmul != "off":
                    result = multiply(A, B, fields, quant_type, bias)
                    if type(result) is not Reason:
                        return result
                result = dequantizer.cached(B, fields, quant_type) if cache.on else None
                if result is None:
                    result = dequantizer.run_fields(B, fields, quant_type)
            except Exception as error:
                result = dequantizer.failed(error)
            if type(result) is not Reason:
                return F.linear(A, result, bias)
            dequantizer.fall_back(result)
        return original(
            A, B, shapeB, absmax, blocksize, quant_type, bias,
            absmax_8bit=absmax_8bit, absmax_code=absmax_code, absmax_offset=absmax_offset,
        )  # fmt: skip

    return _dequant_linear_fallback


def replace_gemm(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl``: its fused matmul of a few rows."""

    def multiply(
        fused, A, B, shapeB, absmax, blocksize, quant_type, bias=None,
        absmax_8bit=None, absmax_code=None, absmax_offset=None,
    ):  # fmt: skip
        fields = linear_fields(A, shapeB, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
        return fused.run(A, B, fields, quant_type, bias)

    return fused_matmul.before(target, original, multiply)


def replace_matmul_4bit(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.autograd._functions.matmul_4bit``, where no gradient is asked for: past the op, whose dispatch
    takes longer than the matmul of a few rows. Since 0.50 the packed weight may lie either way round.
    """
    transposed = None if "gemm_4bit" in original.__code__.co_names else True  # type: ignore[attr-defined]

    def multiply(fused, A, B, quant_state, out=None, bias=None):
        return fused.run_state(A, B, quant_state, bias, out, transposed)

    return fused_matmul.before(target, original, multiply)


def replace_gemv(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.functional.gemv_4bit``, which Linear4bit calls for one row before 0.50."""

    def multiply(fused, A, B, out=None, transposed_A=False, transposed_B=False, state=None):
        return fused.run_row(A, B, state, out)

    return fused_matmul.before(target, original, multiply)
