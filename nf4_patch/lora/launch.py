"""Functions that multiply a bf16 tensor by narrow fp32 tensors. They launch the kernels of kernels.py."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.runtime import empty, ready

if runtime.triton is not None:
    from . import kernels

WIDTH_UNIT = 16  # every width is a multiple of this
LARGEST_RANK = 64  # a program computes at most this many ranks at a time
BF16, FP32 = torch.bfloat16, torch.float32


class Tile(NamedTuple):
    """Rows and columns that a program multiplies at a time, and stages of Triton's software pipeline.

    The values were chosen on an H200, for layers of 1,024 to 14,336 columns, 512 and 4,096 rows, and rank 16.
    """

    rows: int
    columns: int
    stages: int


TILES = {"project_kernel": Tile(128, 64, 3), "expand_kernel": Tile(64, 128, 1), "correlate_kernel": Tile(64, 128, 3)}


@functools.cache
def constants(name: str, rank: int, **flags: bool) -> dict[str, Any]:
    """Return a kernel's constexprs, in the order of its signature. ``flags`` are WIDE and, for expand_kernel, ADD."""
    rows, columns, _ = TILES[name]
    block = min(max(runtime.triton.next_power_of_2(rank), 16), LARGEST_RANK)
    return {**flags, "ROWS": rows, "COLUMNS": columns, "RANK": block}


def start(name: str, grid: tuple[int, int, int] | None, rank: int, arguments: tuple[Any, ...], **flags: bool) -> None:
    values, stages = constants(name, rank, **flags), TILES[name].stages
    runtime.launch(getattr(kernels, name), grid, arguments, values, rank % 16 == 0, num_stages=stages)


@functools.cache
def compile_kernels(rank: int, device: torch.device) -> None:
    """Compile every kernel for this rank.

    Raises:
        KernelUnavailable: a kernel cannot be compiled, or is not compiled yet while a CUDA graph is being captured.
    """
    x, narrow = (torch.empty(16, dtype=dtype, device=device) for dtype in (BF16, FP32))
    sizes = 2, WIDTH_UNIT, rank
    for wide in (False, True):
        start("project_kernel", None, rank, (x, narrow, narrow, *sizes, 2), WIDE=wide)
        start("correlate_kernel", None, rank, (x, narrow, narrow, 1.0, *sizes, 2), WIDE=wide)
        for add in (False, True):
            start("expand_kernel", None, rank, (narrow, narrow, x, x, 1.0, *sizes), ADD=add, WIDE=wide)


def supports(z: Tensor, factor: Tensor, out_features: int) -> bool:
    """Return whether the kernels support z [rows, in], A = ``factor`` and B [out_features, rank]."""
    if runtime.triton is None or not runtime.runs_on(z) or (z.dtype, factor.dtype) != (BF16, FP32) or not len(z):
        return False
    if z.shape[1] % WIDTH_UNIT or out_features % WIDTH_UNIT or runtime.capability_of(z.device) < (8, 0):
        return False
    try:
        compile_kernels(factor.shape[0], z.device)
    except runtime.KernelUnavailable:
        return False
    return True


def parts(programs: int, steps: int, device: torch.device) -> tuple[int, int]:
    """Split a sum over ``steps`` tiles into parts, so that every multiprocessor has work.

    Return the number of parts and the tiles per part.
    """
    wanted = -(-2 * runtime.multiprocessors(device) // programs)
    each = max(-(-steps // wanted), min(steps, 2))
    return -(-steps // each), each


def summed(found: Tensor) -> Tensor:
    return found[0] if len(found) == 1 else found.sum(0)


def project(x: Tensor, factor: Tensor, wide: bool) -> Tensor:
    """Return x @ factor, fp32 [rows, rank].

    x is bf16 [rows, width], and factor fp32 [width, rank], transposed if ``wide``.
    """
    (rows, width), rank = x.shape, factor.shape[0 if wide else 1]
    tile, blocks = TILES["project_kernel"], -(-rank // LARGEST_RANK)
    programs = -(-rows // tile.rows)
    count, steps = parts(programs * blocks, -(-width // tile.columns), x.device)
    inner = empty(x, count, rows, rank, dtype=FP32)
    arguments = ready(x), ready(factor), inner, rows, width, rank, steps
    start("project_kernel", (programs, count, blocks), rank, arguments, WIDE=wide)
    return summed(inner)


def expand(inner: Tensor, factor: Tensor, wide: bool, scale: float, addend: Tensor | None) -> Tensor:
    """Return scale * inner @ factor + addend, bf16 [rows, width], rounded once.

    The result is a new tensor, because a dispatch mode might hold the addend. inner is fp32 [rows, rank], and factor fp32
    [rank, width] if ``wide``, otherwise its transpose.
    """
    (rows, rank), width = inner.shape, factor.shape[1 if wide else 0]
    tile = TILES["expand_kernel"]
    out = empty(inner, rows, width, dtype=BF16)
    arguments = (
        ready(inner),
        ready(factor),
        out if addend is None else ready(addend),
        out,
        float(scale),
        rows,
        width,
        rank,
    )
    grid = -(-rows // tile.rows), -(-width // tile.columns), 1
    start("expand_kernel", grid, rank, arguments, ADD=addend is not None, WIDE=wide)
    return out


def correlate(x: Tensor, inner: Tensor, wide: bool, scale: float) -> Tensor:
    """Return scale * x.T @ inner, fp32 [width, rank], transposed if ``wide``.

    x is bf16 [rows, width], and inner fp32 [rows, rank].
    """
    (rows, width), rank = x.shape, inner.shape[1]
    tile, blocks = TILES["correlate_kernel"], -(-rank // LARGEST_RANK)
    programs = -(-width // tile.columns)
    count, steps = parts(programs * blocks, -(-rows // tile.rows), x.device)
    factor = empty(x, count, *((rank, width) if wide else (width, rank)), dtype=FP32)
    arguments = ready(x), ready(inner), factor, float(scale), rows, width, rank, steps
    start("correlate_kernel", (programs, count, blocks), rank, arguments, WIDE=wide)
    return summed(factor)
