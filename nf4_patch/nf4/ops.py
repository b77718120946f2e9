"""The op that torch.compile and dispatch modes see: opaque, with a fake. Eager calls go past it (launch.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Optional  # custom_op reads the annotations: torch 2.6 does not read X | None

import torch

from . import launch, reference
from .layout import Layout

logger = logging.getLogger("nf4_patch")
_said: set[str] = set()


@torch.library.custom_op("nf4_patch::dequantize_nf4", mutates_args=())
def dequantize_nf4(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    absmax2: Optional[torch.Tensor],
    code2: Optional[torch.Tensor],
    offset: Optional[torch.Tensor],
    blocksize: int,
    blocksize2: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The fields of :class:`Layout` to a new ``shape`` weight; the reference where the kernel cannot run."""
    layout = Layout(packed, absmax, code, absmax2, code2, offset, blocksize, blocksize2, tuple(shape), dtype)
    if packed.is_cuda or launch.INTERPRETED:
        try:
            return launch.dequantize(layout)
        except launch.KernelUnavailable as error:  # a compiled graph has no original to go back to
            if str(error) not in _said:
                _said.add(str(error))
                logger.warning("the plain formula runs inside the compiled graph: %s", error)
    return reference.dequantize(layout._replace(packed=layout.bytes()))


@dequantize_nf4.register_fake
def _(packed, absmax, code, absmax2, code2, offset, blocksize, blocksize2, shape, dtype):
    return packed.new_empty(tuple(shape), dtype=dtype)


def dequantize(layout: Layout) -> torch.Tensor:
    """The op on a layout, transposed when the layout asks for it."""
    weight = torch.ops.nf4_patch.dequantize_nf4(*layout)
    return weight.t() if layout.transposed() else weight
