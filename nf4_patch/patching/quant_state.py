"""Make a PackedWeight from a bitsandbytes QuantState or from the arguments of a bitsandbytes op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4.weight import PackedWeight
from .reasons import Reason

# ``new(PackedWeight, fields)`` takes 0.16 us, and ``PackedWeight(*fields)`` takes 0.57 us (2-core CPU machine).
new: Any = tuple.__new__


def fields_of(packed: Tensor, state: Any) -> Any:
    """Return the fields of a PackedWeight, or the Reason why ``state`` lacks one. Dynamo can trace this function."""
    try:
        # This line does not use getattr. If the attribute is missing, getattr would make Dynamo trace
        # QuantState.__getattr__ and add guards for it.
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
    except AttributeError:  # the state lacks a field; nothing else above raises an AttributeError
        return Reason.STATE_FIELDS if hasattr(state, "quant_type") else Reason.NOT_4BIT


def weight_of(packed: Tensor, state: Any) -> Any:
    """Make a PackedWeight, or return the Reason why this is impossible."""
    fields = fields_of(packed, state)
    return fields if type(fields) is Reason else new(PackedWeight, fields)


def cpu_packing_or(reason: Reason, absmax: Any) -> Reason:
    """Return CPU_PACKING instead of STATE_FIELDS if bitsandbytes packed the weight for the CPU.

    absmax is then a bf16 tensor [K / blocksize, N].
    """
    repacked = reason is Reason.STATE_FIELDS and isinstance(absmax, Tensor) and absmax.dim() == 2
    return Reason.CPU_PACKING if repacked and absmax.dtype is torch.bfloat16 else reason


def linear_weight(
    dtype: Any, packed: Tensor, shape: Any, absmax: Any, blocksize: int, quant_type: str,
    absmax_8bit: Any, absmax_code: Any, absmax_offset: Any,
) -> PackedWeight:  # fmt: skip
    """Make a PackedWeight from the arguments of bitsandbytes 0.50's functions."""
    plain = tuple(shape), dtype, quant_type
    if absmax_8bit is None:
        fields: Any = packed, absmax, None, None, None, blocksize, 0, *plain
    else:
        fields = packed, absmax_8bit, absmax, absmax_code, absmax_offset, blocksize, 256, *plain
    weight: PackedWeight = new(PackedWeight, fields)
    return weight
