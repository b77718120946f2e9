"""dX[M, K] = dY[M, N] @ dequantize(weight)[N, K] in one pass over the packed weight: launch table, launch, plain twin."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..dequantize import reference
from ..layout import Layout
from . import backward_ptx as matmul_dx_ptx
from . import calibration
from . import launch as matmul
from .launch import ANY, TILE_COUNTS, Plan, Row


class Config(NamedTuple):
    """How the work is cut; see matmul_dx_ptx.program for the first five."""

    words: int
    depth: int
    along_k: int
    along_n: int
    ahead: int = 1
    resident: int = 1  # programs a multiprocessor; N is sliced until there are as many
    cluster: int = 1  # at most so many slices, which add up through each other's shared memory; 1: by a second launch


# The first row that fits is taken; no row: the caller dequantizes and multiplies.
# H200, torch 2.11, triton 3.6.0, bf16, us a call, CUDA graph over weights that overflow the L2:
#                  14336x4096     4096x14336     4096x4096      1024x4096     8192x8192      28672x8192
#   M = 1 / 8      22.9 / 23.2    21.3 / 22.2    9.6 / 10.1     5.3 / 5.6     24.7 / 25.1    70.2 / 70.7
#   M = 16         25.8           24.5           10.6           6.0           28.4           80.7
#   M = 32 / 64    29.7 / 39.2    29.3 / 42.0    13.0 / 16.0    6.4 / -       33.7 / 43.8    92.8 / 139
# Clusters of two instead of a second launch, M = 64: 41.3 -> 38.8, 44.8 -> 44.7, 17.2 -> 16.0, 9.2 -> 8.3. 16 of eight, or
# 32 of four, do not find room at once (M = 8, 14336x4096: 34 to 41). At 1024x4096 and M = 64 dequantize + matmul takes 7.8.
ROWS: tuple[Row, ...] = (
    Row((9, 0), 8, 8448, 5000, Config(words=4, depth=8, along_k=1, along_n=8)),
    Row((9, 0), 16, 8448, 5000, Config(words=2, depth=8, along_k=2, along_n=8)),
    Row((9, 0), 16, 8448, 1, Config(words=1, depth=8, along_k=1, along_n=16, ahead=2, cluster=2)),
    Row((9, 0), 32, 8448, 5000, Config(words=2, depth=8, along_k=2, along_n=4)),
    Row((9, 0), 32, 8448, 1, Config(words=1, depth=8, along_k=1, along_n=8, ahead=2, cluster=2)),
    Row((9, 0), 64, 8448, 2000, Config(words=1, depth=8, along_k=1, along_n=8, cluster=2)),
    Row((9, 0), 8, ANY, 1, Config(words=4, depth=4, along_k=1, along_n=8, resident=2, cluster=4)),
    Row((9, 0), 16, ANY, 1, Config(words=2, depth=8, along_k=1, along_n=8, resident=2, cluster=4)),
    Row((9, 0), 32, ANY, 1, Config(words=1, depth=8, along_k=2, along_n=8, cluster=2)),
    Row((9, 0), 64, ANY, 2000, Config(words=1, depth=8, along_k=2, along_n=4, cluster=2)),
)


def config_for(capability: tuple[int, int], m: int, n: int, k: int, device: int | None = None) -> Any:
    """The measured config for ``m`` rows of dY and an [n, k] weight; None where none is."""
    return matmul.config_for(capability, m, n, k, ROWS, device, backward=True)


def refusal(dy: torch.Tensor, layout: Layout) -> str | None:
    """Why :func:`matmul_4bit_dx` cannot serve these arguments; None if it can."""
    return matmul.refusal_of("dY", dy, layout, dy.numel() // layout.shape[0], config_for)


def plan(config: Config, processors: int, m: int, n: int, k: int, half: bool, nested: bool) -> Plan:
    step = 4 * config.depth
    groups = -(-k // (64 * config.words * config.along_k))
    slices = max(1, min(processors * config.resident // groups, -(-n // (step * config.along_n))))
    columns = next(count for count in TILE_COUNTS if m <= 8 * count)
    cluster = min(config.cluster, 1 << (slices.bit_length() - 1))
    if config.cluster > 1:
        slices = 1
    text = matmul_dx_ptx.program(*config[:2], columns, *config[2:5], half, nested, n % step != 0, slices > 1, cluster)
    return Plan(groups, groups * slices, slices, text, cluster)


_kernels: dict[tuple[Any, ...], matmul.Kernel] = {}
calibration.dependents.append(_kernels.clear)


def product(dy: torch.Tensor, layout: Layout, config: Config | None = None) -> matmul.Product:
    """:func:`matmul_4bit_dx` resolved, for every dY of this shape."""
    n, k = layout.shape
    m = dy.numel() // n
    key = (dy.device, dy.dtype, layout.nested(), m, n, k, layout.blocksize, layout.blocksize2, config)
    kernel = _kernels.get(key)
    if kernel is None:
        chosen = config or config_for(torch.cuda.get_device_capability(dy.device), m, n, k, dy.device.index)
        half = dy.dtype is torch.float16
        cut = plan(chosen, matmul.multiprocessors(dy.device), m, n, k, half, layout.nested())
        warps = chosen.along_k * chosen.along_n
        with torch.cuda.device(dy.device):
            kernel = _kernels[key] = matmul.Kernel(dy.device, dy.dtype, layout, cut, warps, m, k, False)
    return matmul.Product(kernel, dy, layout, k, pad=-n % 32)


def matmul_4bit_dx(
    dy: torch.Tensor, layout: Layout, config: Config | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """``dy @ weight``, the gradient of :func:`matmul.matmul_4bit`'s x, with the same promises: the weights are the bits
    of dequantize in dy's dtype, the sums fp32 and in a fixed order.

    Args:
        dy: [..., N], fp16 or bf16; copied where its rows do not start on 16 bytes or N is no multiple of 32.
        layout: as for matmul_4bit.
        config: instead of the table's; then the caller answers for :func:`refusal`.
        out: filled and returned if given: contiguous, [..., K], dy's dtype and device.

    Returns:
        [..., K] in dy's dtype.

    Raises:
        ValueError: what :func:`refusal` says.
        KernelUnavailable: the kernel is not compiled yet and a CUDA graph is being captured.
    """
    why = refusal(dy, layout) if config is None and dy.numel() else None
    if why is not None:
        raise ValueError(f"matmul_4bit_dx cannot serve this: {why}; dequantize and multiply")
    if dy.numel() == 0:
        return dy.new_empty((*dy.shape[:-1], layout.shape[1])) if out is None else out
    return product(dy, layout, config)(dy, out)


def matmul_dx_reference(dy: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same in plain torch: the weight rounded to dy's dtype, products and sums in fp32, one rounding at the end."""
    weight = reference.dequantize(layout._replace(dtype=dy.dtype, packed=layout.bytes()))
    return (dy.float() @ weight.float()).to(dy.dtype)
