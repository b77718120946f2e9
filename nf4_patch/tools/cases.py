"""The weights that ``nf4-patch verify`` compares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..nf4.weight import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES

# These shapes cover whole and partial CTAs, partial last blocks, odd element counts, rows whose length is a multiple of
# no blocksize, and 1 to 3 dimensions.
SHAPES = ((256, 512), (96, 136), (33, 77), (3, 5, 44), (4097,), (1, 1))
MATRIX, RAGGED = (256, 192), (65, 42)
LAYOUTS, TRANSPOSED, STORAGE, OFFSETS = "shapes x blocksizes", "transposed", "storage dtypes", "offset dtypes"
PAIRS = "absmax byte x packed byte"


class Case(NamedTuple):
    """A weight to quantize and compare."""

    family: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int = 64
    nested: bool = True
    quant_type: str = "nf4"
    transposed: bool = False
    storage: torch.dtype = torch.uint8
    offset_dtype: torch.dtype = torch.float32


def every_case() -> Iterator[Case]:
    """Yield cases that cover, for each dtype, all properties that affect the kernel or its launch."""
    for dtype in OUTPUT_DTYPES:
        for blocksize, nested, kind, shape in itertools.product(BLOCKSIZES, (True, False), ("nf4", "fp4"), SHAPES):
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
    """Return a random weight packed by bitsandbytes, and its QuantState.

    An FP4 weight begins and ends with minus zero and zero, which a random one might lack.
    """
    import bitsandbytes.functional as F

    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(case.shape, generator=generator) * 0.05).to(device=device, dtype=case.dtype)
    kind: dict[str, Any] = {"quant_type": case.quant_type, "quant_storage": case.storage}
    packed, state = F.quantize_4bit(weight, blocksize=case.blocksize, compress_statistics=case.nested, **kind)
    if case.nested:
        state.offset = state.offset.to(case.offset_dtype)
    if case.quant_type == "fp4":
        raw = packed.view(torch.uint8).view(-1)
        raw[0] = raw[-1] = 0x80
    if case.family == PAIRS:  # pair each packed byte with each absmax byte
        packed.view(-1).copy_(torch.arange(256, device=device).to(torch.uint8).repeat(256))
        state.absmax.copy_(torch.arange(256, device=device).to(torch.uint8).repeat_interleave(512 // case.blocksize))
    return (packed.t() if case.transposed else packed), state


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def place_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
