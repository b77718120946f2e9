"""The fused matmul of hundreds of rows on Hopper: wgmma on a weight that two warp groups decode into shared memory.

Gluon, because the pipeline is written out: 17 warps a CTA and no two groups with the same work.

    producer, 1 warp:     X, packed weight and scales by TMA into rings of ``STAGES``
    decoders, 2 x 4:      128 rows of 64 weights, every second step each, into a ring of ``DECODED``
    consumers, 2 x 4:     each half of the tile's rows of X by all 128 of the weight, fp32 sums in registers

A second one-warp partition beside the producer gave wrong sums in most launches (H200, Triton 3.6.0; cause not found).
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

COLUMNS = gl.constexpr(128)  # rows of the weight a tile: columns of the result
DEPTH = gl.constexpr(64)  # of K a step: one block of the smallest blocksize
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton >= 3.7


@triton.jit(do_not_specialize=["n", "k_steps", "shift", "shift2"])
def scales_kernel(
    absmax, absmax2, code2, offset, scales, flags, n, k_steps, shift, shift2,
    FLAT: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """scales[step, row] in fp32, as the matmul reads them: 128 rows of a step at a time; and no flag is raised."""
    groups = tl.cdiv(n, ROWS)
    row = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)[:, None]
    step = tl.program_id(0) // groups * STEPS + tl.arange(0, STEPS)[None, :]
    mask = (row < n) & (step < k_steps)
    block = (row * k_steps + step) >> shift
    first = tl.load(absmax + block, mask, 0)
    if FLAT:
        scale = first
    else:
        second = tl.load(absmax2 + (block >> shift2), mask, 0.0)
        scale = block_scale(first, second, code2, tl.load(offset), False, True)
    tl.store(scales + step * n + row, scale, mask)
    if tl.program_id(0) == 0:
        flag = tl.arange(0, FLAGS)
        tl.store(flags + flag, tl.zeros((FLAGS,), tl.int32))


@gluon.jit
def following(slot, phase, SLOTS: gl.constexpr):
    """The next slot of a ring, and the parity of its barriers' phase."""
    return gl.where(slot == SLOTS - 1, 0, slot + 1), gl.where(slot == SLOTS - 1, phase ^ 1, phase)


@gluon.jit
def start_of(chunk, splits, k_steps):
    """The first step of a chunk: a tile has ``k_steps``, in ``splits`` chunks."""
    return chunk // splits * k_steps + chunk % splits * k_steps // splits


@gluon.jit
def share(chunks, splits, k_steps):
    """This program's turn, and its steps [start, end): whole tiles, or one chunk of a tile.

    The first chunk's program waits for the others of its tile: they are given to lower program ids, which start before.
    """
    programs = gl.num_programs(0)
    turn = programs - 1 - gl.program_id(0)
    return (
        turn,
        start_of(chunks * turn // programs, splits, k_steps),
        start_of(chunks * (turn + 1) // programs, splits, k_steps),
    )


@gluon.jit
def produce(
    x, packed, scales, full, empty, x_ring, packed_ring, scale_ring, n, k_steps, tiles_m, chunks, splits,
    ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _turn, at, end = share(chunks, splits, k_steps)
    slot = 0
    phase = 1  # the phase before the first counts as over
    while at < end:
        tile = at // k_steps
        first = at % k_steps
        steps = gl.minimum(k_steps - first, end - at)
        at += steps
        row = tile % tiles_m * ROWS
        column = tile // tiles_m * COLUMNS
        for step in range(first, first + steps):  # nothing to divide in here: it is one warp's time
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, (2 * ROWS + COLUMNS // 2) * DEPTH + 4 * COLUMNS)
            tma.async_copy_global_to_shared(packed, [column, step * (DEPTH // 8)], ready, packed_ring.index(slot))
            tma.async_copy_global_to_shared(scales, [step * n + column], ready, scale_ring.index(slot))
            tma.async_copy_global_to_shared(x, [row, step * DEPTH], ready, x_ring.index(slot))
            slot, phase = following(slot, phase, STAGES)


@gluon.jit
def decode(
    TURN: gl.constexpr, code, full, empty, ready, spent, packed_ring, scale_ring, ring, k_steps, chunks, splits,
    STAGES: gl.constexpr, DECODED: gl.constexpr, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """Every second step; a lane takes a row."""
    row: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [32, 1], [4, 1], [1, 0])
    _turn, start, end = share(chunks, splits, k_steps)
    slot = 0
    phase = 0
    to = 0
    to_phase = 1
    if TURN == 1:
        slot, phase = following(slot, phase, STAGES)
        to, to_phase = following(to, to_phase, DECODED)
    for _step in range(start + TURN, end, 2):
        mbarrier.wait(full.index(slot), phase)
        words = packed_ring.index(slot).load(row)
        scale = scale_ring.index(slot).load(gl.SliceLayout(1, row))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        scale, words = gl.broadcast(gl.expand_dims(scale, 1), words)
        where = gl.full([COLUMNS, DEPTH // 8], 0, gl.int64, row) + code.to(gl.int64)
        a, b, c, d = gl.inline_asm_elementwise(
            PTX, CONSTRAINTS, [words, scale, where], (gl.int32, gl.int32, gl.int32, gl.int32), True, DEPTH // 8
        )
        pairs = gl.join(gl.join(a, c), gl.join(b, d))  # [row, word, 4 registers of two weights]
        weights = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).reshape([COLUMNS, DEPTH])
        mbarrier.wait(spent.index(to), to_phase)
        ring.index(to).store(weights.to(ring.dtype, bitcast=True))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(to), count=1)
        for _twice in gl.static_range(2):
            slot, phase = following(slot, phase, STAGES)
            to, to_phase = following(to, to_phase, DECODED)


@gluon.jit
def places(turn, HALF: gl.constexpr, ROWS: gl.constexpr, mma: gl.constexpr):
    """Where the sums of half a tile lie. The zero hides that they are loop-invariant: 64 addresses a lane would spill."""
    zero = 4 * gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [turn], gl.int32, False, 1)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, mma)) + zero
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, mma)) + zero
    return (2 * turn + HALF) * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]


@gluon.jit
def put(value, staging, out, row, column):
    """64 rows of the result by TMA, which leaves out what lies past M or N."""
    tma.store_wait(0)
    barrier()
    staging.store(value)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(out, [row, column], staging)


@gluon.jit
def consume(
    HALF: gl.constexpr, full, empty, ready, spent, x_ring, ring, staging, out, sums, flags, bias, n, k_steps, tiles_m,
    chunks, splits, ROWS: gl.constexpr, STAGES: gl.constexpr, DECODED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ring.dtype
    HEIGHT: gl.constexpr = ROWS // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    turn, at, end = share(chunks, splits, k_steps)
    slot = 0
    phase = 0
    of = 0
    of_phase = 0
    slot_before = 0
    of_before = 0
    while at < end:
        tile = at // k_steps
        first = at % k_steps
        steps = gl.minimum(k_steps - first, end - at)
        at += steps
        acc = gl.zeros([HEIGHT, COLUMNS], gl.float32, mma)
        for i in range(steps):
            mbarrier.wait(full.index(slot), phase)
            mbarrier.wait(ready.index(of), of_phase)
            rows = x_ring.index(slot).slice(HALF * HEIGHT, HEIGHT, dim=0)
            acc = warpgroup_mma(rows, ring.index(of).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before this one
            mbarrier.arrive(empty.index(slot_before), count=1, pred=i > 0)
            mbarrier.arrive(spent.index(of_before), count=1, pred=i > 0)
            slot_before = slot
            of_before = of
            slot, phase = following(slot, phase, STAGES)
            of, of_phase = following(of, of_phase, DECODED)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot_before), count=1)
        mbarrier.arrive(spent.index(of_before), count=1)
        if first > 0:
            gl.store(sums + places(turn, HALF, HEIGHT, mma), acc)
            barrier()
            gl.atomic_xchg(flags + (2 * turn + HALF), 1, sem="release", scope="gpu")
        else:
            for other in range(turn + 1, turn + splits):  # in this order: the same bits at every run
                flag = flags + (2 * other + HALF)
                gl.inline_asm_elementwise(
                    "{ .reg .pred p; again: ld.acquire.gpu.global.u32 $0, [$1]; setp.eq.u32 p, $0, 0; @p bra again; }",
                    "=&r,l", [flag.to(gl.int64)], gl.int32, False, 1,
                )  # fmt: skip
                barrier()  # or LLVM moves the loads before the wait
                acc += gl.load(sums + places(other, HALF, HEIGHT, mma), cache_modifier=".cg")
            row = tile % tiles_m * ROWS + HALF * HEIGHT
            column = tile // tiles_m * COLUMNS
            if BIAS:
                columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, mma))
                acc += gl.load(bias + columns, mask=columns < n, other=0.0).to(gl.float32)[None, :]
            if HEIGHT == 128:
                upper, lower = acc.to(dtype).reshape([2, 64, COLUMNS]).permute((1, 2, 0)).split()
                put(upper, staging.index(HALF), out, row, column)
                put(lower, staging.index(HALF), out, row + 64, column)
            else:
                put(acc.to(dtype), staging.index(HALF), out, row, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "k_steps", "tiles_m", "chunks", "splits"])
def hopper_kernel(
    x, packed, scales, out, sums, flags, code, bias, n, k_steps, tiles_m, chunks, splits,
    ROWS: gl.constexpr, STAGES: gl.constexpr, DECODED: gl.constexpr, BIAS: gl.constexpr,
    PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """x, packed, scales and out are TMA descriptors; the boxes are ROWS or 128 or 64 by DEPTH, see hopper.boxes."""
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    packed_ring = gl.allocate_shared_memory(gl.int32, [STAGES, COLUMNS, DEPTH // 8], packed.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], scales.layout)
    ring = gl.allocate_shared_memory(x.dtype, [DECODED, COLUMNS, DEPTH], x.layout)
    staging = gl.allocate_shared_memory(x.dtype, [2, 64, COLUMNS], out.layout)
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
    gl.warp_specialize(
        [
            (consume, (0, full, empty, ready, spent, x_ring, ring, staging, out, sums, flags, bias, n, k_steps, tiles_m, chunks, splits, ROWS, STAGES, DECODED, BIAS)),
            (consume, (1, full, empty, ready, spent, x_ring, ring, staging, out, sums, flags, bias, n, k_steps, tiles_m, chunks, splits, ROWS, STAGES, DECODED, BIAS)),
            (decode, (0, code, full, empty, ready, spent, packed_ring, scale_ring, ring, k_steps, chunks, splits, STAGES, DECODED, PTX, CONSTRAINTS)),
            (decode, (1, code, full, empty, ready, spent, packed_ring, scale_ring, ring, k_steps, chunks, splits, STAGES, DECODED, PTX, CONSTRAINTS)),
            (produce, (x, packed, scales, full, empty, x_ring, packed_ring, scale_ring, n, k_steps, tiles_m, chunks, splits, ROWS, STAGES)),
        ],
        [4, 4, 4, 1],
        [184, 56, 56, 24],
    )  # fmt: skip
