"""Triton kernels that run between the grouped products of a mixture of experts (products with one weight per expert).

The router sends each token to TOP_K experts, so each token has TOP_K rows, one per chosen expert. The rows are sorted
by expert. A slot is an index into the router's weights: the k-th expert of a token has the slot token * TOP_K + k. All
sums are in fp32 and in a fixed order. reference.py defines the results.

The tests run these kernels in Triton's interpreter. There, a kernel cannot call functions that Triton itself writes in
Triton, such as tl.sum and tl.sigmoid, because these functions stay compiled. So the kernels do not use them.
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
    """Multiply each row by its router weight, add the row of ``addend``, and sum the TOP_K rows of each token.

    out[token] = the sum over k of weights[token, k] * rows[row] + addend[row], where row = row_of[token, k]. A program
    computes BLOCK columns of one token.

    rows, addend: [tokens * TOP_K, width]. If ADDEND is false, the kernel does not read ``addend`` and adds nothing.
    weights: [tokens, TOP_K]. If WEIGHTS is false, the kernel does not read ``weights``, and every weight is 1.
    row_of: int64 [tokens, TOP_K]. out: [tokens, width].
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
    """Multiply each row of ``gradient`` by its router weight.

    out[row] = weights[slot] * gradient[row], where slot = slot_of[row]. If ADDEND, the kernel also adds addend[row] to
    out[row]. If WEIGHTS_GRADIENT, it also computes the gradient of the router's weights: weights_gradient[slot] is the
    dot product of gradient[row] and rows[row]. A program computes one row, BLOCK columns at a time.

    gradient, addend, rows, out: [n, width].
    weights, weights_gradient: [n], indexed by slot.
    slot_of: int64 [n].
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
    """Compute out = silu(gate) * up. gate is the first half of the columns of ``rows``, and up is the second half.

    If ADDEND, the kernel first stores total = rows + addend. gate and up are then the halves of ``total``. A program
    computes BLOCK columns of one row.

    rows, addend, total: [n, 2 * width]. out: [n, width].
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
    """Compute the backward of silu_and_mul_kernel: the gradient with respect to ``rows``.

    A program computes BLOCK columns of gate and of up, for one row.

    gradient: [n, width], the gradient with respect to silu(gate) * up.
    rows, out: [n, 2 * width]. ``out`` receives the result.
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
