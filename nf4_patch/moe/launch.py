"""The kernels of routing on PyTorch's tensors: contiguous, all on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize.compilation import MINIMUM_CAPABILITY
from ..nf4.runtime import on_device, triton

if triton is not None:
    from . import kernels

BLOCK = 1024  # columns of a program
WARPS = 4


def supports(tensor: Tensor) -> bool:
    """Whether the kernels run where a tensor is."""
    return triton is not None and runtime.runs_on(tensor) and runtime.capability_of(tensor.device) >= MINIMUM_CAPABILITY


def empty(like: Tensor, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a new tensor [rows, columns] on the device of ``like``, allocated without the dispatcher.

    Selective checkpointing can keep the result of any op that the dispatcher sees, and hand it to the recompute. Our kernels would
    then write into it a second time.
    """
    with on_device(like.device):
        result: Tensor = runtime.empty_strided_cuda((rows, columns), (columns, 1), dtype or like.dtype)
        return result


def start(
    kernel: Any, tensors: tuple[Tensor, ...], width: int, rows: int, by_block: bool = True, **constants: Any
) -> None:
    """One program a row, and by block of columns."""
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (rows, -(-width // block) if by_block else 1)
    if rows:
        with on_device(tensors[0].device):
            kernel[grid](*tensors, width, BLOCK=block, num_warps=WARPS, **constants)


def combine(
    rows: Tensor, row_of: Tensor, dtype: torch.dtype, weights: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    """The sum over k of weight * row + addend of each token's rows, [tokens, width] in ``dtype``, added in fp32.

    Args:
        rows, addend: [tokens * top_k, width], of one dtype.
        row_of: int64 [tokens, top_k].
        weights: [tokens, top_k]; None: 1.
    """
    tokens, top_k = row_of.shape
    out = empty(rows, tokens, rows.shape[1], dtype=dtype)
    tensors = rows, rows if addend is None else addend, rows if weights is None else weights, row_of, out
    given = {"ADDEND": addend is not None, "WEIGHTS": weights is not None}
    start(kernels.combine_kernel, tensors, rows.shape[1], tokens, TOP_K=top_k, **given)
    return out


def weigh(
    gradient: Tensor, addend: Tensor | None, rows: Tensor, slot_of: Tensor, weights: Tensor, of_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Each row's gradient times its weight, plus addend; and where asked for the gradient of the weights, gradient . row.

    Args:
        gradient, addend, rows: [tokens * top_k, width].
        slot_of: int64 [tokens * top_k], the index in ``weights``, [tokens, top_k], of each row.
    """
    out, found = empty(gradient, *gradient.shape), empty(weights, *weights.shape)
    tensors = gradient, gradient if addend is None else addend, rows, weights, slot_of, out, found
    given = {"ADDEND": addend is not None, "WEIGHTS_GRADIENT": of_weights}
    start(kernels.weigh_kernel, tensors, rows.shape[1], rows.shape[0], by_block=False, **given)
    return out, found if of_weights else None


def silu_and_mul(rows: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up, [n, width], and [gate, up], [n, 2 * width], which is rows + addend.

    Args:
        rows, addend: [n, 2 * width], of one dtype. Neither is written into. Without an ``addend`` [gate, up] is ``rows`` itself.
    """
    out = empty(rows, rows.shape[0], rows.shape[1] // 2)
    total = rows if addend is None else empty(rows, *rows.shape)
    tensors = rows, rows if addend is None else addend, total, out
    start(kernels.silu_and_mul_kernel, tensors, out.shape[1], out.shape[0], ADDEND=addend is not None)
    return out, total


def silu_and_mul_backward(rows: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to ``rows``, [n, 2 * width], given the gradient of silu(gate) * up, [n, width]."""
    out = empty(rows, *rows.shape)
    start(kernels.silu_and_mul_backward_kernel, (rows, gradient, out), gradient.shape[1], gradient.shape[0])
    return out
