"""A bitsandbytes QuantState, or the arguments of a bitsandbytes op, as the fields of a PackedWeight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4.weight import PackedWeight
from .reasons import Reason

# Of a PackedWeight: a third of the time of ``PackedWeight(*fields)``, 0.16 us of 0.57 (2-core CPU machine).
new: Any = tuple.__new__


def fields_of(packed: Tensor, state: Any) -> Any:
    """The fields of the PackedWeight, or the Reason why the state lacks one. Written to be traced."""
    try:
        # not getattr: where it is missing, Dynamo traces QuantState.__getattr__ and guards on what that reads
        if state.__dict__.get("packing_format_for_cpu"):
            return Reason.CPU_PACKING
        if not state.nested:
            return (
                packed, state.absmax, None, None, None, state.blocksize, 0, state.shape, state.dtype, state.quant_type
            )  # fmt: skip
        second = state.state2
        if second.dtype is not torch.float32:
            return Reason.STATE_FIELDS
        return (
            packed, state.absmax, second.absmax, second.code, state.offset,
            state.blocksize, second.blocksize, state.shape, state.dtype, state.quant_type,
        )  # fmt: skip
    except AttributeError:  # nothing but a state's fields is read above
        return Reason.STATE_FIELDS if hasattr(state, "quant_type") else Reason.NOT_4BIT


def weight_of(packed: Tensor, state: Any) -> Any:
    """The PackedWeight, or the Reason why the state lacks a field."""
    fields = fields_of(packed, state)
    return fields if type(fields) is Reason else new(PackedWeight, fields)


def cpu_packing_or(reason: Reason, absmax: Any) -> Reason:
    """CPU_PACKING where ``reason`` is STATE_FIELDS because of an absmax [K / blocksize, N] in bf16, without its state."""
    repacked = reason is Reason.STATE_FIELDS and isinstance(absmax, Tensor) and absmax.dim() == 2
    return Reason.CPU_PACKING if repacked and absmax.dtype is torch.bfloat16 else reason


def linear_weight(
    dtype: Any, packed: Tensor, shape: Any, absmax: Any, blocksize: int, quant_type: str,
    absmax_8bit: Any, absmax_code: Any, absmax_offset: Any,
) -> PackedWeight:  # fmt: skip
    """From the arguments of bitsandbytes 0.50's 4-bit linear functions."""
    plain = tuple(shape), dtype, quant_type
    if absmax_8bit is None:
        fields: Any = packed, absmax, None, None, None, blocksize, 0, *plain
    else:
        fields = packed, absmax_8bit, absmax, absmax_code, absmax_offset, blocksize, 256, *plain
    weight: PackedWeight = new(PackedWeight, fields)
    return weight
