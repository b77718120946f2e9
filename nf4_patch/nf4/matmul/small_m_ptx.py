"""The inline PTX of the fused decode + matmul: the text of one program for one configuration.

``out[M, N] = X[M, K] @ weight[N, K].T``. A warp takes 16-row tiles of the weight as the A operand of
``mma.sync.m16n8k16`` and 8-row tiles of X as B, fp32 accumulators, no matrix operand in shared memory:

* K goes in chunks of 256 elements, 128 bytes of a packed row. A lane loads 64 or 128 bits of its rows' words, and the
  mma's K order is permuted alike on both sides, so that the lane's own bytes *are* its fragment.
* A byte is looked up whole: 256 entries of two fp32 codes in shared memory, one ``dp4a`` for the address (byte * 128 +
  lane) and one 64-bit load. Then code * scale, rounded once and packed: the bits that dequantize writes.
* The warps of a program split K and add up their parts in warp order, so the result does not vary from run to run.

* As soon as a group of words is decoded, the same group of the next chunk is asked for into the same registers.

What bounds it (H200, ncu): up to 16 rows the L1 data pipe, 200 cycles a warp for 16 rows x 256, 128 of them lookups;
from 32 rows on the latency of X, which comes through the same pipe behind the weight.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

TABLE_BYTES = 32768  # 256 entries x 16 copies x 8 B: a 64-bit shared load serves 16 lanes a cycle, each its own copy
SUM_BYTES = 8192  # partial sums. With the table and code2 under 48 KiB, which a kernel gets unasked
CONSTRAINTS = "=r,l,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r"


class Dialect(NamedTuple):
    """What a capability spells in its own way."""

    depth: int  # of K one mma takes: sm_75 needs two for the same fragments
    pairs: bool  # two fp32 are rounded and packed by one convert
    wait: str  # for an mbarrier; "": there are none, the program meets at bar.sync


DIALECTS = {
    (7, 5): Dialect(8, False, ""),  # fp16 only
    (8, 0): Dialect(16, True, "mbarrier.test_wait.parity.shared.b64"),  # spins
    (9, 0): Dialect(16, True, "mbarrier.try_wait.parity.shared.b64"),  # may suspend the warp
}


@functools.lru_cache(maxsize=256)
def program(
    tiles: int,  # 16-row tiles of the weight a warp carries at once
    columns: int,  # 8-row tiles of X
    along_n: int,  # warps side by side along the rows of the weight,
    along_k: int,  # and along K; powers of two
    wide: bool,  # 128-bit loads of the packed weight (half the L1 cycles, twice those of X), else 64-bit
    ahead: int,  # chunks of words and scales in flight, one set of registers each
    still: bool,  # each warp meets one chunk of K only: its part of X stays in registers
    half: bool,  # fp16, else bf16
    nested: bool,
    tail: bool,  # K is no multiple of 256
    split: bool,  # fp32 partial sums out[slice, M, N] of the slices of K
    bias: bool,
    capability: tuple[int, int] = (9, 0),  # that its dialect is for
) -> str:
    """Operands: $1 x, $2 packed, $3 absmax, $4 code, $5 absmax2, $6 code2, $7 offset, $8 out, $9 bias (addresses);
    $10 M, $11 N, $12 K / 64, $13 log2(blocksize / 64), $14 log2(blocksize2), $15 even shares of the rows, $16 slices of K.
    The grid is shares x programs a share x slices, shares fastest."""
    warps, registers = along_n * along_k, 4 * tiles * columns
    rows = 2 * tiles  # of the weight a lane
    groups, words = (
        (2, 4) if wide else (4, 2)
    )  # a chunk is so many groups of so many words a lane and row, one scale each
    together = math.gcd(registers, SUM_BYTES // (128 * warps))  # accumulators the warps add up at a time
    mine = range(max(1, together // along_k))  # of which each summing warp takes so many
    name = "f16" if half else "bf16"
    depth, pairs, wait = DIALECTS[max(known for known in DIALECTS if known <= capability)]
    mma = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{name}.{name}.f32"
    text: list[str] = []
    e = text.append

    def log2(x: int) -> int:
        return x.bit_length() - 1

    def vector(prefix: str, first: int, count: int) -> str:
        return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"

    def arrive(barrier: str) -> str:
        """This warp has left its part of the sums (full), or taken what it adds up (free)."""
        if wait:
            # Every lane for itself: racecheck (2025.3.1) reports the stores of all lanes but one that arrives for its warp.
            return f"bar.warp.sync 0xffffffff; mbarrier.arrive.shared.b64 _, [{barrier}];"
        return "bar.sync 0;" if barrier == "full" else ""

    def await_(barrier: str, phase: str, label: str) -> str:
        """All of them have."""
        if wait:
            return f"{label}: {wait} p, [{barrier}], {phase}; @!p bra {label};"
        return "bar.sync 0;" if barrier == "free" else ""

    def within_k(name: str, also: str = "") -> None:
        """name<b>: this lane's words of group b lie within K."""
        for b in range(groups):
            e("shr.u32 u, t, 1; add.u32 u, u, sub;" if wide else "mov.u32 u, sub;")
            e(f"add.u32 u, u, {b * 4 // groups}; setp.lt{'.and' if also else ''}.u32 {name}{b}, u, $12{also};")

    def aim() -> None:
        """Addresses of what is to be fetched: 8 * rows rows of the weight x chunk, under ``there``; then step on."""
        e(
            f"mad.lo.u32 sub, fetchit, {along_k}, first; setp.lt.u32 there, fetch, steps; setp.lt.and.u32 there, sub, stop, there;"
        )
        e(f"mad.lo.u32 u, fetchtile, {along_n}, wn; mad.lo.u32 row, u, {8 * rows}, g;")
        e("mul.wide.u32 d, sub, 128; add.u64 base, packed, d; shl.b32 sub, sub, 2;")
        if tail:
            within_k("near", ", there")
        e("add.u32 sub, sub, t;")  # the scale of block t of the chunk is for lane t to fetch
        e("setp.lt.and.u32 scaled, sub, $12, there;" if tail else "and.pred scaled, there, there;")
        for i in range(rows):
            e(f"add.u32 u, row, {8 * i}; min.u32 u, u, lastn; mad.wide.u32 at{i}, u, rowbytes, base;")
            e(f"mad.lo.u32 block{i}, u, $12, sub; shr.u32 block{i}, block{i}, $13;")
        e("add.u32 fetch, fetch, 1;")
        advance("fetch")

    def advance(cursor: str) -> None:
        e(f"add.u32 {cursor}it, {cursor}it, 1; setp.eq.u32 p, {cursor}it, per;")
        e(f"@p mov.u32 {cursor}it, 0; @p add.u32 {cursor}tile, {cursor}tile, 1;")

    def fetch_words(k: int, b: int) -> None:
        for i in range(rows):
            target = vector(f"word{k}_", 8 * i + words * b, words)
            e(
                f"@{f'near{b}' if tail else 'there'} ld.global.L1::no_allocate.v{words}.b32 {target}, [at{i} + {128 // groups * b}];"
            )

    def fetch_scales(k: int) -> None:
        for i in range(rows):
            if tail:  # else a lane past K would look up what it never loaded
                e(f"mov.u32 q{k}_{i}, 0; mov.f32 am{k}_{i}, 0f00000000;")
            if nested:
                e(f"cvt.u64.u32 d, block{i}; add.u64 d, $3, d; @scaled ld.global.u8 q{k}_{i}, [d];")
                e(
                    f"shr.u32 u, block{i}, $14; mul.wide.u32 d, u, 4; add.u64 d, $5, d; @scaled ld.global.nc.f32 am{k}_{i}, [d];"
                )
            else:
                e(f"mul.wide.u32 d, block{i}, 4; add.u64 d, $3, d; @scaled ld.global.f32 am{k}_{i}, [d];")

    def find_x() -> None:
        e("mul.wide.u32 d, chunk, 512; add.u64 base, x, d; shl.b32 sub, chunk, 2; mul.wide.u32 wide, $12, 128;")
        if tail:
            within_k("in")
        for n in range(columns):  # a row of X past M repeats the last; its sums are not written
            e(f"add.u32 u, g, {8 * n}; min.u32 u, u, lastm; cvt.u64.u32 d, u; mad.lo.u64 x{n}, d, wide, base;")

    def load_x(b: int) -> None:
        for n in range(columns):
            for word in range(words):
                first = 32 * n + 4 * (words * b + word)
                if tail:
                    e(" ".join(f"mov.b32 xw{first + i}, 0;" for i in range(4)))
                e(f"{f'@in{b} ' if tail else ''}ld.global.nc.v4.b32 {vector('xw', first, 4)}, "
                  f"[x{n} + {512 // groups * b + 16 * word}];")  # fmt: skip

    def store(value: str, drow: str | int, dcolumn: str | int) -> None:
        """The finished sum for row ``row + drow`` of the weight and row ``column + dcolumn`` of X."""
        e(f"add.u32 u, row, {drow}; add.u32 v, column, {dcolumn}; setp.lt.u32 p, u, $11; setp.lt.and.u32 p, v, $10, p;")
        if bias and not split:
            e("mul.wide.u32 d, u, 2; add.u64 d, $9, d; mov.b16 high, 0; @p ld.global.b16 high, [d];")
            e("cvt.f32.f16 f, high;" if half else "mov.b16 low, 0; mov.b32 idx, {low, high}; mov.b32 f, idx;")
            e(f"add.rn.f32 {value}, {value}, f;")
        e("cvt.u64.u32 d, v; cvt.u64.u32 wide, $11; cvt.u64.u32 base, u;")
        if split:
            e("mul.wide.u32 part, slice, $10; add.u64 d, d, part;")
        e("mad.lo.u64 d, d, wide, base;")
        if split:
            e(f"shl.b64 d, d, 2; add.u64 d, d, $8; @p st.global.f32 [d], {value};")
        else:
            e(f"shl.b64 d, d, 1; add.u64 d, d, $8; cvt.rn.{name}.f32 high, {value}; @p st.global.b16 [d], high;")

    e("{")
    e(f".shared .align 16 .b8 table[{TABLE_BYTES}];")
    if nested:
        e(".shared .align 16 .b8 scales[1024];")
    if along_k > 1:
        e(f".shared .align 16 .b8 sums[{SUM_BYTES}];{' .shared .align 8 .b64 full, free;' if wait else ''}")
    e(
        f".reg .pred p, more, last, there, scaled, in<4>, near<4>; .reg .b16 high, low; .reg .f32 offset, f, w0, w1, {', '.join(f'code2{i}' for i in range(0, 256, 32 * warps))};"
    )
    e(".reg .b32 tid, lane, g, t, wn, wk, lastn, lastm, rowbytes, u, v, row, column, idx, sub, look, buf, turn;")
    e(".reg .b32 step, steps, per, atit, attile, end, first, stop, chunk, fetch, fetchit, fetchtile, slice, c0, c1;")
    e(".reg .b64 d, base, wide, part, packed, x;")
    e(f".reg .b32 xw<{32 * columns}>, a<{8 * words * tiles}>, block<{rows}>; .reg .b64 at<{rows}>;")
    for k in range(ahead):
        e(f".reg .b32 word{k}_<{8 * rows}>, q{k}_<{rows}>; .reg .f32 am{k}_<{rows}>;")
    e(f".reg .f32 own<{rows}>, s<{rows}>, acc<{registers}>, sum<{len(mine)}>;")
    e(f".reg .b64 x<{columns}>;")

    # lane (g, t): rows g and g + 8 of a tile of the weight, row g of a tile of X
    e("mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 g, lane, 2; and.b32 t, lane, 3;")
    e(f"shr.u32 u, tid, 5; and.b32 wk, u, {along_k - 1}; shr.u32 wn, u, {log2(along_k)};")
    e("and.b32 u, lane, 15; mul.wide.u32 d, u, 4; add.u64 d, $4, d; ld.global.f32 f, [d];")
    shared_scales = range(0, 256, 32 * warps) if nested else ()
    for i in shared_scales:
        e(
            f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mul.wide.u32 d, u, 4; add.u64 d, $6, d; @p ld.global.f32 code2{i}, [d];"
        )
    if nested:
        e("ld.global.f32 offset, [$7];")
    e("sub.u32 lastn, $11, 1; sub.u32 lastm, $10, 1; shl.b32 rowbytes, $12, 5;")
    # row groups [attile, end): programs i, i + $15, i + 2 $15, ... divide the i-th of $15 even shares among them,
    # since they run on one multiprocessor
    e(f"add.u32 u, $11, {8 * rows * along_n - 1}; div.u32 u, u, {8 * rows * along_n};")
    e("mov.u32 v, %ctaid.x; mov.u32 row, %nctaid.x; div.u32 row, row, $16; div.u32 slice, v, row; rem.u32 v, v, row;")
    e("div.u32 row, row, $15; div.u32 idx, v, $15; rem.u32 v, v, $15;")
    e(
        "mul.lo.u32 attile, v, u; div.u32 attile, attile, $15; add.u32 v, v, 1; mul.lo.u32 end, v, u; div.u32 end, end, $15;"
    )
    e("sub.u32 u, end, attile; mul.lo.u32 v, u, idx; div.u32 v, v, row;")
    e(
        "add.u32 idx, idx, 1; mul.lo.u32 u, u, idx; div.u32 u, u, row; add.u32 end, attile, u; add.u32 attile, attile, v;"
    )
    # chunks first, first + along_k, ... < stop of this warp, `per` of them a row group for every warp
    e("add.u32 u, $12, 3; shr.u32 u, u, 2; mul.lo.u32 first, slice, u; div.u32 first, first, $16;")
    e("add.u32 v, slice, 1; mul.lo.u32 stop, v, u; div.u32 stop, stop, $16;")
    e(
        f"sub.u32 u, stop, first; add.u32 u, u, {along_k - 1}; shr.u32 per, u, {log2(along_k)}; add.u32 first, first, wk;"
    )
    e("sub.u32 u, end, attile; mul.lo.u32 steps, u, per; mov.u32 step, 0; mov.u32 atit, 0; mov.u32 turn, 0;")
    e("mov.u32 fetch, 0; mov.u32 fetchit, 0; mov.u32 fetchtile, attile;")
    e(f"mul.wide.u32 d, t, {4 * words}; add.u64 packed, $2, d; mul.wide.u32 d, t, {16 * words}; add.u64 x, $1, d;")
    e(" ".join(f"mov.f32 acc{i}, 0f00000000;" for i in range(registers)))
    for k in range(ahead):
        aim()
        fetch_scales(k)
        for b in range(groups):
            fetch_words(k, b)

    e("mov.u32 chunk, first;")
    if still:
        e("setp.ge.u32 p, chunk, stop; @p bra TABLE;")
        find_x()
        for b in range(groups):
            load_x(b)
    # with all that in flight: the table, an entry a half warp at a time, high nibble first; and code2
    e("TABLE: and.b32 u, lane, 15; shl.b32 u, u, 3; mov.u32 look, table; add.u32 look, look, u;")
    e("shr.u32 u, tid, 5; shl.b32 u, u, 1; shr.u32 row, lane, 4; add.u32 row, row, u; mov.b32 v, f;")
    for i in range(0, 256, 2 * warps):
        e(f"add.u32 idx, row, {i}; shr.u32 u, idx, 4; shfl.sync.idx.b32 sub, v, u, 0x1f, 0xffffffff;")
        e("and.b32 u, idx, 15; shfl.sync.idx.b32 buf, v, u, 0x1f, 0xffffffff;")
        e("shl.b32 u, idx, 7; add.u32 u, u, look; st.shared.v2.b32 [u], {sub, buf};")
    for i in shared_scales:
        e(
            f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mov.u32 v, scales; mad.lo.u32 v, u, 4, v; @p st.shared.f32 [v], code2{i};"
        )
    if along_k > 1 and wait:
        e(f"setp.eq.u32 p, tid, 0; @p mbarrier.init.shared.b64 [full], {32 * warps};")
        e(f"@p mbarrier.init.shared.b64 [free], {32 * along_n * min(together, along_k)};")
    e("bar.sync 0;")
    e("setp.eq.u32 p, steps, 0; @p bra DONE;")

    e("LOOP:")
    for k in range(ahead):
        e(f"mad.lo.u32 chunk, atit, {along_k}, first; add.u32 u, atit, 1; setp.eq.u32 last, u, per;")
        aim()
        e(f"setp.ge.u32 p, chunk, stop; @p bra IDLE{k};")
        if not still:
            find_x()
            load_x(0)
        for i in range(rows):
            if nested:  # two roundings, never an FMA
                e(f"mov.u32 v, scales; mad.lo.u32 v, q{k}_{i}, 4, v; ld.shared.f32 f, [v];")
                e(f"mul.rn.f32 f, f, am{k}_{i}; add.rn.f32 own{i}, f, offset;")
            else:
                e(f"mov.f32 own{i}, am{k}_{i};")
        fetch_scales(k)
        if wide:
            e("shr.u32 column, t, 1;")
        for b in range(groups):
            if b + 1 < groups and not still:
                load_x(b + 1)
            for i in range(rows):
                source = f"add.u32 v, column, {2 * b};" if wide else f"mov.u32 v, {b};"
                e(f"{source} mov.b32 u, own{i}; shfl.sync.idx.b32 u, u, v, 0x1c1f, 0xffffffff; mov.b32 s{i}, u;")
            # A is 4 registers: rows g and g + 8 at the mma's low K, then at its high K
            for i in range(rows):
                for byte in range(4 * words):
                    register = 8 * words * (i // 2) + 2 * byte + i % 2
                    e(f"dp4a.u32.u32 u, word{k}_{8 * i + words * b + byte // 4}, {0x80 << 8 * (byte % 4)}, look;")
                    e(f"ld.shared.v2.f32 {{w0, w1}}, [u]; mul.rn.f32 w0, w0, s{i}; mul.rn.f32 w1, w1, s{i};")
                    if pairs:
                        e(f"cvt.rn.{name}x2.f32 a{register}, w1, w0;")
                    else:
                        e(f"cvt.rn.{name}.f32 low, w0; cvt.rn.{name}.f32 high, w1; mov.b32 a{register}, {{low, high}};")
            fetch_words(k, b)
            for j in range(0, 4 * words, depth // 8):  # pairs of registers of A, single ones of B
                for n in range(columns):
                    for i in range(tiles):
                        c = vector("acc", 4 * (tiles * n + i), 4)
                        fragment = vector("xw", 32 * n + 4 * words * b + j, depth // 8)
                        e(f"{mma} {c}, {vector('a', 8 * words * i + 2 * j, depth // 4)}, {fragment}, {c};")

        e(f"bra.uni SUM{k};")
        e(f"IDLE{k}:")
        fetch_scales(k)
        for b in range(groups):
            fetch_words(k, b)
        e(f"SUM{k}: @!last bra NEXT{k};")
        e(f"mad.lo.u32 u, attile, {along_n}, wn; mad.lo.u32 row, u, {8 * rows}, g; shl.b32 column, t, 1;")
        if along_k == 1:
            for i in range(registers):  # register 2 (rows n + i) + k: row 8 i of the weight, row 8 n + k of X
                store(f"acc{i}", 8 * (i // 2 % rows), 8 * (i // 2 // rows) + i % 2)
        else:
            # sums[wn][wk][register][lane]. Two mbarriers in place of bar.sync: a warp that sums nothing now leaves its part
            # (full) and goes on, and waits only where the sums before are not yet taken (free). 22.0 -> 18.9 us at 8 rows,
            # 14336x4096, H200
            e(f"mov.u32 buf, sums; mad.lo.u32 buf, wn, {along_k * together * 128}, buf; mad.lo.u32 buf, lane, 4, buf;")
            for r in range(0, registers, together):
                e(f"xor.b32 v, turn, 1; {await_('free', 'v', f'FREE{k}_{r}')}")
                e(f"mad.lo.u32 u, wk, {together * 128}, buf;")
                e(" ".join(f"st.shared.f32 [u + {128 * i}], acc{r + i};" for i in range(together)))
                e(arrive("full"))
                e(f"sub.u32 sub, wk, {r % along_k};")  # register i is for warp i % along_k
                if together < along_k:
                    e(f"setp.ge.u32 p, sub, {together}; @p bra SUMMED{k}_{r};")
                e(await_("full", "turn", f"FULL{k}_{r}"))
                for i in mine:
                    e(f"add.u32 u, sub, {i * along_k}; mad.lo.u32 u, u, 128, buf; mov.f32 sum{i}, 0f00000000;")
                    for j in range(along_k):
                        e(f"ld.shared.f32 f, [u + {j * together * 128}]; add.rn.f32 sum{i}, sum{i}, f;")
                e(arrive("free"))
                for i in mine:
                    e(f"add.u32 idx, sub, {r + i * along_k}; and.b32 c0, idx, 1; shr.u32 idx, idx, 1;")
                    e(f"and.b32 c1, idx, {rows - 1}; shl.b32 c1, c1, 3; shr.u32 idx, idx, {log2(rows)};")
                    e("mad.lo.u32 c0, idx, 8, c0;")
                    store(f"sum{i}", "c1", "c0")
                e(f"SUMMED{k}_{r}: xor.b32 turn, turn, 1;")
        e(" ".join(f"mov.f32 acc{i}, 0f00000000;" for i in range(registers)))
        e(f"NEXT{k}: add.u32 step, step, 1; setp.lt.u32 more, step, steps;")
        advance("at")
        e("@more bra LOOP;" if k + 1 == ahead else "@!more bra DONE;")
    e("DONE:")
    e("mov.u32 $0, 0;")
    e("}")
    return "\n".join(text)
