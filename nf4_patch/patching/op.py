"""The op ``nf4_patch::dequantize_nf4``, which dequantizes under torch.compile, and in eager calls under a dispatch mode.

Other eager calls launch the kernel directly. During a trace, the op's fake implementation checks whether the kernel
supports the weight. If not, it returns a bool tensor whose length is the Reason's index in REASONS. Dynamo therefore does
not trace guards.py, which saves 10 of 28 ms per weight (2-core CPU machine, torch 2.13).
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

FORMULA = "nf4_patch: a compiled graph dequantizes with slow PyTorch operators instead of the kernel: "
REASONS = tuple(Reason)
# Reasons why the kernel cannot run although PyTorch operators can dequantize the weight. A compiled graph needs these
# operators if such a Reason occurs only after the trace, for example because the graph runs on another machine.
COMPUTABLE = (Reason.NOT_CUDA, Reason.ROCM, Reason.GPU_TOO_OLD, Reason.NOT_CONTIGUOUS)


# The op's arguments are the fields of a PackedWeight. ``torch.library.custom_op`` would add an autograd kernel in Python,
# which a packed weight does not need because it has no gradient. A call would then take 17 us instead of 6 us (2-core CPU
# machine, torch 2.13).
SCHEMA = (
    "(Tensor packed, Tensor absmax, Tensor? absmax2, Tensor? code2, Tensor? offset, "
    "SymInt blocksize, SymInt blocksize2, SymInt[] shape, ScalarType dtype, str quant_type) -> Tensor"
)


def given(*fields: Any) -> PackedWeight:
    *others, shape, dtype, quant_type = fields
    return PackedWeight._make((*others, tuple(shape), dtype, quant_type))


def kernel(*fields: Any) -> Tensor:
    """Dequantize into a new tensor. If the kernel cannot run, use PyTorch operators.

    A compiled graph cannot fall back to the original function.

    Raises:
        ValueError: neither the kernel nor PyTorch operators can dequantize the weight.
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
    """Return an empty result, or a bool tensor that encodes the Reason."""
    weight = given(*fields)
    # TENSOR_SUBCLASS is ignored, because in a fake implementation every tensor is a FakeTensor.
    reason = guards.why_not(weight, ignore=(Reason.TENSOR_SUBCLASS,))
    if reason is not None:
        return weight.packed.new_empty(REASONS.index(reason), dtype=torch.bool)
    return weight.packed.new_empty(weight.shape, dtype=weight.dtype)


if not hasattr(torch.ops.nf4_patch, "dequantize_nf4"):  # importlib.reload must not define the op a second time
    library = torch.library.Library("nf4_patch", "FRAGMENT")
    library.define("dequantize_nf4" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("dequantize_nf4", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("nf4_patch::dequantize_nf4", fake, lib=library)


def dequantize(packed: Tensor, absmax: Any, absmax2: Any, code2: Any, offset: Any, *plain: Any) -> Tensor | Reason:
    """Call the op on the fields of a PackedWeight. Return the dense weight, or the Reason why the weight is not supported.

    Transposed packed bytes give a transposed result. Dynamo can trace this function.
    """
    # Return a Reason for values that a QuantState can hold but the op's schema does not accept.
    blocksize, blocksize2, shape, dtype, quant_type = plain
    if not isinstance(quant_type, str):
        return Reason.QUANT_TYPE
    if not isinstance(dtype, torch.dtype):
        return Reason.OUTPUT_DTYPE
    if absmax is None or isinstance(offset, (int, float)):  # bitsandbytes allows a number as offset
        return Reason.STATE_FIELDS
    if blocksize is None or blocksize2 is None:
        return Reason.BLOCKSIZE
    if shape is None:
        return Reason.SIZE_MISMATCH
    weight: Tensor = torch.ops.nf4_patch.dequantize_nf4(packed, absmax, absmax2, code2, offset, *plain)
    if weight.dtype is torch.bool:
        return REASONS[weight.shape[0]]
    return weight.t() if packed.shape[0] == 1 else weight
