"""Triton kernels that run between the grouped products of a mixture of experts. reference.py defines the results.

Rows are sorted by expert, TOP_K per token. All sums are in fp32 and in a fixed order. tl.sum and tl.sigmoid are not used,
because Triton's interpreter cannot run them.
"""

import triton
import triton.language as tl


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def combine_kernel(
    rows, addend, weights, row_of, out, width,
    TOP_K: tl.constexpr, ADDEND: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out[token], the sum over k of weights[token, k] * rows[row] + addend[row], where row = row_of[token, k].

    rows, addend: [tokens * TOP_K, width]. weights: [tokens, TOP_K], 1 without WEIGHTS. row_of: int64 [tokens, TOP_K].
    out: [tokens, width]. A program computes BLOCK columns of one token.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.full([BLOCK], 0.0, tl.float32)
    for k in tl.static_range(TOP_K):
        at = tl.load(row_of + token * TOP_K + k) * width + column
        row = tl.load(rows + at, mask=mask).to(tl.float32)
        if WEIGHTS:
            row *= tl.load(weights + token * TOP_K + k).to(tl.float32)
        if ADDEND:
            row += tl.load(addend + at, mask=mask).to(tl.float32)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def weigh_kernel(
    gradient, addend, rows, weights, slot_of, out, weights_gradient, width,
    ADDEND: tl.constexpr, WEIGHTS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out[row] = weights[slot] * gradient[row], plus addend[row] if ADDEND, where slot = slot_of[row].

    If WEIGHTS_GRADIENT, weights_gradient[slot] is the dot product of gradient[row] and rows[row]. A program computes one
    row.

    gradient, addend, rows, out: [n, width]. weights, weights_gradient: [n]. slot_of: int64 [n].
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + row)
    weight = tl.load(weights + slot).to(tl.float32)
    products = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        at = row * width + column
        value = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        total = weight * value
        if ADDEND:
            total += tl.load(addend + at, mask=mask).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
        if WEIGHTS_GRADIENT:
            products += value * tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTS_GRADIENT:
        tl.store(weights_gradient + slot, tl.reduce(products, 0, add).to(weights_gradient.dtype.element_ty))


@triton.jit
def silu_and_mul_kernel(rows, addend, total, out, width, ADDEND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out = silu(gate) * up, where gate and up are the column halves of rows or, if ADDEND, of total = rows + addend.

    rows, addend, total: [n, 2 * width]. out: [n, width]. A program computes BLOCK columns of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = row * 2 * width + column
    gate = tl.load(rows + at, mask=mask).to(tl.float32)
    up = tl.load(rows + at + width, mask=mask).to(tl.float32)
    if ADDEND:
        gate += tl.load(addend + at, mask=mask).to(tl.float32)
        up += tl.load(addend + at + width, mask=mask).to(tl.float32)
        tl.store(total + at, gate.to(total.dtype.element_ty), mask=mask)
        tl.store(total + at + width, up.to(total.dtype.element_ty), mask=mask)
    tl.store(out + row * width + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_backward_kernel(rows, gradient, out, width, BLOCK: tl.constexpr):
    """Compute out, the gradient with respect to ``rows``, given the gradient with respect to silu(gate) * up.

    gradient: [n, width]. rows, out: [n, 2 * width]. A program computes BLOCK columns of gate and of up, for one row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = row * 2 * width + column
    gate = tl.load(rows + at, mask=mask).to(tl.float32)
    up = tl.load(rows + at + width, mask=mask).to(tl.float32)
    value = tl.load(gradient + row * width + column, mask=mask).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    of_gate = value * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + at, of_gate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + width, (value * gate * sigmoid).to(out.dtype.element_ty), mask=mask)
