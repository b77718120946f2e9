"""The fused matmul of hundreds of rows on Hopper: wgmma on a weight that two warp groups decode into shared memory.

Gluon, because the pipeline is written out: 17 warps per CTA and no two groups with the same work. A tile is BLOCK_M rows of
X by BLOCK_N of the weight; a step is BLOCK_K of K; a chunk is a tile, or one of its ``split_k`` parts along K.

    producer, 1 warp:     X, packed weight and scales by TMA into rings of STAGES slots
    decoders, 2 x 4:      BLOCK_N x BLOCK_K weights, every second step each, into a ring of DECODED slots
    consumers, 2 x 4:     each half of the tile's rows of X by all of the weight's, fp32 sums in registers

Two mbarriers per slot: ``full`` and ``empty`` of the TMA rings, ``ready`` and ``spent`` of the decoded ring. In every group:
``barriers`` are these four, ``work`` is n, k_steps (of K), tiles_m (along M, the fastest), chunks and split_k; what is in
capitals is known at compile time.

A second one-warp partition next to the producer gave wrong sums in most launches (H200, Triton 3.6.0; cause not found).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..dequantize.kernels import block_scale

BLOCK_N = gl.constexpr(128)  # rows of the weight per tile: columns of the result
BLOCK_K = gl.constexpr(64)  # with one scale for a row
FLAGS = gl.constexpr(1024)  # two per program
SCALE_STEPS = gl.constexpr(16)  # of K that a program of scales_kernel takes
CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 8 + ["f"] * 8 + ["l"] * 8))  # see hopper.decode_ptx
# until the flag of another program is set
SPIN = gl.constexpr("{ .reg .pred p; again: ld.acquire.gpu.global.u32 $0, [$1]; setp.eq.u32 p, $0, 0; @p bra again; }")
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton >= 3.7


@triton.jit(do_not_specialize=["n", "k_steps", "shift", "shift2"])
def scales_kernel(absmax, absmax2, code2, offset, scales, flags, n, k_steps, shift, shift2, FLAT: tl.constexpr):
    """scales fp32 [steps of K, n], as the matmul reads them; and flags int32 [FLAGS] = 0.

    absmax: uint8 (nested) or fp32 (FLAT), row-major over n rows. absmax2, code2 [256]: fp32. offset: one.
    shift: log2 of the steps per block. shift2: log2(blocksize2).
    """
    groups = tl.cdiv(n, BLOCK_N)
    row = tl.program_id(0) % groups * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    step = tl.program_id(0) // groups * SCALE_STEPS + tl.arange(0, SCALE_STEPS)[None, :]
    mask = (row < n) & (step < k_steps)
    block = (row * k_steps + step) >> shift
    first = tl.load(absmax + block, mask, 0)
    second = None if FLAT else tl.load(absmax2 + (block >> shift2), mask, 0.0)
    scale = block_scale(first, second, code2, None if FLAT else tl.load(offset).to(tl.float32), FLAT, True)
    tl.store(scales + step * n + row, scale, mask)
    if tl.program_id(0) == 0:
        tl.store(flags + tl.arange(0, FLAGS), 0)


@gluon.jit
def advance(slot, phase, SLOTS):
    """The next slot of a ring, and the parity of its barriers' phase."""
    return gl.where(slot == SLOTS - 1, 0, slot + 1), gl.where(slot == SLOTS - 1, phase ^ 1, phase)


@gluon.jit
def start_of(chunk, split_k, k_steps):
    """The first step of a chunk: a tile has ``k_steps``, in ``split_k`` chunks."""
    return chunk // split_k * k_steps + chunk % split_k * k_steps // split_k


@gluon.jit
def work_range(work):
    """This program's turn, and its steps [start, end) of all tiles': whole tiles, or one chunk of a tile.

    The program of a tile's first chunk waits for the others: they are given to lower program ids, which start before.
    """
    _n, k_steps, _tiles_m, chunks, split_k = work
    programs = gl.num_programs(0)
    turn = programs - 1 - gl.program_id(0)
    start = start_of(chunks * turn // programs, split_k, k_steps)
    return turn, start, start_of(chunks * (turn + 1) // programs, split_k, k_steps)


@gluon.jit
def produce(x, packed, scales, barriers, x_ring, packed_ring, scale_ring, work):
    """The producer: fill a slot of each TMA ring per step.

    x [M, K], packed int32 [n, K / 8] and scales (scales_kernel's, flat): TMA descriptors. Rings: x_ring
    [STAGES, BLOCK_M, BLOCK_K], packed_ring [STAGES, BLOCK_N, BLOCK_K / 8], scale_ring [STAGES, BLOCK_N].
    """
    STAGES: gl.constexpr = x_ring.type.shape[0]
    BLOCK_M: gl.constexpr = x_ring.type.shape[1]
    full, empty, _ready, _spent = barriers
    n, k_steps, tiles_m, _chunks, _split_k = work
    _turn, at, end = work_range(work)
    slot, phase = 0, 1  # the phase before the first counts as over
    while at < end:
        tile = at // k_steps
        first = at % k_steps
        steps = gl.minimum(k_steps - first, end - at)
        at += steps
        row = tile % tiles_m * BLOCK_M
        column = tile // tiles_m * BLOCK_N
        for step in range(first, first + steps):  # nothing to divide in here: it is one warp's time
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, (2 * BLOCK_M + BLOCK_N // 2) * BLOCK_K + 4 * BLOCK_N)
            tma.async_copy_global_to_shared(packed, [column, step * (BLOCK_K // 8)], ready, packed_ring.index(slot))
            tma.async_copy_global_to_shared(scales, [step * n + column], ready, scale_ring.index(slot))
            tma.async_copy_global_to_shared(x, [row, step * BLOCK_K], ready, x_ring.index(slot))
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def decode(TURN, code, barriers, packed_ring, scale_ring, weight_ring, work, PTX):
    """Decoder TURN of two: every second step from its slots of the TMA rings to weight_ring [DECODED, BLOCK_N, BLOCK_K].

    A thread takes a row. code: the address of 16 fp32. PTX: hopper.decode_ptx.
    """
    STAGES: gl.constexpr = packed_ring.type.shape[0]
    DECODED: gl.constexpr = weight_ring.type.shape[0]
    row: gl.constexpr = gl.BlockedLayout([1, BLOCK_K // 8], [32, 1], [4, 1], [1, 0])
    full, empty, ready, spent = barriers
    _turn, start, end = work_range(work)
    slot, phase = 0, 0
    write_slot, write_phase = 0, 1
    if TURN == 1:
        slot, phase = advance(slot, phase, STAGES)
        write_slot, write_phase = advance(write_slot, write_phase, DECODED)
    for _step in range(start + TURN, end, 2):
        mbarrier.wait(full.index(slot), phase)
        words = packed_ring.index(slot).load(row)
        scale = scale_ring.index(slot).load(gl.SliceLayout(1, row))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        scale, words = gl.broadcast(gl.expand_dims(scale, 1), words)
        where = gl.full([BLOCK_N, BLOCK_K // 8], 0, gl.int64, row) + code.to(gl.int64)
        a, b, c, d = gl.inline_asm_elementwise(
            PTX, CONSTRAINTS, [words, scale, where], (gl.int32, gl.int32, gl.int32, gl.int32), True, BLOCK_K // 8
        )
        pairs = gl.join(gl.join(a, c), gl.join(b, d))  # [row, word, 4 registers of two weights]
        weights = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).reshape([BLOCK_N, BLOCK_K])
        mbarrier.wait(spent.index(write_slot), write_phase)
        weight_ring.index(write_slot).store(weights.to(weight_ring.dtype, bitcast=True))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(write_slot), count=1)
        for _twice in gl.static_range(2):
            slot, phase = advance(slot, phase, STAGES)
            write_slot, write_phase = advance(write_slot, write_phase, DECODED)


@gluon.jit
def partial_offsets(turn, HALF, HALF_M, mma):
    """Offsets [HALF_M, BLOCK_N] of half a tile in ``sums``. The zero hides that they are loop-invariant: 64 addresses per
    thread would spill."""
    zero = 4 * gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [turn], gl.int32, False, 1)
    row = gl.arange(0, HALF_M, gl.SliceLayout(1, mma)) + zero
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma)) + zero
    return (2 * turn + HALF) * (HALF_M * BLOCK_N) + row[:, None] * BLOCK_N + column[None, :]


@gluon.jit
def tma_store(value, staging, out, row, column):
    """64 rows of the result by TMA, which leaves out what lies past M or N."""
    tma.store_wait(0)
    barrier()
    staging.store(value)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(out, [row, column], staging)


@gluon.jit
def consume(HALF, barriers, x_ring, weight_ring, staging, out, sums, flags, bias, work, BIAS):
    """Consumer HALF of two: multiply, add up the tile's chunks in their order, add the bias, store.

    The first chunk's program waits for the flag of each other one and adds its sums; see hopper_kernel.
    staging [2, 64, BLOCK_N]: the result on its way to ``out``.
    """
    STAGES: gl.constexpr = x_ring.type.shape[0]
    DECODED: gl.constexpr = weight_ring.type.shape[0]
    BLOCK_M: gl.constexpr = x_ring.type.shape[1]
    HALF_M: gl.constexpr = BLOCK_M // 2
    dtype: gl.constexpr = x_ring.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    n, k_steps, tiles_m, _chunks, split_k = work
    full, empty, ready, spent = barriers
    turn, at, end = work_range(work)
    slot, phase = 0, 0
    read_slot, read_phase = 0, 0
    slot_before, read_slot_before = 0, 0
    while at < end:
        tile = at // k_steps
        first = at % k_steps
        steps = gl.minimum(k_steps - first, end - at)
        at += steps
        acc = gl.zeros([HALF_M, BLOCK_N], gl.float32, mma)
        for i in range(steps):
            mbarrier.wait(full.index(slot), phase)
            mbarrier.wait(ready.index(read_slot), read_phase)
            rows = x_ring.index(slot).slice(HALF * HALF_M, HALF_M, dim=0)
            acc = warpgroup_mma(rows, weight_ring.index(read_slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before this one
            mbarrier.arrive(empty.index(slot_before), count=1, pred=i > 0)
            mbarrier.arrive(spent.index(read_slot_before), count=1, pred=i > 0)
            slot_before, read_slot_before = slot, read_slot
            slot, phase = advance(slot, phase, STAGES)
            read_slot, read_phase = advance(read_slot, read_phase, DECODED)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot_before), count=1)
        mbarrier.arrive(spent.index(read_slot_before), count=1)
        if first > 0:
            gl.store(sums + partial_offsets(turn, HALF, HALF_M, mma), acc)
            barrier()
            gl.atomic_xchg(flags + (2 * turn + HALF), 1, sem="release", scope="gpu")
        else:
            for other in range(turn + 1, turn + split_k):  # in this order: the same bits at every run
                flag = flags + (2 * other + HALF)
                gl.inline_asm_elementwise(SPIN, "=&r,l", [flag.to(gl.int64)], gl.int32, False, 1)
                barrier()  # or LLVM moves the loads before the wait
                acc += gl.load(sums + partial_offsets(other, HALF, HALF_M, mma), cache_modifier=".cg")
            row = tile % tiles_m * BLOCK_M + HALF * HALF_M
            column = tile // tiles_m * BLOCK_N
            if BIAS:
                columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
                acc += gl.load(bias + columns, mask=columns < n, other=0.0).to(gl.float32)[None, :]
            if HALF_M == 128:
                upper, lower = acc.to(dtype).reshape([2, 64, BLOCK_N]).permute((1, 2, 0)).split()
                tma_store(upper, staging.index(HALF), out, row, column)
                tma_store(lower, staging.index(HALF), out, row + 64, column)
            else:
                tma_store(acc.to(dtype), staging.index(HALF), out, row, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "k_steps", "tiles_m", "chunks", "split_k"])
def hopper_kernel(
    x, packed, scales, out, sums, flags, code, bias, n, k_steps, tiles_m, chunks, split_k,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, DECODED: gl.constexpr, BIAS: gl.constexpr, PTX: gl.constexpr,
):  # fmt: skip
    """out = x @ weight.T (+ bias), decoded on the way; a program takes whole tiles, or one chunk of a tile.

    x [M, K], packed int32 [n, K / 8], scales fp32 (scales_kernel's, flat) and out [M, n]: TMA descriptors whose
    boxes are those of hopper.boxes. code: fp32 [16]. bias: [n] in x's dtype, read if BIAS.
    sums: fp32 [programs, 2, BLOCK_M / 2, BLOCK_N], the partial sums of all but a tile's first chunk, by turn and half.
    flags: int32 [programs, 2], zero before; 1 as soon as those sums are written. Both are unread where split_k is 1.
    """
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    packed_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, BLOCK_K // 8], packed.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], scales.layout)
    weight_ring = gl.allocate_shared_memory(x.dtype, [DECODED, BLOCK_N, BLOCK_K], x.layout)
    staging = gl.allocate_shared_memory(x.dtype, [2, 64, BLOCK_N], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [DECODED, 1], mbarrier.MBarrierLayout())
    spent = gl.allocate_shared_memory(gl.int64, [DECODED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)  # a decoder and both consumers
    for i in gl.static_range(DECODED):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(spent.index(i), count=2)
    barriers = full, empty, ready, spent
    work = n, k_steps, tiles_m, chunks, split_k
    gl.warp_specialize(
        [
            (consume, (0, barriers, x_ring, weight_ring, staging, out, sums, flags, bias, work, BIAS)),
            (consume, (1, barriers, x_ring, weight_ring, staging, out, sums, flags, bias, work, BIAS)),
            (decode, (0, code, barriers, packed_ring, scale_ring, weight_ring, work, PTX)),
            (decode, (1, code, barriers, packed_ring, scale_ring, weight_ring, work, PTX)),
            (produce, (x, packed, scales, barriers, x_ring, packed_ring, scale_ring, work)),
        ],
        [4, 4, 4, 1],
        [184, 56, 56, 24],
    )
