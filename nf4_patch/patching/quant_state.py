"""A bitsandbytes QuantState, or the arguments of a bitsandbytes op, as the fields of a Layout after ``packed``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.codes import CODES, code_of
from . import guards
from .reasons import Reason

Fields = tuple[Any, ...]  # of a Layout, after ``packed``


def fields_of(state: Any) -> Any:
    """The Fields, or the Reason why the state lacks one."""
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


def linear_fields(
    A: Tensor, shapeB: Any, absmax: Any, blocksize: int, absmax_8bit: Any, absmax_code: Any, absmax_offset: Any
) -> Fields:
    """The same, less the code, from the arguments of bitsandbytes 0.50's 4-bit linear functions; the dtype is A's."""
    if absmax_8bit is None:
        return (absmax, None, None, None, None, blocksize, 0, tuple(shapeB), A.dtype)
    return (absmax_8bit, None, absmax, absmax_code, absmax_offset, blocksize, 256, tuple(shapeB), A.dtype)


_codes: dict[tuple[str, torch.device], Tensor] = {}


def remembered_code(quant_type: str, device: torch.device) -> Tensor | Reason:
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
