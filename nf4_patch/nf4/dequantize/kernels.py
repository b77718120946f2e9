"""Triton kernels that dequantize packed weights. This file holds only @triton.jit functions and their constants.

A parameter in capitals is known at compile time.
"""

import triton
import triton.language as tl

# The 16 lanes of a half warp share one table of rounded products (see ptx.py).
# If the elements of a half warp lie in two blocks, lanes 8 to 15 hold the elements of the second block.
HALF_WARP = tl.constexpr(16)
UNROLL = tl.constexpr(2)  # steps per program; a thread decodes one group of elements per step


@triton.jit
def multiply(a, b, FTZ):
    """Return a * b in fp32, rounded once. With FTZ, subnormals become zero, as with nvcc's --use_fast_math."""
    if FTZ:
        return tl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    else:
        return a * b


@triton.jit
def look_up(code, nibble, FTZ):
    """Return the code value of a nibble. With FTZ, nibble 8 of FP4 is minus zero, as in bitsandbytes' CUDA kernels.

    The code tensor of bitsandbytes' QuantState holds plus zero there.
    """
    value = tl.load(code + nibble)
    if FTZ:
        # Set the sign with integer operations, because Triton turns the literal -0.0 into plus zero.
        sign = ((nibble == 8) & (value == 0.0)).to(tl.int32) << 31
        value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return value


@triton.jit
def round_to(value, dtype):
    """Round ``value`` from fp32 to ``dtype``, to nearest even. Return the bits in the low bits of an int32."""
    if dtype == tl.float32:
        return value.to(tl.int32, bitcast=True)
    elif dtype == tl.float16:
        return value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        # Round with integer operations, because Triton's interpreter only truncates, and sm_75 cannot convert to bf16.
        bits = value.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int32)
        return tl.where(value == value, rounded, 0x7FFF)


@triton.jit
def store_elements(out, element, nibble, scale, code, mask, FTZ):
    """Decode single elements and store them. The result is bit-identical to that of ptx.decode.

    Without inline PTX (the portable path), this function decodes all elements. With PTX, it decodes only the elements
    after the last whole 32-bit word.
    """
    bits = round_to(multiply(look_up(code, nibble, FTZ), scale, FTZ), out.dtype.element_ty)
    if out.dtype.element_ty == tl.float32:
        tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + element, bits, mask=mask)
    else:
        tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + element, bits.to(tl.int16), mask=mask)


@triton.jit
def block_scale(first, second, code2, offset, FLAT, FTZ):
    """Return the fp32 scale of a block. If FLAT, it is ``first``, the block's absmax.

    Otherwise, it is code2[first] * second + offset. The product and the sum must be rounded separately, so the kernel
    is compiled without FMA fusion.
    """
    if FLAT:
        return first
    else:
        return multiply(tl.load(code2 + first.to(tl.int32)), second, FTZ) + offset


@triton.jit
def fetch(packed, absmax, group, thread, groups, blocks, STEP, BLOCKSIZE, ELEMS_PER_THREAD):
    """Load the nibbles that a thread decodes in one step, and the absmax of their quantization block.

    Return the nibbles (in the low bits), the absmax, and the block's index. A group is the ELEMS_PER_THREAD elements of a
    step. ``group`` is the 64-bit index of the program's first group.
    """
    WORDS: tl.constexpr = 8 // ELEMS_PER_THREAD  # threads that share a 32-bit word
    THREADS: tl.constexpr = thread.shape[0]
    mask = None if groups is None else group + STEP * THREADS + thread < groups
    # STEP's constant is added last, so that it becomes an immediate offset of the load instruction. Otherwise the second
    # step would compute a second address, which takes 9 instructions on sm_75.
    pointer = packed + group // WORDS + thread // WORDS + STEP * THREADS // WORDS
    word = tl.load(pointer, mask=mask, eviction_policy="evict_first")
    nibbles = word >> ((thread % WORDS) * (4 * ELEMS_PER_THREAD)) if WORDS > 1 else word
    # ``block`` is the block of the program's first group. ``index`` counts the blocks from there to the thread.
    # Their sum is the thread's block, because a program starts at a block boundary or lies inside one block.
    block = group * ELEMS_PER_THREAD // BLOCKSIZE
    index = thread * ELEMS_PER_THREAD // BLOCKSIZE
    # Mask the absmax by block, not by group. A thread past the last group still needs the absmax of its block,
    # because it computes an entry of the table that its half warp shares.
    NEXT: tl.constexpr = STEP * THREADS * ELEMS_PER_THREAD // BLOCKSIZE
    mask = None if blocks is None else block + NEXT + index < blocks
    return nibbles, tl.load(absmax + block + index + NEXT, mask=mask), block + index + NEXT


@triton.jit
def after_loads(first, PTX):
    """Return ``first``, the absmax, after a barrier that makes all earlier loads start.

    Otherwise, ptxas loads the packed words after code2, which waits for the absmax. The barrier raises the speed from
    84.5 to 94.9 % of the bandwidth ceiling for 1024x4096, and from 96.0 to 97.0 % for 4096x4096 (H200, triton 3.6.0, 8
    warps).
    """
    if PTX != "":
        first = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [first.to(tl.int32)], tl.int32, False, 1
        )
    return first


@triton.jit
def scale_of(first, absmax2, second, code2, offset, block, blocks, BLOCKSIZE2, FTZ):
    """Return the fp32 scale of a thread's block.

    ``second`` is the second-level absmax if all blocks of the program share it, otherwise None.
    """
    if second is None:
        if BLOCKSIZE2 > 0:
            second = tl.load(absmax2 + block // BLOCKSIZE2, mask=None if blocks is None else block < blocks)
    return block_scale(first, second, code2, offset, BLOCKSIZE2 == 0, FTZ)


@triton.jit
def store(out, nibbles, scale, entry, select, code, group, groups, STEP, ELEMS_PER_THREAD, FTZ, PTX, CONSTRAINTS):
    """Decode one group per thread, and store its 16 bytes (8 at blocksize 32).

    The bytes of all threads are contiguous.
    """
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
    """Decode the last 1 to 7 elements, which do not fill a 32-bit word."""
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
    """Dequantize a weight: out[e] = dtype(fp32(code[nibble(e)] * scale(e // BLOCKSIZE))).

    In each step, a thread decodes ELEMS_PER_THREAD elements from one 32-bit word. A program runs UNROLL = 2 steps of
    THREADS threads.

    packed: uint8 [ceil(n / 2)], 4-byte aligned.
    absmax: [ceil(n / BLOCKSIZE)], uint8 for a nested weight, fp32 for a flat weight.
    code: fp32 [16]. code2: fp32 [256]. offset: one element.
    absmax2: fp32, one element per BLOCKSIZE2 blocks.
    out: fp16, bf16 or fp32 [n], 16-byte aligned.
    BLOCKSIZE2: 0 for a flat weight, for which absmax2, code2 and offset are not read.
    EVEN: n is a multiple of the elements of a program. TAIL: n is not a multiple of 8.
    PTX, CONSTRAINTS: the result of ptx.decode. An empty PTX selects the portable path, whose result is bit-identical.
    """
    tl.static_assert(not (EVEN and TAIL))
    words = packed.to(tl.pointer_type(tl.int32), bitcast=True)
    thread = tl.arange(0, THREADS)
    entry = look_up(code, thread % HALF_WARP, FTZ)
    # Threads in the first block of their half warp use ptx.SELECT_LOW, and threads in the second block ptx.SELECT_HIGH.
    select = tl.where(thread % HALF_WARP * ELEMS_PER_THREAD < BLOCKSIZE, 0x5410, 0x7632)
    shift = tl.load(offset).to(tl.float32) if BLOCKSIZE2 > 0 else 0.0
    # ``groups`` and ``blocks``, the numbers of groups and blocks, mask the loads and stores. None means no mask.
    groups = None if EVEN else n // 8 * (8 // ELEMS_PER_THREAD)
    blocks = None if EVEN else (n - 1) // BLOCKSIZE + 1
    group = tl.program_id(0).to(tl.int64) * (THREADS * UNROLL)

    second = None
    # Load the second-level absmax once per program, if all elements of the program lie in one second-level block.
    # This condition holds for every QuantState that bitsandbytes makes.
    if THREADS * UNROLL * ELEMS_PER_THREAD <= BLOCKSIZE * BLOCKSIZE2:
        second = tl.load(absmax2 + group * ELEMS_PER_THREAD // BLOCKSIZE // BLOCKSIZE2)
    # Load the data of both steps before the first store, because the compiler may not move a load above a store.
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
