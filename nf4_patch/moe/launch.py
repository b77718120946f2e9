"""Launch the kernels of kernels.py. All tensors are on one device. Arguments are not written to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize.compilation import MINIMUM_CAPABILITY
from ..nf4.runtime import empty, ready, triton

if triton is not None:
    from . import kernels

BLOCK = 1024  # a program computes at most this many columns at a time


def supports(tensor: Tensor) -> bool:
    if triton is None or not runtime.runs_on(tensor) or runtime.is_interpreted(kernels.combine_kernel):
        return False
    return runtime.capability_of(tensor.device) >= MINIMUM_CAPABILITY


def start(
    kernel: Any, tensors: tuple[Tensor, ...], width: int, rows: int, by_block: bool = True, **constants: Any
) -> None:
    """Launch a kernel with one program per row or, with ``by_block``, per row and block of columns."""
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = rows, -(-width // block) if by_block else 1, 1
    kind = *(tensor.dtype for tensor in tensors), width % 16 == 0
    if rows:
        runtime.launch(kernel, grid, (*map(ready, tensors), width), {**constants, "BLOCK": block}, *kind)


def combine(
    rows: Tensor, row_of: Tensor, dtype: torch.dtype, weights: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    """Return the sum over each token's rows of row * weight + addend, in fp32, as ``dtype`` [tokens, width].

    rows, addend: [tokens * top_k, width], of one dtype. row_of: int64 [tokens, top_k], the indices of each token's rows.
    weights: [tokens, top_k]. None means that all are 1.
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
    """Return gradient * weight + addend for each row.

    With ``of_weights``, also return the gradient of the weights, which is the dot product of gradient and rows for each
    row.

    gradient, addend, rows: [tokens * top_k, width]. slot_of: int64 [tokens * top_k]. weights: [tokens, top_k].
    """
    out, found = empty(gradient, *gradient.shape), empty(weights, *weights.shape)
    tensors = gradient, gradient if addend is None else addend, rows, weights, slot_of, out, found
    given = {"ADDEND": addend is not None, "WEIGHTS_GRADIENT": of_weights}
    start(kernels.weigh_kernel, tensors, rows.shape[1], rows.shape[0], by_block=False, **given)
    return out, found if of_weights else None


def silu_and_mul(rows: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up, [n, width], and total = rows + addend, [n, 2 * width], whose halves are gate and up.

    Without ``addend``, the total is ``rows`` itself.
    """
    out = empty(rows, rows.shape[0], rows.shape[1] // 2)
    total = rows if addend is None else empty(rows, *rows.shape)
    tensors = rows, rows if addend is None else addend, total, out
    start(kernels.silu_and_mul_kernel, tensors, out.shape[1], out.shape[0], ADDEND=addend is not None)
    return out, total


def silu_and_mul_backward(rows: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of ``silu_and_mul`` with respect to ``rows``."""
    out = empty(rows, *rows.shape)
    start(kernels.silu_and_mul_backward_kernel, (rows, gradient, out), gradient.shape[1], gradient.shape[0])
    return out
