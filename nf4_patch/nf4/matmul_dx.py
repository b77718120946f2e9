"""dX[M, K] = dY[M, N] @ dequantize(weight)[N, K] in one pass over the packed weight: launch table, launch, plain twin."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import calibration, matmul, matmul_dx_ptx, reference
from .layout import Layout
from .matmul import ANY, TILE_COUNTS, Plan, Row


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


def refusal(dy: torch.Tensor, packed: torch.Tensor, blocksize: int, n: int, k: int) -> str | None:
    """Why :func:`matmul_4bit_dx` cannot serve these arguments; None if it can."""
    return matmul.refusal_of("dY", dy, packed, blocksize, n, k, dy.numel() // n, config_for)


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


def matmul_4bit_dx(
    dy: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    absmax2: torch.Tensor | None,
    code2: torch.Tensor | None,
    offset: torch.Tensor | None,
    blocksize: int,
    blocksize2: int,
    n: int,
    k: int,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``dy @ weight``, the gradient of :func:`matmul.matmul_4bit`'s x, with the same promises: the weights are the bits
    of dequantize in dy's dtype, the sums fp32 and in a fixed order.

    Args:
        dy: [..., n], fp16 or bf16; copied where its rows do not start on 16 bytes or n is no multiple of 32.
        packed, absmax, code, absmax2, code2, offset, blocksize, blocksize2, n, k: as for matmul_4bit.
        config: instead of the table's; then the caller answers for :func:`refusal`.
        out: filled and returned if given: contiguous, on 8 bytes, [..., k], dy's dtype and device.

    Returns:
        [..., k] in dy's dtype.

    Raises:
        ValueError: what :func:`refusal` says.
        KernelUnavailable: the kernel is not compiled yet and a CUDA graph is being captured.
    """
    device = dy.device
    m = dy.numel() // n
    if out is None:
        out = torch.empty((*dy.shape[:-1], k), dtype=dy.dtype, device=device)
    if m == 0:
        return out
    if n % 32:
        dy = F.pad(dy, (0, -n % 32))
    if not dy.is_contiguous() or dy.data_ptr() % 16:
        dy = dy.clone(memory_format=torch.contiguous_format)
    nested = absmax2 is not None
    key = (device, dy.dtype, nested, m, n, k, blocksize, blocksize2, config)
    kernel = _kernels.get(key)
    second = (code, code, code)  # a flat weight has none; the kernel reads none
    if absmax2 is not None and code2 is not None and offset is not None:
        second = (absmax2, code2, offset)
    tensors = (dy, packed, absmax, code, *second, out, code)
    if kernel is None or packed.data_ptr() % 16:
        why = refusal(dy[..., :n], packed, blocksize, n, k) if config is None else None
        if why is not None:
            raise ValueError(f"matmul_4bit_dx cannot serve this: {why}; dequantize and multiply")
    if kernel is None:
        chosen = config or config_for(torch.cuda.get_device_capability(device), m, n, k, device.index)
        cut = plan(chosen, matmul.processors(device), m, n, k, dy.dtype is torch.float16, nested)
        with torch.cuda.device(device):
            kernel = matmul.Kernel(tensors, cut, chosen.along_k * chosen.along_n, blocksize, blocksize2, m, n, k)
        _kernels[key] = kernel
    kernel(tensors)
    return out


def matmul_dx_reference(dy: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same in plain torch: the weight rounded to dy's dtype, products and sums in fp32, one rounding at the end."""
    weight = reference.dequantize(layout._replace(dtype=dy.dtype, packed=layout.bytes()))
    return (dy.float() @ weight.float()).to(dy.dtype)
