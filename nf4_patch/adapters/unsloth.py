"""Unsloth: its dequantization, and which calls its own NF4 kernel keeps."""

from __future__ import annotations

from typing import Any

from ..cache.pinned import dense_of
from ..patching.context import is_compiling
from ..patching.dequantizer import served
from ..patching.reasons import Reason
from ..patching.replacement import Function
from ..patching.switch import switch
from ..patching.target import Target


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
