"""The op that torch.compile and dispatch modes see: opaque, with a fake. Eager calls go past it (launch.py).

Its fake asks the guards, so that Dynamo need not trace them: 10 ms of 28 a weight (2-core CPU machine, torch 2.13). The
fake's answer to an unsupported weight is a bool tensor of as many elements as its reason has reasons before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize import launch, reference
from ..nf4.weight import PackedWeight
from . import guards
from .counters import warn_once
from .reasons import Reason

FORMULA = "nf4_patch: the plain formula runs inside the compiled graph: "
REASONS = tuple(Reason)
# What keeps the kernel away and not the formula: a graph may run on another machine than it was traced on.
COMPUTABLE = (Reason.NOT_CUDA, Reason.ROCM, Reason.GPU_TOO_OLD, Reason.NOT_CONTIGUOUS)


# The fields of a PackedWeight. Defined here and not by ``torch.library.custom_op``, whose Autograd kernel in Python makes a call
# of 17 us out of one of 6 (2-core CPU machine, torch 2.13): the packed weight has no gradient.
SCHEMA = (
    "(Tensor packed, Tensor absmax, Tensor? absmax2, Tensor? code2, Tensor? offset, "
    "SymInt blocksize, SymInt blocksize2, SymInt[] shape, ScalarType dtype, str quant_type) -> Tensor"
)


def given(*fields: Any) -> PackedWeight:
    """The Weight of the op's arguments."""
    *others, shape, dtype, quant_type = fields
    return PackedWeight._make((*others, tuple(shape), dtype, quant_type))


def kernel(*fields: Any) -> Tensor:
    """A new ``shape`` weight: from the kernel, or by the plain formula where it cannot run. A graph has no original.

    Raises:
        ValueError: the formula cannot be computed either.
    """
    weight = given(*fields)
    memo = weight.memo()
    if memo.launch is not None:
        dense: Tensor = memo.launch.dense()
        return dense
    reason = guards.why_not(weight)
    if reason is None:
        try:
            return launch.dequantize(weight)
        except runtime.KernelUnavailable as error:
            warn_once(FORMULA + str(error))
    elif guards.why_not(weight, ignore=COMPUTABLE) is None:
        warn_once(FORMULA + reason.sentence)
    else:
        raise ValueError(f"nf4_patch::dequantize_nf4: {reason.sentence}: {guards.describe(weight)}")
    return reference.dense(weight)


def fake(*fields: Any) -> Tensor:
    weight = given(*fields)
    reason = guards.why_not(weight, ignore=(Reason.TENSOR_SUBCLASS,))  # every tensor is a FakeTensor here
    if reason is not None:
        return weight.packed.new_empty(REASONS.index(reason), dtype=torch.bool)
    return weight.packed.new_empty(weight.shape, dtype=weight.dtype)


if not hasattr(torch.ops.nf4_patch, "dequantize_nf4"):  # importlib.reload: defined once a process
    library = torch.library.Library("nf4_patch", "FRAGMENT")
    library.define("dequantize_nf4" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("dequantize_nf4", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("nf4_patch::dequantize_nf4", fake, lib=library)


def dequantize(packed: Tensor, absmax: Any, absmax2: Any, code2: Any, offset: Any, *plain: Any) -> Tensor | Reason:
    """The op on the fields of a PackedWeight, transposed when they ask for it; or the Reason why not. Written to be traced."""
    # what the schema does not take: the fake is not asked
    blocksize, blocksize2, shape, dtype, quant_type = plain
    if not isinstance(quant_type, str):
        return Reason.QUANT_TYPE
    if not isinstance(dtype, torch.dtype):
        return Reason.OUTPUT_DTYPE
    if absmax is None or isinstance(offset, (int, float)):  # a number is bitsandbytes' to take
        return Reason.STATE_FIELDS
    if blocksize is None or blocksize2 is None:
        return Reason.BLOCKSIZE
    if shape is None:
        return Reason.SIZE_MISMATCH
    weight: Tensor = torch.ops.nf4_patch.dequantize_nf4(packed, absmax, absmax2, code2, offset, *plain)
    if weight.dtype is torch.bool:
        return REASONS[weight.shape[0]]
    return weight.t() if packed.shape[0] == 1 else weight
