"""The products of a bf16 matrix with narrow ones on PyTorch's tensors."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nf4 import runtime

if runtime.triton is not None:
    from . import kernels

WIDTH_UNIT = 16  # divides every width
LARGEST_RANK = 64  # of one program
BF16, FP32 = torch.bfloat16, torch.float32


class Tile(NamedTuple):
    """Chosen on an H200, layers of 1,024 to 14,336 columns at 512 and 4,096 rows, rank 16."""

    rows: int
    columns: int
    stages: int


TILES = {"project_kernel": Tile(128, 64, 3), "expand_kernel": Tile(64, 128, 1), "correlate_kernel": Tile(64, 128, 3)}
WARPS = 4


@functools.cache
def entry_for(name: str, rank: int, device: torch.device, **flags: bool) -> runtime.KernelEntry:
    """Of a kernel; flags: WIDE, and ADD of expand_kernel.

    Raises:
        KernelUnavailable: it cannot be compiled here, or not while a CUDA graph is captured.
    """
    x, narrow = (torch.empty(16, dtype=dtype, device=device) for dtype in (BF16, FP32))
    sizes = 2, WIDTH_UNIT, 2 if rank % 16 else 16  # what 16 divides is loaded 16 bytes at a time
    arguments = {
        "project_kernel": (x, narrow, narrow, *sizes, 2),
        "expand_kernel": (narrow, narrow, x, 1.0, *sizes),
        "correlate_kernel": (x, narrow, narrow, 1.0, *sizes, 2),
    }[name]
    options = {"num_stages": TILES[name].stages}
    values = constants(name, rank, flags)
    return runtime.compiled(
        getattr(kernels, name), arguments, values, WARPS, device, sizes[2], options=options
    )  # fmt: skip


def constants(name: str, rank: int, flags: dict[str, bool]) -> dict[str, Any]:
    rows, columns, _ = TILES[name]
    block = min(max(runtime.triton.next_power_of_2(rank), 16), LARGEST_RANK)
    return {**flags, "ROWS": rows, "COLUMNS": columns, "RANK": block}


def supports(z: Tensor, factor: Tensor, out_features: int) -> bool:
    """Whether the products of z, [rows, in], with factors like this one, [rank, in], run here."""
    if runtime.triton is None or not runtime.runs_on(z) or (z.dtype, factor.dtype) != (BF16, FP32) or not len(z):
        return False
    if z.shape[1] % WIDTH_UNIT or out_features % WIDTH_UNIT or runtime.capability_of(z.device) < (8, 0):
        return False
    try:
        for wide, add in itertools.product((False, True), repeat=2):
            entry_for("expand_kernel", factor.shape[0], z.device, ADD=add, WIDE=wide)
            for name in ("project_kernel", "correlate_kernel"):
                entry_for(name, factor.shape[0], z.device, WIDE=wide)
    except runtime.KernelUnavailable:
        return False
    return True


def start(name: str, grid: tuple[int, int, int], rank: int, arguments: tuple[Any, ...], **flags: bool) -> None:
    device = arguments[0].device
    call, head, tail, _ = entry_for(name, rank, device, **flags)
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    with runtime.on_device(device):
        call(*grid, runtime.current_stream(device.index), *head, *values, *tail)


def ready(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that loads of 16 bytes can start at."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def parts(programs: int, steps: int, device: torch.device) -> tuple[int, int]:
    """In how many parts a sum of so many steps is split, so that every multiprocessor has work, and the steps of each."""
    wanted = -(-2 * runtime.multiprocessors(device) // programs)
    each = max(-(-steps // wanted), min(steps, 2))
    return -(-steps // each), each


def summed(found: Tensor) -> Tensor:
    return found[0] if len(found) == 1 else found.sum(0)


def project(x: Tensor, factor: Tensor, wide: bool) -> Tensor:
    """x @ factor, fp32 [rows, rank].

    Args:
        x: bf16 [rows, width].
        factor: fp32 [rank, width] if ``wide``, [width, rank] if not; used as [width, rank].
    """
    (rows, width), rank = x.shape, factor.shape[0 if wide else 1]
    tile, blocks = TILES["project_kernel"], -(-rank // LARGEST_RANK)
    programs = -(-rows // tile.rows)
    count, steps = parts(programs * blocks, -(-width // tile.columns), x.device)
    inner = x.new_empty(count, rows, rank, dtype=FP32)
    arguments = ready(x), ready(factor), inner, rows, width, rank, steps
    start("project_kernel", (programs, count, blocks), rank, arguments, WIDE=wide)
    return summed(inner)


def expand(inner: Tensor, factor: Tensor, wide: bool, scale: float, added_to: Tensor | None) -> Tensor:
    """scale * inner @ factor, bf16 [rows, width], rounded once; added to ``added_to``, contiguous, in place where that is given.

    Args:
        inner: [rows, rank], fp32.
        factor: see ``project``; used as [rank, width].
    """
    (rows, rank), width = inner.shape, factor.shape[1 if wide else 0]
    tile = TILES["expand_kernel"]
    out = inner.new_empty(rows, width, dtype=BF16) if added_to is None else added_to
    arguments = ready(inner), ready(factor), out, float(scale), rows, width, rank
    grid = -(-rows // tile.rows), -(-width // tile.columns), 1
    start("expand_kernel", grid, rank, arguments, ADD=added_to is not None, WIDE=wide)
    return out


def correlate(x: Tensor, inner: Tensor, wide: bool, scale: float) -> Tensor:
    """scale * x.T @ inner, as fp32 [rank, width] if ``wide``, else [width, rank]; x: bf16 [rows, width], inner: fp32 [rows, rank]."""
    (rows, width), rank = x.shape, inner.shape[1]
    tile, blocks = TILES["correlate_kernel"], -(-rank // LARGEST_RANK)
    programs = -(-width // tile.columns)
    count, steps = parts(programs * blocks, -(-rows // tile.rows), x.device)
    factor = x.new_empty(count, *((rank, width) if wide else (width, rank)), dtype=FP32)
    arguments = ready(x), ready(inner), factor, float(scale), rows, width, rank, steps
    start("correlate_kernel", (programs, count, blocks), rank, arguments, WIDE=wide)
    return summed(factor)
