"""Triton kernels of the fused matmul, which decodes the packed weight while it multiplies.

matmul_4bit_kernel and matmul_4bit_lora_kernel only wrap inline PTX, which small_m_ptx.py generates.
"""

import triton
import triton.language as tl

CONSTRAINTS = tl.constexpr("=r,l,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r")  # an unused result, 9 addresses, 7 integers


@triton.jit(do_not_specialize=["m", "n", "blocks", "shift", "shift2", "sm_partitions", "split_k"])
def matmul_4bit_kernel(
    x, packed, absmax, code, absmax2, code2, offset, out, bias,
    m, n, blocks, shift, shift2, sm_partitions, split_k,
    PTX: tl.constexpr,
):  # fmt: skip
    """Run the PTX of ``small_m_ptx.program``, which documents the operands."""
    tl.inline_asm_elementwise(
        PTX, CONSTRAINTS,
        [
            x.to(tl.int64), packed.to(tl.int64), absmax.to(tl.int64), code.to(tl.int64), absmax2.to(tl.int64),
            code2.to(tl.int64), offset.to(tl.int64), out.to(tl.int64), bias.to(tl.int64),
            m, n, blocks, shift, shift2, sm_partitions, split_k,
        ],
        tl.int32, False, 1,
    )  # fmt: skip


LORA_CONSTRAINTS = tl.constexpr("=r,l,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r,l,l")  # 2 more addresses


@triton.jit(do_not_specialize=["m", "n", "blocks", "shift", "shift2", "sm_partitions", "split_k"])
def matmul_4bit_lora_kernel(
    x, packed, absmax, code, absmax2, code2, offset, out, bias,
    m, n, blocks, shift, shift2, sm_partitions, split_k, inner, b,
    PTX: tl.constexpr,
):  # fmt: skip
    """Run the PTX of ``small_m_ptx.program`` for a weight with an adapter."""
    tl.inline_asm_elementwise(
        PTX, LORA_CONSTRAINTS,
        [
            x.to(tl.int64), packed.to(tl.int64), absmax.to(tl.int64), code.to(tl.int64), absmax2.to(tl.int64),
            code2.to(tl.int64), offset.to(tl.int64), out.to(tl.int64), bias.to(tl.int64),
            m, n, blocks, shift, shift2, sm_partitions, split_k, inner.to(tl.int64), b.to(tl.int64),
        ],
        tl.int32, False, 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["m", "scale"])
def lora_inner_kernel(
    x, a, out, m, scale, K: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute out[i] = scale * x @ a.T over part i, SPAN columns of K, in program i.

    x: bf16 [m, K], m up to ROWS. a: [RANK, K], fp32 if WIDE, else bf16. out: fp32 [parts, m, WIDTH], with zeros after
    RANK columns. BLOCK is a power of two, at least WIDTH. matmul_4bit_lora_kernel adds up the parts.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    i = tl.arange(0, ROWS)[:, None]
    r = tl.arange(0, BLOCK)[None, :]
    total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    for start in tl.static_range(0, SPAN, COLUMNS):
        column = part * SPAN + start + tl.arange(0, COLUMNS)
        left = tl.load(x + i * K + column[None, :], mask=(i < m) & (column < K)[None, :], other=0.0)
        right = tl.load(a + r * K + column[:, None], mask=(r < RANK) & (column < K)[:, None], other=0.0)
        # x is bf16, so split an fp32 A into two bf16 numbers, and multiply x by both. Their sum differs from A by up to
        # about 2^-16 of A's value. The first bf16 number is the upper 16 bits of the fp32 number, which the mask keeps.
        if WIDE:
            high = (right.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
            total = tl.dot(left, (right - high).to(tl.bfloat16), total)
            right = high.to(tl.bfloat16)
        total = tl.dot(left, right, total)
    tl.store(out + (part * m + i) * WIDTH + r, total * scale, mask=(i < m) & (r < WIDTH))


@triton.jit(do_not_specialize=["total", "n"])
def sum_split_k_kernel(part, out, bias, total, n, SPLIT_K: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out[i] = part[0, i] + part[1, i] + ... (+ bias[i % n]), in this order in fp32, rounded once to out's dtype.

    part: fp32 [SPLIT_K, total]. out: [M, n]. bias: [n], read only if BIAS. Each program computes BLOCK elements.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < total
    value = tl.load(part + i, mask=mask)
    for s in tl.static_range(1, SPLIT_K):
        value += tl.load(part + s * total.to(tl.int64) + i, mask=mask)
    if BIAS:
        value += tl.load(bias + i % n, mask=mask).to(tl.float32)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=mask)
