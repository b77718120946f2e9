"""The weights that ``verify`` compares, what bitsandbytes makes of them, and how bits are compared."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..nf4.runtime import equal_bits
from ..nf4.weight import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES

# Whole CTAs and part of one, partial last blocks, odd counts, rows that no blocksize divides, rank 1 to 3.
SHAPES = ((256, 512), (96, 136), (33, 77), (3, 5, 44), (4097,), (1, 1))
MATRIX, RAGGED = (256, 192), (65, 42)
LAYOUTS, TRANSPOSED, STORAGE, OFFSETS = "shapes x blocksizes", "transposed", "storage dtypes", "offset dtypes"
PAIRS = "absmax byte x packed byte"


class Case(NamedTuple):
    """One weight to make and compare."""

    family: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int = 64
    nested: bool = True
    quant_type: str = "nf4"
    transposed: bool = False
    storage: torch.dtype = torch.uint8
    offset_dtype: torch.dtype = torch.float32


def every_case(thin: bool = False) -> Iterator[Case]:
    """Every output dtype with everything that changes the kernel or the launch path.

    ``thin``: two of the six shapes for each combination, so that every dtype and blocksize still meets every shape.
    """
    for dtype in OUTPUT_DTYPES:
        combinations = itertools.product(BLOCKSIZES, (True, False), ("nf4", "fp4"))
        for number, (blocksize, nested, kind) in enumerate(combinations):
            for shape in SHAPES[number % 3 :: 3] if thin else SHAPES:
                yield Case(LAYOUTS, shape, dtype, blocksize, nested, kind)
        for shape, nested in itertools.product((MATRIX, RAGGED), (True, False)):
            yield Case(TRANSPOSED, shape, dtype, nested=nested, transposed=True)
        for storage, transposed in itertools.product(STORAGE_DTYPES[1:], (False, True)):
            yield Case(STORAGE, MATRIX, dtype, storage=storage, transposed=transposed)
        for offset, shape in itertools.product(OFFSET_DTYPES[1:], (MATRIX, RAGGED)):
            yield Case(OFFSETS, shape, dtype, offset_dtype=offset)
        for blocksize, kind in itertools.product((64, 512), ("nf4", "fp4")):
            yield Case(PAIRS, (256, 512), dtype, blocksize, quant_type=kind)


def quantized(case: Case, seed: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """The packed weight and QuantState that bitsandbytes makes of a random weight of a transformer's scale.

    FP4's minus zero and zero, which a random weight may lack, are its first elements and its last.
    """
    import bitsandbytes.functional as F

    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(case.shape, generator=generator) * 0.05).to(device=device, dtype=case.dtype)
    options: dict[str, Any] = {
        "quant_type": case.quant_type,
        "quant_storage": case.storage,
        "compress_statistics": case.nested,
    }
    packed, state = F.quantize_4bit(weight, blocksize=case.blocksize, **options)
    if case.nested:
        state.offset = state.offset.to(case.offset_dtype)
    if case.quant_type == "fp4":
        raw = packed.view(torch.uint8).view(-1)
        raw[0] = raw[-1] = 0x80
    if case.family == PAIRS:  # 256 runs of the 256 packed bytes, one absmax byte each
        packed.view(-1).copy_(torch.arange(256, device=device).to(torch.uint8).repeat(256))
        state.absmax.copy_(torch.arange(256, device=device).to(torch.uint8).repeat_interleave(512 // case.blocksize))
    return (packed.t() if case.transposed else packed), state


def ask_bitsandbytes(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight as bitsandbytes dequantizes it.

    On the CPU it is asked for a flat shape: bitsandbytes 0.50.2 starts a new block at every row there when a
    row is even and no multiple of the blocksize. Its CUDA library does not.
    """
    import bitsandbytes.functional as F

    if packed.is_cuda:
        return F.dequantize_4bit(packed, state)
    shape = state.shape
    state.shape = torch.Size((shape.numel(),))
    try:
        weight = F.dequantize_4bit(packed.reshape(-1, 1), state).reshape(shape)
    finally:
        state.shape = shape
    return weight.t() if packed.shape[0] == 1 else weight


def differing(got: torch.Tensor, want: torch.Tensor, zeros_alike: bool) -> torch.Tensor:
    """The flat indices of the elements whose bits differ; ``zeros_alike``: but for the signs of zeros."""
    equal = equal_bits(got, want)
    if zeros_alike:
        equal |= ((got == 0) & (want == 0)).reshape(-1)
    return torch.nonzero(~equal).reshape(-1)


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def use_interpreter_without_gpu() -> None:
    """Import the kernels under Triton's interpreter where there is no GPU, if nobody has imported them yet.

    Only them: the variable is put back, so that Inductor and Unsloth define theirs as usual; Triton itself is
    imported before (its gluon asserts that all of Triton was imported alike).
    """
    if torch.cuda.is_available() or "nf4_patch.nf4.dequantize.kernels" in sys.modules:
        return
    import triton  # noqa: F401

    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from ..nf4.dequantize import kernels  # noqa: F401
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def place_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU (Triton's interpreter)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
