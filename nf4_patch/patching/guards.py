"""Pure guards: the first reason why the kernel must not run on a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize import compilation
from ..nf4.layout import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES, Layout
from .reasons import Reason


def check_quant_state(quant_state: Any) -> Reason | None:
    """What the QuantState says beyond its tensors; NOT_4BIT if it is none."""
    if not hasattr(quant_state, "quant_type"):  # what neither a tensor, a list nor another library's state has
        return Reason.NOT_4BIT
    # not getattr: where it is missing, Dynamo traces QuantState.__getattr__ and guards on what that reads
    if quant_state.__dict__.get("packing_format_for_cpu"):
        return Reason.CPU_PACKING
    if quant_state.quant_type not in ("nf4", "fp4"):
        return Reason.QUANT_TYPE
    state2 = quant_state.__dict__.get("state2")
    if getattr(quant_state, "nested", state2 is not None) != (state2 is not None):
        return Reason.STATE_FIELDS
    if state2 is not None and (state2.dtype is not torch.float32 or getattr(state2, "nested", False)):
        return Reason.STATE_FIELDS
    return None


def describe(layout: Layout) -> str:
    """What was found, for an error; a field that is no tensor by its type."""

    def shape(field: Any) -> str:
        return f"{list(field.shape)}" if isinstance(field, Tensor) else f"a {type(field).__name__}"

    packed = layout.packed
    return (
        f"packed {packed.dtype} {shape(packed)} on {packed.device}, absmax {shape(layout.absmax)}, "
        f"blocksize {layout.blocksize}, shape {layout.shape}, dtype {layout.dtype}"
    )


def _has_no_address(layout: Layout) -> bool:
    own = torch._C._disabled_torch_dispatch_impl
    return not all(type(tensor).__torch_dispatch__ is own for tensor in layout.operands())


def _wrong_types(layout: Layout) -> bool:
    fp32 = (torch.float32,)
    wanted: list[Any] = [(layout.code, fp32), (layout.absmax, (torch.uint8,) if layout.nested() else fp32)]
    if layout.nested():
        wanted += [(layout.absmax2, fp32), (layout.code2, fp32), (layout.offset, OFFSET_DTYPES)]
    typed = all(isinstance(tensor, Tensor) and tensor.dtype in dtypes for tensor, dtypes in wanted)
    return not typed or layout.packed.dim() == 0


def _wrong_blocksizes(layout: Layout) -> bool:
    second = layout.blocksize2
    return layout.blocksize not in BLOCKSIZES or (layout.nested() and (second < 1 or second & (second - 1) != 0))


def _wrong_sizes(layout: Layout) -> bool:
    if layout.shape is None or (layout.transposed() and len(layout.shape) > 2):
        return True
    n, blocks = layout.numel(), layout.blocks()
    sizes: list[Any] = [(layout.nbytes(), -(-n // 2)), (layout.absmax.numel(), blocks), (layout.code.numel(), 16)]
    if layout.absmax2 is not None and layout.code2 is not None and layout.offset is not None:  # nested
        second = -(-blocks // layout.blocksize2)
        sizes += [(layout.absmax2.numel(), second), (layout.code2.numel(), 256), (layout.offset.numel(), 1)]
    return n == 0 or any(found != wanted for found, wanted in sizes)


def _too_old(layout: Layout) -> bool:
    packed = layout.packed
    return packed.is_cuda and torch.cuda.get_device_capability(packed.device) < compilation.MINIMUM_CAPABILITY


# In order: the first that holds is the reason. Each looks only at what the ones before it have vouched for.
GUARDS: tuple[tuple[Reason, Callable[[Layout], bool]], ...] = (
    (Reason.NOT_CUDA, lambda layout: not layout.packed.is_cuda and not compilation.INTERPRETED),
    (Reason.ROCM, lambda layout: torch.version.hip is not None and not compilation.INTERPRETED),
    (Reason.GPU_TOO_OLD, _too_old),
    (Reason.OUTPUT_DTYPE, lambda layout: layout.dtype not in OUTPUT_DTYPES),
    (Reason.STORAGE_DTYPE, lambda layout: layout.packed.dtype not in STORAGE_DTYPES),
    (Reason.STATE_FIELDS, _wrong_types),
    (Reason.TENSOR_SUBCLASS, _has_no_address),
    (Reason.BLOCKSIZE, _wrong_blocksizes),
    (Reason.MIXED_DEVICES, lambda layout: any(t.device != layout.packed.device for t in layout.operands())),
    (Reason.NOT_CONTIGUOUS, lambda layout: not all(t.is_contiguous() for t in layout.operands())),
    (Reason.SIZE_MISMATCH, _wrong_sizes),
)


def check(layout: Layout, ignore: tuple[Reason, ...] = ()) -> Reason | None:
    """The first reason why the kernel must not run on this layout; None when it may. Looks at no data."""
    for reason, holds in GUARDS:
        if reason not in ignore and holds(layout):
            return reason
    return None


def check_out(out: Any, layout: Layout) -> Reason | None:
    """``out`` must be what the kernel writes: dense, the layout's shape, dtype and device."""
    fits = runtime.fits(out, tuple(layout.shape), layout.dtype, layout.packed.get_device())
    return None if fits and out.device == layout.packed.device else Reason.OUT_MISMATCH
