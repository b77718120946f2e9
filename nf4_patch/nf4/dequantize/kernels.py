"""Triton kernels, and nothing but @triton.jit functions. A parameter in capitals is known at compile time."""

import triton
import triton.language as tl

# The 16 lanes of a half warp share one table of rounded products (ptx.py). If their elements lie in two blocks, those of the
# second block start at lane 8.
HALF_WARP = tl.constexpr(16)
UNROLL = tl.constexpr(2)  # steps per program; in a step, each thread decodes one group of elements


@triton.jit
def multiply(a, b, FTZ):
    """Return the fp32 product, rounded once. FTZ flushes subnormals to zero, like code built with --use_fast_math."""
    if FTZ:
        return tl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    else:
        return a * b


@triton.jit
def look_up(code, nibble, FTZ):
    """Return the value of a nibble.

    For FP4's nibble 8, bitsandbytes' CUDA tables hold minus zero, but the code tensor of its QuantState holds plus zero. If FTZ
    is set, the kernel follows CUDA's arithmetic, so it returns minus zero.
    """
    value = tl.load(code + nibble)
    if FTZ:
        # The sign is computed in integers, because Triton turns the literal -0.0 into plus zero.
        sign = ((nibble == 8) & (value == 0.0)).to(tl.int32) << 31
        value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return value


@triton.jit
def round_to(value, dtype):
    """Round fp32 ``value`` to ``dtype``, to nearest even, and return its bits in the low bits of an int32."""
    if dtype == tl.float32:
        return value.to(tl.int32, bitcast=True)
    elif dtype == tl.float16:
        return value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        # Integer instructions round here. Triton's interpreter truncates fp32 to bf16, and sm_75 has no conversion.
        bits = value.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int32)
        return tl.where(value == value, rounded, 0x7FFF)


@triton.jit
def store_elements(out, element, nibble, scale, code, mask, FTZ):
    """Decode and store single elements, bit-identical to ptx.decode.

    Without PTX (the portable path), this function decodes all elements. With PTX, it decodes only the elements past the
    last whole 32-bit word.
    """
    bits = round_to(multiply(look_up(code, nibble, FTZ), scale, FTZ), out.dtype.element_ty)
    if out.dtype.element_ty == tl.float32:
        tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + element, bits, mask=mask)
    else:
        tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + element, bits.to(tl.int16), mask=mask)


@triton.jit
def block_scale(first, second, code2, offset, FLAT, FTZ):
    """Return a block's fp32 scale from its absmax. The product and the sum are rounded separately.

    The launch therefore forbids the compiler to contract them to an FMA.
    """
    if FLAT:
        return first
    else:
        return multiply(tl.load(code2 + first.to(tl.int32)), second, FTZ) + offset


@triton.jit
def fetch(packed, absmax, group, thread, groups, blocks, STEP, BLOCKSIZE, ELEMS_PER_THREAD):
    """Load a thread's nibbles (in the low bits) and the absmax of its block. Return both, and the block's index.

    A group is the ELEMS_PER_THREAD elements that a thread decodes in a step. ``group`` is the 64-bit index of the
    program's first group. The offset of the step is a constant. It is added last, so that it becomes an immediate
    offset of the load instruction. Otherwise the second step would compute an address of its own, which takes 9
    instructions on sm_75.
    """
    WORDS: tl.constexpr = 8 // ELEMS_PER_THREAD  # threads that share a 32-bit word
    THREADS: tl.constexpr = thread.shape[0]
    mask = None if groups is None else group + STEP * THREADS + thread < groups
    pointer = packed + group // WORDS + thread // WORDS + STEP * THREADS // WORDS
    word = tl.load(pointer, mask=mask, eviction_policy="evict_first")
    nibbles = word >> ((thread % WORDS) * (4 * ELEMS_PER_THREAD)) if WORDS > 1 else word
    # A program starts at a block boundary, or lies inside one block. So the block's index is the sum of two quotients:
    # one of the program's first group, and one of the thread within the program.
    block = group * ELEMS_PER_THREAD // BLOCKSIZE
    index = thread * ELEMS_PER_THREAD // BLOCKSIZE
    # The absmax is masked per block, not per group, because a thread past the end still computes a table entry for its
    # half warp.
    NEXT: tl.constexpr = STEP * THREADS * ELEMS_PER_THREAD // BLOCKSIZE
    mask = None if blocks is None else block + NEXT + index < blocks
    return nibbles, tl.load(absmax + block + index + NEXT, mask=mask), block + index + NEXT


@triton.jit
def after_loads(first, PTX):
    """Return ``first``, the absmax, unchanged. A barrier makes all loads so far start before anything uses the result.

    Otherwise ptxas schedules the packed loads after the load of code2, which waits for the absmax. There would then be
    two trips to memory instead of one. Percent of the bandwidth ceiling without and with the barrier: 1024x4096 84.5
    and 94.9, 4096x4096 96.0 and 97.0 (H200, triton 3.6.0, 8 warps).
    """
    if PTX != "":
        first = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [first.to(tl.int32)], tl.int32, False, 1
        )
    return first


@triton.jit
def scale_of(first, absmax2, second, code2, offset, block, blocks, BLOCKSIZE2, FTZ):
    """Return the fp32 scale of a thread's block.

    ``second`` is the second-level absmax of all blocks of the program, or None if they lie in several second-level blocks.
    """
    if second is None:
        if BLOCKSIZE2 > 0:
            second = tl.load(absmax2 + block // BLOCKSIZE2, mask=None if blocks is None else block < blocks)
    return block_scale(first, second, code2, offset, BLOCKSIZE2 == 0, FTZ)


@triton.jit
def store(out, nibbles, scale, entry, select, code, group, groups, STEP, ELEMS_PER_THREAD, FTZ, PTX, CONSTRAINTS):
    """Decode one group per thread and store it: 16 bytes (8 at blocksize 32), contiguous across the threads."""
    THREADS: tl.constexpr = nibbles.shape[0]
    OUTPUTS: tl.constexpr = ELEMS_PER_THREAD * out.dtype.element_ty.primitive_bitwidth // 32
    tl.static_assert(OUTPUTS == 2 or OUTPUTS == 4)
    if PTX == "":
        own = group + STEP * THREADS + tl.arange(0, THREADS)[:, None]
        element = tl.arange(0, ELEMS_PER_THREAD)[None, :]
        nibble = (nibbles[:, None] >> (8 * (element // 2) + 4 * (1 - element % 2))) & 15
        mask = None if groups is None else own < groups
        store_elements(out, own * ELEMS_PER_THREAD + element, nibble, scale[:, None], code, mask, FTZ)
    else:
        if OUTPUTS == 4:
            a, b, c, d = tl.inline_asm_elementwise(
                PTX, CONSTRAINTS, [nibbles, entry, scale, select], (tl.int32, tl.int32, tl.int32, tl.int32), False, 1
            )
            outputs = tl.join(tl.join(a, c), tl.join(b, d))
        else:
            a, b = tl.inline_asm_elementwise(
                PTX, CONSTRAINTS, [nibbles, entry, scale, select], (tl.int32, tl.int32), False, 1
            )
            outputs = tl.join(a, b)
        column = tl.arange(0, THREADS * OUTPUTS)
        mask = None if groups is None else group + STEP * THREADS + column // OUTPUTS < groups
        pointer = out.to(tl.pointer_type(tl.int32), bitcast=True) + group * OUTPUTS + column + STEP * THREADS * OUTPUTS
        tl.store(pointer, tl.reshape(outputs, [THREADS * OUTPUTS]), mask=mask, eviction_policy="evict_first")


@triton.jit
def store_tail(packed, absmax, absmax2, code, code2, offset, out, n, BLOCKSIZE, BLOCKSIZE2, FTZ):
    """Decode the last 1 to 7 elements, which do not fill a 32-bit word, from single bytes."""
    element = n // 8 * 8 + tl.arange(0, 8)
    mask = element < n
    byte = tl.load(packed + element // 2, mask=mask).to(tl.int32)
    nibble = tl.where(element % 2 == 0, byte >> 4, byte & 15)
    block = element // BLOCKSIZE
    second = tl.load(absmax2 + block // BLOCKSIZE2, mask=mask) if BLOCKSIZE2 > 0 else None
    scale = block_scale(tl.load(absmax + block, mask=mask), second, code2, offset, BLOCKSIZE2 == 0, FTZ)
    store_elements(out, element, nibble, scale, code, mask, FTZ)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["absmax", "code", "absmax2", "code2", "offset"])
def dequantize_kernel(
    packed, absmax, code, absmax2, code2, offset, out, n,
    BLOCKSIZE: tl.constexpr, BLOCKSIZE2: tl.constexpr, ELEMS_PER_THREAD: tl.constexpr, THREADS: tl.constexpr,
    EVEN: tl.constexpr, TAIL: tl.constexpr, FTZ: tl.constexpr, PTX: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Compute out[e] = dtype(fp32(code[nibble(e)] * scale(e // BLOCKSIZE))), both levels of quantization in one launch.

    Per step, a thread decodes ELEMS_PER_THREAD nibbles of one 32-bit word. A program runs UNROLL = 2 steps of THREADS threads.

    packed: uint8 [ceil(n / 2)], 4-byte aligned. absmax: uint8 (nested) or fp32 (flat) [ceil(n / BLOCKSIZE)].
    code: fp32 [16]. absmax2: fp32, one per BLOCKSIZE2 blocks. code2: fp32 [256]. offset: one element.
    out: fp16, bf16 or fp32 [n], 16-byte aligned. BLOCKSIZE2 is 0 for a flat weight, whose second level is never read.
    EVEN: n is a multiple of the program's elements. TAIL: n is not a multiple of 8.
    PTX, CONSTRAINTS: the result of ptx.decode, or "" for the portable path, which is bit-identical.
    """
    tl.static_assert(not (EVEN and TAIL))
    words = packed.to(tl.pointer_type(tl.int32), bitcast=True)
    thread = tl.arange(0, THREADS)
    entry = look_up(code, thread % HALF_WARP, FTZ)
    # The selector is ptx.SELECT_LOW for threads in the first block of their half warp, and ptx.SELECT_HIGH in the second block.
    select = tl.where(thread % HALF_WARP * ELEMS_PER_THREAD < BLOCKSIZE, 0x5410, 0x7632)
    shift = tl.load(offset).to(tl.float32) if BLOCKSIZE2 > 0 else 0.0
    # ``groups`` and ``blocks`` are the bounds for the masks of loads and stores. None means that no mask is needed.
    groups = None if EVEN else n // 8 * (8 // ELEMS_PER_THREAD)
    blocks = None if EVEN else (n - 1) // BLOCKSIZE + 1
    group = tl.program_id(0).to(tl.int64) * (THREADS * UNROLL)

    second = None
    # In every state that bitsandbytes makes, all elements of a program lie in one second-level block.
    if THREADS * UNROLL * ELEMS_PER_THREAD <= BLOCKSIZE * BLOCKSIZE2:
        second = tl.load(absmax2 + group * ELEMS_PER_THREAD // BLOCKSIZE // BLOCKSIZE2)
    # Both steps load before either step stores, because the compiler may not move a load above a store.
    nibbles, first, block = fetch(words, absmax, group, thread, groups, blocks, 0, BLOCKSIZE, ELEMS_PER_THREAD)
    nibbles2, first2, block2 = fetch(words, absmax, group, thread, groups, blocks, 1, BLOCKSIZE, ELEMS_PER_THREAD)
    if BLOCKSIZE2 > 0:
        first = after_loads(first, PTX)
    scale = scale_of(first, absmax2, second, code2, shift, block, blocks, BLOCKSIZE2, FTZ)
    scale2 = scale_of(first2, absmax2, second, code2, shift, block2, blocks, BLOCKSIZE2, FTZ)
    store(out, nibbles, scale, entry, select, code, group, groups, 0, ELEMS_PER_THREAD, FTZ, PTX, CONSTRAINTS)
    store(out, nibbles2, scale2, entry, select, code, group, groups, 1, ELEMS_PER_THREAD, FTZ, PTX, CONSTRAINTS)
    if TAIL:
        if tl.program_id(0) == 0:
            store_tail(packed, absmax, absmax2, code, code2, shift, out, n, BLOCKSIZE, BLOCKSIZE2, FTZ)
