"""axolotl: its decode of the experts that got tokens, with ``use_scattermoe``."""

from __future__ import annotations

import torch

from ..deferral import deferred
from ..dequantizer import Dequantizer
from ..experts.read import Stack
from ..quant_state import fields_of
from ..reasons import Reason
from ..replacement import Function, tried_first
from ..switch import switch
from ..targets import Target


def selective_dequant(target: Target, original: Function) -> Function:
    """For ``_selective_dequant_bnb4``: the experts ``active_experts`` of a packed stack, [n, ...]."""
    dequantizer = Dequantizer(target.name)

    def attempt(raw_param, quant_state, active_experts, expert_shape) -> torch.Tensor | Reason:
        fields = fields_of(quant_state)
        if type(fields) is Reason:
            return fields
        if (switch.defer == "auto" and quant_state.state2 is None) or deferred("axolotl"):
            return Reason.DEFERRED
        stack = Stack(raw_param, quant_state, dequantizer)
        if tuple(quant_state.shape[1:]) != tuple(expert_shape):
            return Reason.EXPERT_BLOCKS
        chosen = stack.select(active_experts.long())
        return chosen if type(chosen) is Reason else dequantizer.run(chosen.packed, chosen.state)

    return tried_first(original, dequantizer.fallbacks, attempt)
