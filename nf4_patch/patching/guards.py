"""Every "no" has a name: the reasons, and the pure guards that give them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from ..nf4.dequantize import launch
from ..nf4.layout import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES, Layout


class Reason(enum.Enum):
    """Why a call ran the original: (sentence, advice). Advice is "" where there is nothing to do."""

    NOT_4BIT = ("the weight has no bitsandbytes 4-bit state (unquantized, fp8, NVFP4, int4 or a list state)", "")
    NOT_CUDA = ("the packed weight is not on a CUDA GPU", "move the model to the GPU")
    ROCM = ("this PyTorch is built for ROCm; the kernel is NVIDIA PTX", "")
    CAPABILITY = ("the GPU is older than compute capability 7.5 (Tesla T4)", "")
    TRANSFORM = ("a functorch transform (vmap, grad, ...) is active", "")
    MODE = ("a dispatch mode is active, and the fused product is no operator that it could see", "")
    SUBCLASS = ("a tensor of the weight is a subclass with its own dispatch (DTensor, FakeTensor, ...)", "")
    ARGUMENTS = ("called without a quant_state or with arguments that only the original takes", "")
    CPU_PACKING = ("the weight is in bitsandbytes' CPU packing", "move the model with model.to('cuda')")
    QUANT_TYPE = ("quant_type is neither nf4 nor fp4", "")
    DTYPE = (
        "the output dtype is not float16, bfloat16 or float32",
        "set bnb_4bit_compute_dtype to one of them",
    )
    STORAGE = ("quant_storage is not uint8, float16, bfloat16 or float32", "")
    BLOCKSIZE = ("a blocksize is not a power of two that bitsandbytes uses", "")
    LAYOUT = ("a field of the quant_state has another type or dtype than bitsandbytes gives it", "")
    SIZES = (
        "the packed bytes, the absmax and the shape disagree (a shard, or a damaged state)",
        "gather the weight before it is used (FSDP2: do not touch a sharded parameter)",
    )
    NOT_CONTIGUOUS = ("a tensor of the weight is not contiguous", "call .contiguous() on it")
    DEVICES = ("the tensors of the weight are on different devices", "move weight and quant_state together")
    OUT = ("out has another shape, dtype, device, layout or alignment than the result", "")
    MISALIGNED = ("the packed weight does not start on 4 bytes", "")
    NO_MEMORY = (
        "a tensor of the weight has no memory (freed, offloaded or sharded away)",
        "bring the weight back to the GPU before it is used",
    )
    CAPTURING = (
        "the first use fell inside a CUDA graph capture, where nothing can be compiled",
        "run one step before capturing",
    )
    KERNEL_FAILED = ("the kernel could not be compiled or checked on this GPU", "see the error in `nf4-patch doctor`")
    DEFERRED = ("the library's own fused kernel serves this call as fast (NF4_PATCH_DEFER)", "")
    ROWS = ("this GPU, shape and number of rows is not one where the fused product is measured to win", "")
    PRODUCT = ("x, bias or the weight is not what the fused product takes (dtype, blocksize, K, alignment)", "")
    ERROR = ("an error inside nf4_patch", "please report it with the traceback in the log")

    def __init__(self, sentence: str, advice: str):
        self.sentence = sentence
        self.advice = advice

    @property
    def is_expected(self) -> bool:
        """Nothing was missed: no warning, and nothing raised in strict mode."""
        return self in (Reason.NOT_4BIT, Reason.DEFERRED, Reason.ROWS, Reason.PRODUCT, Reason.MODE)


def state_is_odd(quant_state: Any) -> Reason | None:
    """What the QuantState says beyond its tensors."""
    # not getattr: where it is missing, Dynamo traces QuantState.__getattr__ and guards on what that reads
    if quant_state.__dict__.get("packing_format_for_cpu"):
        return Reason.CPU_PACKING
    if quant_state.quant_type not in ("nf4", "fp4"):
        return Reason.QUANT_TYPE
    state2 = quant_state.state2
    if getattr(quant_state, "nested", state2 is not None) != (state2 is not None):
        return Reason.LAYOUT
    if state2 is not None and (state2.dtype is not torch.float32 or getattr(state2, "nested", False)):
        return Reason.LAYOUT
    return None


def _tensors(layout: Layout) -> list[Any]:
    fields = [layout.packed, layout.absmax, layout.code]
    return fields + [layout.absmax2, layout.code2, layout.offset] if layout.nested() else fields


def _is(tensor: Any, dtypes: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in dtypes


def _has_no_address(layout: Layout) -> bool:
    own = torch._C._disabled_torch_dispatch_impl
    return not all(type(tensor).__torch_dispatch__ is own for tensor in _tensors(layout))


def _wrong_types(layout: Layout) -> bool:
    if not _is(layout.code, (torch.float32,)) or layout.packed.dim() == 0:
        return True
    if not layout.nested():
        return not _is(layout.absmax, (torch.float32,))
    return not (
        _is(layout.absmax, (torch.uint8,))
        and _is(layout.absmax2, (torch.float32,))
        and _is(layout.code2, (torch.float32,))
        and _is(layout.offset, OFFSET_DTYPES)
    )


def _wrong_blocksizes(layout: Layout) -> bool:
    second = layout.blocksize2
    return layout.blocksize not in BLOCKSIZES or (layout.nested() and (second < 1 or second & (second - 1) != 0))


def _wrong_sizes(layout: Layout) -> bool:
    shape = layout.shape
    if shape is None or (layout.transposed() and len(shape) > 2):
        return True
    n = layout.numel()
    if (
        n == 0
        or layout.nbytes() != (n + 1) // 2
        or layout.absmax.numel() != layout.blocks()
        or layout.code.numel() != 16
    ):
        return True
    if not layout.nested():
        return False
    assert layout.absmax2 is not None and layout.code2 is not None and layout.offset is not None
    return (
        layout.absmax2.numel() != -(-layout.blocks() // layout.blocksize2)
        or layout.code2.numel() != 256
        or layout.offset.numel() != 1
    )


def _too_old(layout: Layout) -> bool:
    return layout.packed.is_cuda and not _capable(layout.packed.device.index)


def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= launch.MINIMUM_CAPABILITY


# In order: the first that holds is the reason. Each looks only at what the ones before it have vouched for.
GUARDS: tuple[tuple[Reason, Callable[[Layout], bool]], ...] = (
    (Reason.NOT_CUDA, lambda layout: not layout.packed.is_cuda and not launch.INTERPRETED),
    (Reason.ROCM, lambda layout: torch.version.hip is not None and not launch.INTERPRETED),
    (Reason.CAPABILITY, _too_old),
    (Reason.DTYPE, lambda layout: layout.dtype not in OUTPUT_DTYPES),
    (Reason.STORAGE, lambda layout: layout.packed.dtype not in STORAGE_DTYPES),
    (Reason.LAYOUT, _wrong_types),
    (Reason.SUBCLASS, _has_no_address),
    (Reason.BLOCKSIZE, _wrong_blocksizes),
    (Reason.DEVICES, lambda layout: any(t.device != layout.packed.device for t in _tensors(layout))),
    (Reason.NOT_CONTIGUOUS, lambda layout: not all(t.is_contiguous() for t in _tensors(layout))),
    (Reason.SIZES, _wrong_sizes),
)


def check(layout: Layout, ignore: tuple[Reason, ...] = ()) -> Reason | None:
    """The first reason why the kernel must not serve this layout; None when it may. Looks at no data."""
    for reason, holds in GUARDS:
        if reason not in ignore and holds(layout):
            return reason
    return None


def check_out(out: torch.Tensor, layout: Layout) -> Reason | None:
    """``out`` must be what the kernel writes: dense, the layout's shape, dtype and device."""
    fits = (
        tuple(out.shape) == tuple(layout.shape)
        and out.dtype is layout.dtype
        and out.device == layout.packed.device
        and out.is_contiguous()
        and not out.requires_grad
    )
    return None if fits else Reason.OUT
