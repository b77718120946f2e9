"""Unsloth: its dequantization, its matmul of a few rows, and which calls its own NF4 kernel keeps."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..cache.pinned import Layers, dense_of
from ..context import is_compiling
from ..counters import warn_once
from ..dequantizer import served
from ..matmul.product import FusedMatmul, multiplied_first
from ..reasons import Reason
from ..replacement import Function, instead, replacement_of
from ..switch import switch
from ..target import Target


def fast_dequantize(target: Target, original: Function) -> Function:
    """For ``fast_dequantize`` and ``_fast_dequantize_bnb``."""
    own, cache = target.own_kernel, switch.gates["cache"]

    def adapter(serve, W, quant_state=None, out=None, use_global_buffer=False, **kwargs) -> Any:
        # transposed: for its backward, and only there
        only_read = use_global_buffer or (quant_state is not None and W.shape[0] == 1)
        if is_compiling() and out is None and (dense := dense_of(W, quant_state)) is not None:
            return dense
        if own is not None and own.in_use(target.module):
            is_cached = not is_compiling() and cache.on and only_read
            if not is_cached and (is_compiling() or own.keeps_eager_calls()):
                return Reason.DEFERRED
        return serve(W, quant_state, out, use_global_buffer, only_read)

    replacement: Function = served(adapter)(target, original)
    return replacement


def compiled_layers(target: Target, original: Function) -> Function:
    """For ``_wrap``, which makes one compiled region of the ``forward`` of a class of layers."""
    layers = Layers(target.name)
    entries: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by class: its own forward, and ours

    def enter(cls: Any) -> None:
        entries[cls] = cls.forward, layers.entered(cls.forward)
        cls.forward = entries[cls][1]

    def wrap(cls, *args, **kwargs) -> None:
        original(cls, *args, **kwargs)
        enter(cls)

    def follow(config) -> None:
        """The classes of models that were loaded before the cache was switched on; and all are as they were, once it is off."""
        if not gate.on:
            for cls, (forward, entry) in list(entries.items()):
                if cls.forward is entry:
                    cls.forward = forward
            entries.clear()
            return
        if torch.__version__ < (2, 11):  # type: ignore[operator]
            warn_once("nf4_patch: Unsloth's compiled layers do not read cached weights under PyTorch before 2.11")
        waiting: list[Any] = [torch.nn.Module]
        while waiting:
            cls = waiting.pop()
            waiting += cls.__subclasses__()
            forward = vars(cls).get("forward")
            if getattr(forward, "_unsloth_block_compiled", False) and cls not in entries:
                enter(cls)

    gate = switch.gates["cache"]
    switch.follow(follow)
    return replacement_of(target, original, layers.dequantizer.fallbacks, instead(wrap))


@multiplied_first
def fast_gemv(fused: FusedMatmul, X, W, quant_state, out=None) -> torch.Tensor | Reason:
    """For ``fast_gemv`` and ``_fast_gemv_bnb``: [1, 1, K] to [1, 1, N]. Traced, it stays Unsloth's."""
    return fused.one_row(X, W, quant_state, out)


@multiplied_first
def gemv_rows(fused: FusedMatmul, X, W, quant_state, out) -> torch.Tensor | Reason:
    """For ``_gemv_rows``: a batch of single tokens, [M, 1, K] to [M, 1, N]; its None means: dequantize."""
    return fused.of_state(X, W, quant_state, None, out)


@multiplied_first
def matmul_lora(fused: FusedMatmul, X, W, W_quant, A, B, s, out=None, use_global_buffer=False) -> torch.Tensor | Reason:
    """For ``matmul_lora``, the linear layers of its LoRA kernels: x @ weight.T + (x @ a.T) @ b.T * scale.

    A packed weight [1, bytes] asks for x @ weight, which stays Unsloth's.
    """
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    adapted = A is not None and torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)
    # the original multiplies in the dtype of autocast, and rounds a weight of another dtype than X's twice
    if adapted or autocast not in (False, X.dtype) or getattr(W_quant, "dtype", X.dtype) is not X.dtype:
        return Reason.MATMUL_OPERANDS
    rows = X.view(-1, X.shape[-1])
    result = fused.of_state(rows, W, W_quant, out=out, transposed=False)
    if type(result) is Reason:
        return result
    if A is not None:
        result.addmm_(rows @ A.t().to(X.dtype), B.t().to(X.dtype), alpha=s)
    return result.view(*X.shape[:-1], -1)
