"""Check whether the kernels support a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.codes import CODES
from ..nf4.dequantize import compilation
from ..nf4.weight import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES, PackedWeight
from .context import is_compiling, own_dispatch, returns_tensors
from .reasons import Reason


def describe(weight: PackedWeight) -> str:
    """Describe a weight for an error message."""

    def shape(field: Any) -> str:
        return f"{list(field.shape)}" if isinstance(field, Tensor) else f"a {type(field).__name__}"

    packed = weight.packed
    return (
        f"packed {packed.dtype} {shape(packed)} on {packed.device}, absmax {shape(weight.absmax)}, "
        f"blocksize {weight.blocksize}, shape {weight.shape}, dtype {weight.dtype}"
    )


def _wrong_types(weight: PackedWeight) -> bool:
    wanted: list[Any] = [(weight.absmax, (torch.uint8 if weight.nested() else torch.float32,))]
    if weight.nested():
        wanted += [(weight.absmax2, (torch.float32,)), (weight.code2, (torch.float32,)), (weight.offset, OFFSET_DTYPES)]
    elif weight.code2 is not None or weight.offset is not None:
        return True
    typed = all(isinstance(tensor, Tensor) and tensor.dtype in dtypes for tensor, dtypes in wanted)
    return not typed or weight.packed.dim() == 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _wrong_blocksizes(weight: PackedWeight) -> bool:
    first, second = weight.blocksize, weight.blocksize2
    if not (_is_whole(first) and _is_whole(second)) or first not in BLOCKSIZES:
        return True
    return weight.nested() and (not 1 <= second < 2**31 or second & (second - 1) != 0)


def _wrong_sizes(weight: PackedWeight) -> bool:
    shape = weight.shape
    if not (isinstance(shape, (tuple, list)) and all(map(_is_whole, shape))) or any(side < 0 for side in shape):
        return True
    if weight.transposed() and len(shape) > 2:
        return True
    n, blocks = weight.numel(), weight.blocks()
    sizes: list[Any] = [(weight.nbytes(), -(-n // 2)), (weight.absmax.numel(), blocks)]
    if weight.absmax2 is not None and weight.code2 is not None and weight.offset is not None:  # nested
        second = -(-blocks // weight.blocksize2)
        sizes += [(weight.absmax2.numel(), second), (weight.code2.numel(), 256), (weight.offset.numel(), 1)]
    return n == 0 or any(found != wanted for found, wanted in sizes)


def _too_old(weight: PackedWeight) -> bool:
    packed = weight.packed
    return runtime.runs_on(packed) and runtime.capability_of(packed.device) < compilation.MINIMUM_CAPABILITY


def _not_plain(tensor: Tensor) -> bool:
    """Return whether the kernel would read wrong values from the tensor's memory.

    The tensor is then sparse, not contiguous, or a negative or conjugate view.
    """
    if is_compiling():  # Dynamo cannot trace the other checks
        return not tensor.is_contiguous()
    return tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()


def _subclass(weight: PackedWeight) -> bool:
    """Return whether a tensor of the weight is a subclass that overrides PyTorch's operators.

    ``Dequantizer.of_state`` has already checked the ``__torch_function__`` of the packed bytes.
    """
    packed, *scales = (type(tensor) for tensor in weight.tensors())
    return packed.__torch_dispatch__ is not own_dispatch or not all(map(returns_tensors, scales))  # type: ignore[attr-defined]


# The first guard that returns True decides the Reason. The order matters, because a guard may rely on the guards before
# it having returned False.
GUARDS: tuple[tuple[Reason, Callable[[PackedWeight], bool]], ...] = (
    (Reason.NOT_CUDA, lambda weight: not runtime.runs_on(weight.packed)),
    (Reason.ROCM, lambda weight: torch.version.hip is not None),
    (Reason.GPU_TOO_OLD, _too_old),
    (Reason.QUANT_TYPE, lambda weight: not (isinstance(weight.quant_type, str) and weight.quant_type in CODES)),
    (Reason.OUTPUT_DTYPE, lambda weight: not (isinstance(weight.dtype, torch.dtype) and weight.dtype in OUTPUT_DTYPES)),
    (Reason.STORAGE_DTYPE, lambda weight: weight.packed.dtype not in STORAGE_DTYPES),
    (Reason.STATE_FIELDS, _wrong_types),
    (Reason.TENSOR_SUBCLASS, _subclass),
    (Reason.BLOCKSIZE, _wrong_blocksizes),
    (Reason.MIXED_DEVICES, lambda weight: any(t.device != weight.packed.device for t in weight.tensors())),
    (Reason.NOT_CONTIGUOUS, lambda weight: any(map(_not_plain, weight.tensors()))),
    (Reason.SIZE_MISMATCH, _wrong_sizes),
)


def why_not(weight: PackedWeight, out: Tensor | None = None, ignore: tuple[Reason, ...] = ()) -> Reason | None:
    """Return the first Reason, except those in ``ignore``, why the kernels do not support this weight, or cannot fill ``out``.

    Only properties of the tensors are read, not their values.
    """
    for reason, holds in GUARDS:
        if reason not in ignore and holds(weight):
            return reason
    if out is not None:
        fits = runtime.fits(out, tuple(weight.shape), weight.dtype, weight.packed.get_device())
        if not fits or out.device != weight.packed.device:
            return Reason.OUT_MISMATCH
    return None
