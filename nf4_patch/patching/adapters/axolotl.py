"""axolotl: its decode of the experts that got tokens, with ``use_scattermoe``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..context import is_compiling
from ..deferral import deferred
from ..dequantizer import Dequantizer
from ..reasons import Reason
from ..switch import switch
from .transformers import Stack


def selective_dequant(target: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_selective_dequant_bnb4``: the experts ``active_experts`` of a packed stack, [n, ...]."""
    dequantizer = Dequantizer(target.name)

    def decode(packed, state, ids, shape):
        if (switch.defer == "auto" and state.state2 is None) or deferred("axolotl"):
            return Reason.DEFERRED
        stack = Stack(packed, state, dequantizer)
        if tuple(state.shape[1:]) != tuple(shape) or not stack.has_whole_experts():
            return Reason.EXPERT_BLOCKS
        return dequantizer.run(*stack.select(ids.long()))

    @functools.wraps(original)
    def _selective_dequant_bnb4(raw_param, quant_state, active_experts, expert_shape):
        if switch.on and not is_compiling():
            result = dequantizer.fallbacks.attempt(decode, raw_param, quant_state, active_experts, expert_shape)
            if type(result) is not Reason:
                return result
        return original(raw_param, quant_state, active_experts, expert_shape)

    return _selective_dequant_bnb4
