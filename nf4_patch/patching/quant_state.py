"""A bitsandbytes QuantState, or the arguments of a bitsandbytes op, as the fields of a Layout after ``packed``."""

from __future__ import annotations

from typing import Any

import torch

from ..nf4 import runtime
from . import guards
from .reasons import Reason

CODES = {
    "nf4": (  # QLoRA (arXiv 2305.14314), appendix E
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)),
}  # fmt: skip


def fields_of(state: Any) -> Any:
    """The fields of a Layout after ``packed``, or the Reason why the state lacks one."""
    try:
        state2 = state.state2
        if state2 is None:
            return state.absmax, state.code, None, None, None, state.blocksize, 0, state.shape, state.dtype
        return (
            state.absmax, state.code, state2.absmax, state2.code, state.offset,
            state.blocksize, state2.blocksize, state.shape, state.dtype,
        )  # fmt: skip
    except AttributeError:  # nothing but a state's fields is read above
        return guards.check_quant_state(state) or Reason.STATE_FIELDS


def linear_fields(A, shapeB, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset) -> tuple[Any, ...]:
    """The same, less the code, from the arguments of bitsandbytes 0.50's 4-bit linear functions; the dtype is A's."""
    if absmax_8bit is None:
        return (absmax, None, None, None, None, blocksize, 0, tuple(shapeB), A.dtype)
    return (absmax_8bit, None, absmax, absmax_code, absmax_offset, blocksize, 256, tuple(shapeB), A.dtype)


def code_of(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 values of a quant_type, in fp32 whatever the default dtype (bitsandbytes' ``get_4bit_type`` follows it)."""
    return torch.tensor(CODES[quant_type], dtype=torch.float32, device=device)


_codes: dict[tuple[str, torch.device], torch.Tensor] = {}


def remembered_code(quant_type: str, device: torch.device) -> torch.Tensor | Reason:
    """``code_of``, made once for each device; or the Reason why it cannot be made now."""
    code = _codes.get((quant_type, device))
    if code is None:
        if quant_type not in CODES:
            return Reason.QUANT_TYPE
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # a copy from the host would end it
            return Reason.GRAPH_CAPTURE
        with torch.inference_mode(False):
            code = _codes[quant_type, device] = runtime.outside_graph_pools(lambda: code_of(quant_type, device), device)
    return code
