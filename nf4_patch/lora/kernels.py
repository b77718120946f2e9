"""Triton kernels that multiply bf16 matrices by narrow fp32 matrices on tensor cores, at fp32 precision.

Each fp32 number is split into three bf16 numbers. Products of two bf16 numbers are exact in fp32, but tensor cores add
less precisely. So they add only the products of one tile, the smallest first. The sums of the tiles are added in fp32.

    x, addend, out: bf16 [rows, width]. inner: fp32 [rows, rank].
    factor: fp32 [rank, width] if WIDE, otherwise fp32 [width, rank].
    ROWS, COLUMNS, RANK: how many rows, columns and ranks a program computes at a time.

All tensors are contiguous, and width is a multiple of 16. reference.py defines the results.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x):
    """Round fp32 x to the precision of bf16. A cast is not used, because it would truncate in Triton's interpreter."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """Split fp32 x into three bf16 numbers, high, middle and low, whose sum is x."""
    high = rounded(x)
    middle = rounded(x - high)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), rounded(x - high - middle).to(tl.bfloat16)


@triton.jit
def product(a, b):
    """Return a @ b in fp32, for bf16 a and fp32 b."""
    high, middle, low = split(b)
    return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))


@triton.jit
def place(column, r, width, rank, WIDE: tl.constexpr):
    """Return the offset of the factor's element at ``column`` along the width and ``r`` along the rank."""
    if WIDE:
        at = r.to(tl.int64) * width + column
    else:
        at = column.to(tl.int64) * rank + r
    return at


@triton.jit(do_not_specialize=["rows", "steps"])
def project_kernel(
    x, factor, inner, rows, width, rank, steps,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute inner[part] = x @ factor over a part of steps * COLUMNS columns. The caller adds up the parts."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    r = tl.program_id(2) * RANK + tl.arange(0, RANK)[None, :]
    first = tl.program_id(1) * steps * COLUMNS
    total = tl.full([ROWS, RANK], 0.0, tl.float32)
    for start in range(first, min(first + steps * COLUMNS, width), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = tl.load(x + i * width + column[None, :], mask=(i < rows) & (column < width)[None, :], other=0.0)
        column = column[:, None]
        at = factor + place(column, r, width, rank, WIDE)
        total += product(tile, tl.load(at, mask=(column < width) & (r < rank), other=0.0))
    to = inner + (tl.program_id(1).to(tl.int64) * rows + i) * rank + r
    tl.store(to, total, mask=(i < rows) & (r < rank))


@triton.jit(do_not_specialize=["scale", "rows"])
def expand_kernel(
    inner, factor, addend, out, scale, rows, width, rank,
    ADD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute out = scale * inner @ factor, plus addend if ADD, rounded once.

    Partial products below about 2^-16 of the full product are dropped.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, rank, RANK):
        r = start + tl.arange(0, RANK)
        left = tl.load(inner + i * rank + r[None, :], mask=(i < rows) & (r < rank)[None, :], other=0.0)
        r = r[:, None]
        at = factor + place(column, r, width, rank, WIDE)
        right = tl.load(at, mask=(column < width) & (r < rank), other=0.0)
        left_high, left_middle, _ = split(left)
        right_high, right_middle, _ = split(right)
        total += tl.dot(left_high, right_high, tl.dot(left_high, right_middle, tl.dot(left_middle, right_high)))
    total *= scale
    to = i * width + column
    inside = (i < rows) & (column < width)
    if ADD:
        total += tl.load(addend + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, rounded(total).to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["scale", "rows", "steps"])
def correlate_kernel(
    x, inner, factor, scale, rows, width, rank, steps,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute factor[part] = scale * x.T @ inner over a part of steps * ROWS rows. The caller adds up the parts."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.program_id(2) * RANK + tl.arange(0, RANK)[None, :]
    first = tl.program_id(1) * steps * ROWS
    total = tl.full([COLUMNS, RANK], 0.0, tl.float32)
    for start in range(first, min(first + steps * ROWS, rows), ROWS):
        i = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        tile = tl.load(x + i * width + column[None, :], mask=(i < rows) & (column < width)[None, :], other=0.0)
        total += product(tl.trans(tile), tl.load(inner + i * rank + r, mask=(i < rows) & (r < rank), other=0.0))
    column = column[:, None]
    to = factor + tl.program_id(1).to(tl.int64) * width * rank + place(column, r, width, rank, WIDE)
    tl.store(to, scale * total, mask=(column < width) & (r < rank))
