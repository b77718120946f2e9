"""Unsloth: its dequantization, its matmul of a few rows, and which calls its own NF4 kernel keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cache.cache import cache
from ..cache.held import Layers, dense_of
from ..cache.reader import Reader
from ..deferral import deferred
from ..dequantizer import Dequantizer
from ..fused_matmul import FusedMatmul
from ..reasons import Reason
from ..replacement import tried_first
from ..switch import switch
from ..targets import Target


def fast_dequantize(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fast_dequantize`` and ``_fast_dequantize_bnb``."""
    dequantizer = Dequantizer(target.name)
    run, reader = dequantizer.run, Reader(target, dequantizer.run_fields)
    upstream = original.__globals__  # type: ignore[attr-defined]

    def is_deferred(compiling: bool) -> bool:
        return upstream.get("_USE_NF4_KERNELS", False) and deferred("unsloth", compiling)

    def attempt(W, quant_state=None, out=None, use_global_buffer=False, **kwargs) -> torch.Tensor | Reason:
        transposed = quant_state is not None and W.shape[0] == 1  # for its backward, and only there
        if cache.on and out is None and switch.defer != "always" and (use_global_buffer or transposed):
            found = reader.state(W, quant_state, use_global_buffer, transposed)
            if found is not None:
                return found
        return Reason.DEFERRED if is_deferred(False) else run(W, quant_state, out, use_global_buffer)

    def trace(W, quant_state=None, out=None, use_global_buffer=False, **kwargs) -> torch.Tensor | Reason:
        dense = dense_of(W, quant_state) if out is None else None
        if dense is not None:
            return dense
        return Reason.DEFERRED if is_deferred(True) else dequantizer.trace(W, quant_state, out)

    return tried_first(original, dequantizer.fallbacks, attempt, trace)


def compiled_layers(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_wrap``, which makes one compiled region of the ``forward`` of a class of layers."""
    layers = Layers(target.name)

    @functools.wraps(original)
    def wrap(cls, *args, **kwargs) -> None:
        original(cls, *args, **kwargs)
        cls.forward = layers.entry_of(cls.forward)

    def wrap_earlier(config) -> None:
        """The classes of models that were loaded before the cache was switched on."""
        waiting: list[Any] = [torch.nn.Module] if config is not None and config.cache not in ("off", "block") else []
        while waiting:
            cls = waiting.pop()
            waiting += cls.__subclasses__()
            forward = vars(cls).get("forward")
            if getattr(forward, "_unsloth_block_compiled", False) and forward not in layers.entries:
                cls.forward = layers.entry_of(forward)

    switch.follow(wrap_earlier)
    return wrap


def fast_gemv(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fast_gemv`` and ``_fast_gemv_bnb``: [1, 1, K] to [1, 1, N]. Traced, it stays Unsloth's."""
    fused = FusedMatmul(target.name)

    def multiply(X, W, quant_state, out=None) -> torch.Tensor | Reason:
        return fused.run_row(X, W, quant_state, out)

    return fused.before(original, multiply)


def gemv_rows(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_gemv_rows``: a batch of single tokens, [M, 1, K] to [M, 1, N]; its None means: dequantize."""
    fused = FusedMatmul(target.name)

    def multiply(X, W, quant_state, out) -> torch.Tensor | Reason:
        return fused.run_state(X, W, quant_state, None, out)

    return fused.before(original, multiply)


def matmul_lora(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``matmul_lora``, the linear layers of its LoRA kernels: x @ weight.T + (x @ a.T) @ b.T * scale.

    A packed weight [1, bytes] asks for x @ weight, which stays Unsloth's.
    """
    fused = FusedMatmul(target.name)

    def multiply(X, W, W_quant, A, B, s, out=None, use_global_buffer=False) -> torch.Tensor | Reason:
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

    return fused.before(original, multiply)
