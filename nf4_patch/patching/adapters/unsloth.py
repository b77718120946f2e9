"""Unsloth: its dequantization, its matmul of a few rows, and which calls its own NF4 kernel keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import fused_matmul
from ..cache import cache
from ..context import is_compiling
from ..deferral import deferred
from ..dequantizer import Dequantizer
from ..reader import reader, replace_reader
from ..reasons import Reason
from ..switch import switch

__all__ = ["replace_reader"]  # for the ``backward`` of its LoRA kernels


def replace_fast_dequantize(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fast_dequantize`` and ``_fast_dequantize_bnb``."""
    dequantizer = Dequantizer(target)
    run, trace = dequantizer.run, dequantizer.trace
    upstream = original.__globals__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, **kwargs):
        if switch.on:
            compiling = is_compiling()
            result: Any = None
            if not compiling and cache.on and out is None and quant_state is not None and switch.defer != "always":
                backward = W.shape[0] == 1  # Unsloth transposes the packed weight for its backward, and only there
                if use_global_buffer or (backward and reader.unsloth):
                    try:
                        result = dequantizer.cached_state(W, quant_state, backward)
                    except Exception as error:
                        result = dequantizer.failed(error)
            if result is None:
                if upstream.get("_USE_NF4_KERNELS", False) and deferred("unsloth", compiling):
                    result = Reason.DEFERRED
                elif compiling:
                    result = trace(W, quant_state, out)
                else:
                    try:
                        result = run(W, quant_state, out, use_global_buffer)
                    except Exception as error:
                        result = dequantizer.failed(error)
            if type(result) is not Reason:
                return result
            if not compiling:
                dequantizer.fall_back(result)
        return original(W, quant_state, out, use_global_buffer, **kwargs)

    return fast_dequantize


def replace_fast_gemv(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fast_gemv`` and ``_fast_gemv_bnb``: [1, 1, K] to [1, 1, N]. Traced, it stays Unsloth's."""

    def multiply(fused, X, W, quant_state, out=None):
        return fused.run_row(X, W, quant_state, out)

    return fused_matmul.before(target, original, multiply)


def replace_gemv_rows(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_gemv_rows``: a batch of single tokens, [M, 1, K] to [M, 1, N]; its None means: dequantize."""

    def multiply(fused, X, W, quant_state, out):
        return fused.run_state(X, W, quant_state, None, out)

    return fused_matmul.before(target, original, multiply)


def replace_matmul_lora(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``matmul_lora``, the linear layers of its LoRA kernels: x @ weight.T + (x @ a.T) @ b.T * scale.

    A packed weight [1, bytes] asks for x @ weight, which stays Unsloth's.
    """

    def multiply(fused, X, W, W_quant, A, B, s, out=None, use_global_buffer=False):
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        adapted = A is not None and torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)
        # the original multiplies in the dtype of autocast, and rounds a weight of another dtype than X's twice
        if adapted or autocast not in (False, X.dtype) or getattr(W_quant, "dtype", X.dtype) is not X.dtype:
            return Reason.MATMUL_OPERANDS
        rows = X.view(-1, X.shape[-1])
        result = fused.run_state(rows, W, W_quant, out=out, transposed=False)
        if type(result) is Reason:
            return result
        if A is not None:
            result.addmm_(rows @ A.t().to(X.dtype), B.t().to(X.dtype), alpha=s)
        return result.view(*X.shape[:-1], -1)

    return fused_matmul.before(target, original, multiply)
