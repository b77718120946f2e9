"""The products of a bf16 matrix with narrow fp32 ones on PyTorch's tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import runtime

if runtime.triton is not None:
    from . import kernels

WIDTH_UNIT = 16  # by which a width is to be divisible
LARGEST_RANK = 64  # of a program


class Tile(NamedTuple):
    """Measured on an H200 with a layer of [4096, 4096] at 512 and 4,096 rows."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = {"project_kernel": Tile(128, 64, 4, 3), "expand_kernel": Tile(64, 128, 4, 1), "correlate_kernel": Tile(64, 128, 4, 3)}


def constants(name: str, rank: int, flags: dict[str, bool]) -> dict[str, Any]:
    tile = TILES[name]
    block = min(max(runtime.triton.next_power_of_2(rank), 16), LARGEST_RANK)
    return {**flags, "ROWS": tile.rows, "COLUMNS": tile.columns, "RANK": block}


def entry_for(
    name: str, rank: int, flags: dict[str, bool], dtype: torch.dtype, device: torch.device
) -> runtime.KernelEntry:
    """
    Raises:
        KernelUnavailable: it cannot be compiled here, or not while a CUDA graph is captured.
    """
    tile, even = TILES[name], rank % 16 == 0
    wide, narrow = (torch.empty(16, dtype=each, device=device) for each in (torch.bfloat16, dtype))
    sizes = (2, WIDTH_UNIT, 16 if even else 2)
    arguments = {
        "project_kernel": (wide, narrow, narrow, *sizes, 2),
        "expand_kernel": (narrow, narrow, wide, 1.0, *sizes),
        "correlate_kernel": (wide, narrow, narrow, 1.0, *sizes, 2),
    }[name]
    return runtime.compiled(
        getattr(kernels, name), arguments, constants(name, rank, flags), tile.warps, device, dtype, even,
        options={"num_stages": tile.stages},
    )  # fmt: skip


def start(name: str, grid: tuple[int, int, int], rank: int, flags: dict[str, bool], *arguments: Any) -> None:
    tensor = arguments[1]  # a narrow one
    if not tensor.is_cuda:  # Triton's interpreter
        getattr(kernels, name)[grid](*arguments, **constants(name, rank, flags))
        return
    call, head, tail, _ = entry_for(name, rank, flags, tensor.dtype, tensor.device)
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    with torch.cuda.device_of(tensor):
        call(*grid, runtime.current_stream(tensor.get_device()), *head, *values, *tail)


def is_used_for(z: Tensor, factor: Tensor, out_features: int) -> bool:
    """Whether the products of z, [rows, in], with factors like this one, [rank, in], run here."""
    if runtime.triton is None or not z.is_cuda or z.dtype is not torch.bfloat16 or z.shape[1] % WIDTH_UNIT or out_features % WIDTH_UNIT:
        return False
    if torch.cuda.get_device_capability(z.device) < (8, 0):  # no products of bf16
        return False
    flags = [{"WIDE": wide} for wide in (True, False)]
    kinds = [("expand_kernel", {"ADD": add, **each}) for each in flags for add in (True, False)]
    if factor.dtype is torch.float32:
        kinds += [(name, each) for each in flags for name in ("project_kernel", "correlate_kernel")]
    try:
        return all(entry_for(*kind, factor.dtype, z.device) for kind in ((n, factor.shape[0], f) for n, f in kinds))
    except runtime.KernelUnavailable:
        return False


def ready(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that loads of 16 bytes can start at."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def parts(programs: int, steps: int, device: torch.device) -> tuple[int, int]:
    """In how many parts a sum of so many steps is split, so that every multiprocessor has work, and the steps of each."""
    wanted = -(-2 * runtime.multiprocessors(device) // programs) if device.type == "cuda" else 2
    each = max(-(-steps // wanted), min(steps, 2))
    return -(-steps // each), each


def blocks(rank: int) -> int:
    return -(-rank // LARGEST_RANK)


def project(x: Tensor, factor: Tensor, wide: bool) -> Tensor:
    """x @ factor, fp32 [rows, rank].

    Args:
        x: bf16 [rows, width].
        factor: fp32 [rank, width] if ``wide``, [width, rank] if not; used as [width, rank].
    """
    (rows, width), rank = x.shape, factor.shape[0 if wide else 1]
    tile = TILES["project_kernel"]
    groups = -(-rows // tile.rows)
    count, steps = parts(groups * blocks(rank), -(-width // tile.columns), x.device)
    inner = torch.empty(count, rows, rank, dtype=torch.float32, device=x.device)
    arguments = ready(x), ready(factor), inner, rows, width, rank, steps
    start("project_kernel", (groups, count, blocks(rank)), rank, {"WIDE": wide}, *arguments)
    return inner[0] if count == 1 else inner.sum(0)


def expand(inner: Tensor, factor: Tensor, wide: bool, scale: float, added_to: Tensor | None) -> Tensor:
    """scale * inner @ factor, bf16 [rows, width], rounded once; added to ``added_to``, contiguous, in place where that is given.

    Args:
        inner: [rows, rank], as from ``project``; fp32 or bf16.
        factor: of inner's dtype, see ``project``; used as [rank, width].
    """
    (rows, rank), width = inner.shape, factor.shape[1 if wide else 0]
    out = inner.new_empty(rows, width, dtype=torch.bfloat16) if added_to is None else added_to
    tile = TILES["expand_kernel"]
    grid = -(-rows // tile.rows), -(-width // tile.columns), 1
    flags = {"ADD": added_to is not None, "WIDE": wide}
    start("expand_kernel", grid, rank, flags, ready(inner), ready(factor), out, float(scale), rows, width, rank)
    return out


def correlate(x: Tensor, inner: Tensor, wide: bool, scale: float) -> Tensor:
    """scale * x.T @ inner, as fp32 [rank, width] if ``wide``, else [width, rank]; of x, bf16 [rows, width], and inner, fp32 [rows, rank]."""
    (rows, width), rank = x.shape, inner.shape[1]
    tile = TILES["correlate_kernel"]
    groups = -(-width // tile.columns)
    count, steps = parts(groups * blocks(rank), -(-rows // tile.rows), x.device)
    found = torch.empty(count, *((rank, width) if wide else (width, rank)), dtype=torch.float32, device=x.device)
    arguments = ready(x), inner, found, float(scale), rows, width, rank, steps
    start("correlate_kernel", (groups, count, blocks(rank)), rank, {"WIDE": wide}, *arguments)
    return found[0] if count == 1 else found.sum(0)
