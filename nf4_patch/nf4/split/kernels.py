"""The Triton kernel that splits fp32 numbers into parts of 16 bits."""

import triton
import triton.language as tl


@triton.jit
def rounded(x):
    """To bf16's precision, to nearest even, as fp32. In integers: the interpreter's own cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["scale", "inner", "n", "chunks", "chunk_stride", "part_stride", "inner_stride", "stride"],
    do_not_specialize_on_alignment=["x"],
)
def split_kernel(
    x, out, scale, inner, n, chunks, chunk_stride, part_stride, inner_stride, stride,
    PARTS: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[p, i, j] = part p of scale * (the sum of x[chunk, part, i, j] over both); see launch.split.

    x: fp32, strides in elements. out: bf16, contiguous [4, inner, n]. A program takes BLOCK values of j of one i.
    """
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = j < n
    total = tl.full([BLOCK], 0.0, tl.float32)
    at = x + i * inner_stride + j * stride
    for _ in range(chunks):
        for part in tl.static_range(PARTS):
            total += tl.load(at + part * part_stride, mask=mask, other=0.0)
        at += chunk_stride
    total *= scale
    high = rounded(total)
    middle = rounded(total - high)
    low = rounded(total - high - middle)
    if RIGHT:
        first, second, third, fourth = low, high, middle, high
    else:
        first, second, third, fourth = high, high, middle, low
    size = inner.to(tl.int64) * n
    to = out + i * n + j
    tl.store(to, first.to(tl.bfloat16), mask=mask)
    tl.store(to + size, second.to(tl.bfloat16), mask=mask)
    tl.store(to + 2 * size, third.to(tl.bfloat16), mask=mask)
    tl.store(to + 3 * size, fourth.to(tl.bfloat16), mask=mask)
