"""axolotl: its decode of the experts that got tokens, with ``use_scattermoe``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..context import is_compiling
from ..deferral import deferred
from ..dequantizer import Dequantizer
from ..experts import Stack
from ..quant_state import fields_of
from ..reasons import Reason
from ..switch import switch


def replace_selective_dequant(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_selective_dequant_bnb4``: the experts ``active_experts`` of a packed stack, [n, ...]."""
    dequantizer = Dequantizer(target)

    def decode(packed, state, ids, shape):
        fields = fields_of(state)
        if type(fields) is Reason:
            return fields
        if (switch.defer == "auto" and state.state2 is None) or deferred("axolotl"):
            return Reason.DEFERRED
        stack = Stack(packed, state, dequantizer)
        if tuple(state.shape[1:]) != tuple(shape) or not stack.has_whole_experts():
            return Reason.EXPERT_BLOCKS
        chosen = stack.select(ids.long())
        return dequantizer.run(chosen.packed, chosen.state)

    @functools.wraps(original)
    def _selective_dequant_bnb4(raw_param, quant_state, active_experts, expert_shape):
        if switch.on and not is_compiling():
            result = dequantizer.attempt(decode, raw_param, quant_state, active_experts, expert_shape)
            if type(result) is not Reason:
                return result
        return original(raw_param, quant_state, active_experts, expert_shape)

    return _selective_dequant_bnb4
