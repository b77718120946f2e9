"""axolotl: its decode of the experts that got tokens, with ``use_scattermoe``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..context import is_compiling
from ..dequantizer import Dequantizer
from ..reasons import Reason
from ..switch import switch
from .transformers import Stack
from .unsloth import deferred

# As FASTER_ON_STACKS for unsloth_zoo. Of a state that is not nested axolotl needs one kernel and ours copies first.
FASTER_ON_NESTED = {
    (9, 0): "H200, torch 2.11, triton 3.6.0, axolotl 0.19.0: 27 us against 54 for 8 experts of Qwen3-30B-A3B's larger "
    "stack, 187 against 204 for 64, 363 against 376 for all 128",
}


@functools.cache
def measured_everywhere() -> bool:
    devices = range(torch.cuda.device_count())
    return all(torch.cuda.get_device_capability(device) in FASTER_ON_NESTED for device in devices)


def replace_selective_dequant(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_selective_dequant_bnb4``: the experts ``active_experts`` of a packed stack, [n, ...]."""
    dequantizer = Dequantizer(target)

    def decode(packed, state, ids, shape):
        nested = getattr(state, "state2", None) is not None
        if deferred(False, lambda: nested and measured_everywhere()):
            return Reason.DEFERRED
        stack = Stack(packed, state, dequantizer)
        if tuple(state.shape[1:]) != tuple(shape) or not stack.has_whole_experts():
            return Reason.EXPERT_BLOCKS
        return dequantizer.run(*stack.select(ids.long()))

    @functools.wraps(original)
    def _selective_dequant_bnb4(raw_param, quant_state, active_experts, expert_shape):
        if switch.on and not is_compiling():
            result = dequantizer.attempt(decode, raw_param, quant_state, active_experts, expert_shape)
            if type(result) is not Reason:
                return result
        return original(raw_param, quant_state, active_experts, expert_shape)

    return _selective_dequant_bnb4
