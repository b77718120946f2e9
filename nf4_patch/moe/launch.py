"""Launch the kernels of kernels.py on PyTorch tensors.

kernels.py says what the kernels do, and explains the words row and slot. reference.py defines the results. All tensors
of a call are on one device. No function writes into its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize.compilation import MINIMUM_CAPABILITY
from ..nf4.runtime import empty, ready, triton

if triton is not None:
    from . import kernels

BLOCK = 1024  # A program computes at most this many columns at a time.


def supports(tensor: Tensor) -> bool:
    """Return whether the kernels can run on the device of ``tensor``."""
    if triton is None or not runtime.runs_on(tensor) or runtime.is_interpreted(kernels.combine_kernel):
        return False
    return runtime.capability_of(tensor.device) >= MINIMUM_CAPABILITY


def start(
    kernel: Any, tensors: tuple[Tensor, ...], width: int, rows: int, by_block: bool = True, **constants: Any
) -> None:
    """Launch a kernel on all rows.

    Args:
        tensors: the tensor arguments of the kernel.
        width: the number of columns.
        rows: the number of rows.
        by_block: True launches one program per row and block of columns. False launches one program per row.
        constants: the compile-time constants of the kernel.
    """
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = rows, -(-width // block) if by_block else 1, 1
    kind = *(tensor.dtype for tensor in tensors), width % 16 == 0
    if rows:
        runtime.launch(kernel, grid, (*map(ready, tensors), width), {**constants, "BLOCK": block}, *kind)


def combine(
    rows: Tensor, row_of: Tensor, dtype: torch.dtype, weights: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    """Multiply each row by its router weight, add the addend, and sum the rows of each token. Compute in fp32.

    Args:
        rows, addend: [tokens * top_k, width], both of the same dtype. Without an addend, nothing is added.
        row_of: int64 [tokens, top_k], the indices of each token's rows.
        weights: the router's weights, [tokens, top_k]. None means that every weight is 1.

    Returns:
        [tokens, width] in ``dtype``.
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
    """Multiply each row of a gradient by its router weight, and add the addend.

    Args:
        gradient, addend, rows: [tokens * top_k, width].
        slot_of: int64 [tokens * top_k], the index of each row's weight in the flattened ``weights``.
        weights: the router's weights, [tokens, top_k].
        of_weights: also compute the gradient of the router's weights.

    Returns:
        First, the result, [tokens * top_k, width]. Second, the gradient of the router's weights, [tokens, top_k], or
        None without ``of_weights``. The gradient of a row's weight is the dot product of the row in ``gradient`` and
        the row in ``rows``.
    """
    out, found = empty(gradient, *gradient.shape), empty(weights, *weights.shape)
    tensors = gradient, gradient if addend is None else addend, rows, weights, slot_of, out, found
    given = {"ADDEND": addend is not None, "WEIGHTS_GRADIENT": of_weights}
    start(kernels.weigh_kernel, tensors, rows.shape[1], rows.shape[0], by_block=False, **given)
    return out, found if of_weights else None


def silu_and_mul(rows: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up, [n, width], and the sum rows + addend, [n, 2 * width].

    gate is the first half of the columns of this sum, and up is the second half. Without ``addend``, the sum is
    ``rows`` itself, not a copy.

    Args:
        rows, addend: [n, 2 * width], both of the same dtype.
    """
    out = empty(rows, rows.shape[0], rows.shape[1] // 2)
    total = rows if addend is None else empty(rows, *rows.shape)
    tensors = rows, rows if addend is None else addend, total, out
    start(kernels.silu_and_mul_kernel, tensors, out.shape[1], out.shape[0], ADDEND=addend is not None)
    return out, total


def silu_and_mul_backward(rows: Tensor, gradient: Tensor) -> Tensor:
    """Compute the backward of silu(gate) * up. Return the gradient with respect to ``rows``, [n, 2 * width].

    Args:
        rows: [n, 2 * width]. The first half of the columns is gate, and the second half is up.
        gradient: [n, width], the gradient with respect to silu(gate) * up.
    """
    out = empty(rows, *rows.shape)
    start(kernels.silu_and_mul_backward_kernel, (rows, gradient, out), gradient.shape[1], gradient.shape[0])
    return out
