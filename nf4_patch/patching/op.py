"""The op that torch.compile and dispatch modes see: opaque, with a fake. Eager calls go past it (launch.py).

Its fake asks the guards, so that Dynamo need not trace them: 10 ms of 28 a weight (2-core CPU machine, torch 2.13). The
fake's answer to an unsupported layout is a bool tensor of as many elements as its reason has reasons before it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize import launch, reference
from ..nf4.layout import Layout
from . import guards
from .reasons import Reason

logger = logging.getLogger("nf4_patch")
REASONS = tuple(Reason)
# What keeps the kernel away and not the formula: a graph may run on another machine than it was traced on.
COMPUTABLE = (Reason.NOT_CUDA, Reason.ROCM, Reason.GPU_TOO_OLD, Reason.NOT_CONTIGUOUS)


# The fields of a Layout. Defined here and not by ``torch.library.custom_op``, whose Autograd kernel in Python makes a call
# of 17 us out of one of 6 (2-core CPU machine, torch 2.13): the packed weight has no gradient.
SCHEMA = (
    "(Tensor packed, Tensor absmax, Tensor code, Tensor? absmax2, Tensor? code2, Tensor? offset, "
    "SymInt blocksize, SymInt blocksize2, SymInt[] shape, ScalarType dtype) -> Tensor"
)


def kernel(*fields: Any) -> Tensor:
    """A new ``shape`` weight: from the kernel, or by the plain formula where it cannot run. A graph has no original.

    Raises:
        ValueError: the formula cannot be computed either.
    """
    *others, shape, dtype = fields
    layout = Layout._make((*others, tuple(shape), dtype))
    remembered = launch.remembered(layout)
    if remembered is not None:
        return remembered.run()
    reason = guards.check(layout)
    if reason is None:
        try:
            return launch.dequantize(layout)
        except runtime.KernelUnavailable as error:
            say_once(str(error))
    elif guards.check(layout, COMPUTABLE) is None:
        say_once(reason.sentence)
    else:
        raise ValueError(f"nf4_patch::dequantize_nf4: {reason.sentence}: {guards.describe(layout)}")
    return reference.dequantize(layout._replace(packed=layout.bytes()))


@functools.cache
def say_once(why: str) -> None:
    logger.warning("the plain formula runs inside the compiled graph: %s", why)


def unsupported(packed: Tensor, reason: Reason) -> Tensor:
    return packed.new_empty(REASONS.index(reason), dtype=torch.bool)


def fake(*fields: Any) -> Tensor:
    *others, shape, dtype = fields
    layout = Layout._make((*others, tuple(shape), dtype))
    reason = guards.check(layout, (Reason.TENSOR_SUBCLASS,))  # every tensor is a FakeTensor here
    if reason is not None:
        return unsupported(layout.packed, reason)
    return layout.packed.new_empty(layout.shape, dtype=layout.dtype)


if not hasattr(torch.ops.nf4_patch, "dequantize_nf4"):  # importlib.reload: defined once a process
    library = torch.library.Library("nf4_patch", "FRAGMENT")
    library.define("dequantize_nf4" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("dequantize_nf4", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("nf4_patch::dequantize_nf4", fake, lib=library)


def dequantize(
    packed: Tensor, absmax: Any, code: Any, absmax2: Any, code2: Any, offset: Any, *rest: Any
) -> Tensor | Reason:
    """The op on the fields of a Layout, transposed when they ask for it; or the Reason why not. Written to be traced."""
    if absmax is None or code is None or isinstance(offset, (int, float)):  # a number is bitsandbytes' to take
        return Reason.STATE_FIELDS
    weight: Tensor = torch.ops.nf4_patch.dequantize_nf4(packed, absmax, code, absmax2, code2, offset, *rest)
    if weight.dtype is torch.bool:
        return REASONS[weight.shape[0]]
    return weight.t() if packed.shape[0] == 1 else weight
