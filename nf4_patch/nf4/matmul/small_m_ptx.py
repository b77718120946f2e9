"""The inline PTX of the fused matmul for few rows of X: the source of one CTA for one configuration.

``out[M, N] = X[M, K] @ weight[N, K].T``. A warp takes 16-row tiles of the weight as the A operand of
``mma.sync.m16n8k16`` and 8-row tiles of X as B, fp32 accumulators, no matrix operand in shared memory:

* K goes in chunks of 256 elements, 128 bytes of a packed row. A lane loads 64 or 128 bits of its rows' words, and the
  mma's K order is permuted alike on both sides, so that the lane's own bytes *are* its fragment.
* A byte is looked up whole: 256 entries of two fp32 codes in shared memory, one ``dp4a`` for the address (byte * 128 +
  lane) and one 64-bit load. Then code * scale, rounded once and packed: the bits that dequantize writes.
* The warps of a CTA split K and add up their parts in warp order, so the result does not vary from run to run.

* As soon as a group of words is decoded, the same group of the next chunk is asked for into the same registers.

What bounds it (H200, ncu): up to 16 rows the L1 data pipe, 200 cycles a warp for 16 rows x 256, 128 of them lookups;
from 32 rows on the latency of X, which comes through the same pipe behind the weight.
"""

from __future__ import annotations

import functools
import math

from .small_m_traffic_ptx import DIALECTS, Traffic, log2, vector

TABLE_BYTES = 32768  # 256 entries x 16 copies x 8 B: a 64-bit shared load serves 16 lanes a cycle, each its own copy
SUM_BYTES = 8192  # partial sums. With the table and code2 under 48 KiB, which a kernel gets unasked
CONSTRAINTS = "=r,l,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r"


@functools.lru_cache(maxsize=256)
def program(
    tiles: int, n_tiles: int, warps_n: int, warps_k: int, load_128bit: bool, prefetch_depth: int, x_in_registers: bool,
    half: bool, nested: bool, tail: bool, split_k: bool, bias: bool, capability: tuple[int, int] = (9, 0),
) -> str:  # fmt: skip
    """The PTX source for a :class:`Cta` of these fields.

    Operands: $1 x, $2 packed, $3 absmax, $4 code, $5 absmax2, $6 code2, $7 offset, $8 out, $9 bias (addresses);
    $10 M, $11 N, $12 K / 64, $13 log2(blocksize / 64), $14 log2(blocksize2), $15 even shares of the rows, $16 slices of K.
    The grid is shares x CTAs a share x slices, shares fastest."""
    return Cta(
        tiles, n_tiles, warps_n, warps_k, load_128bit, prefetch_depth, x_in_registers, half, nested, tail, split_k, bias,
        DIALECTS[max(known for known in DIALECTS if known <= capability)],
    ).source()  # fmt: skip


class Cta(Traffic):
    """The source, part by part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.warps, self.registers = self.warps_n * self.warps_k, 4 * self.tiles * self.n_tiles
        # accumulators the warps add up at a time, of which each summing warp takes so many
        self.together = math.gcd(self.registers, SUM_BYTES // (128 * self.warps))
        self.mine = range(max(1, self.together // self.warps_k))
        self.barriers = self.warps_k > 1 and bool(self.dialect.wait)

    def source(self) -> str:
        self.declare()
        self.share_out()
        self.start_fetching()
        self.fill_tables()
        self.add("LOOP:")
        for k in range(self.prefetch_depth):
            self.multiply_chunk(k)
            self.finish_rows(k)
        self.add("DONE:")
        self.add("mov.u32 $0, 0;")
        self.add("}")
        return "\n".join(self.lines)

    def declare(self) -> None:
        e, rows, code2 = self.add, self.rows, ", ".join(f"code2{i}" for i in range(0, 256, 32 * self.warps))
        e("{")
        e(f".shared .align 16 .b8 table[{TABLE_BYTES}];")
        if self.nested:
            e(".shared .align 16 .b8 scales[1024];")
        if self.warps_k > 1:
            barriers = " .shared .align 8 .b64 full, free;" if self.dialect.wait else ""
            e(f".shared .align 16 .b8 sums[{SUM_BYTES}];{barriers}")
        e(".reg .pred p, more, last, there, scaled, in<4>, near<4>; .reg .b16 high, low; "
          f".reg .f32 offset, f, w0, w1, {code2};")  # fmt: skip
        e(".reg .b32 tid, lane, g, t, wn, wk, lastn, lastm, rowbytes, u, v, row, column, idx, sub, look, buf, turn;")
        e(
            ".reg .b32 step, steps, per, atit, attile, end, first, stop, chunk, fetch, fetchit, fetchtile, slice, c0, c1;"
        )
        e(".reg .b64 d, base, wide, part, packed, x;")
        e(f".reg .b32 xw<{32 * self.n_tiles}>, a<{8 * self.words * self.tiles}>, block<{rows}>; .reg .b64 at<{rows}>;")
        for k in range(self.prefetch_depth):
            e(f".reg .b32 word{k}_<{8 * rows}>, q{k}_<{rows}>; .reg .f32 am{k}_<{rows}>;")
        e(f".reg .f32 own<{rows}>, s<{rows}>, acc<{self.registers}>, sum<{len(self.mine)}>;")
        e(f".reg .b64 x<{self.n_tiles}>;")

    def share_out(self) -> None:
        """Which rows of the weight and which chunks of K are this warp's."""
        e, rows = self.add, 8 * self.rows * self.warps_n
        # lane (g, t): rows g and g + 8 of a tile of the weight, row g of a tile of X
        e("mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 g, lane, 2; and.b32 t, lane, 3;")
        e(f"shr.u32 u, tid, 5; and.b32 wk, u, {self.warps_k - 1}; shr.u32 wn, u, {log2(self.warps_k)};")
        e("and.b32 u, lane, 15; mul.wide.u32 d, u, 4; add.u64 d, $4, d; ld.global.f32 f, [d];")
        for i in self.code2_parts():
            e(f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mul.wide.u32 d, u, 4; add.u64 d, $6, d; "
              f"@p ld.global.f32 code2{i}, [d];")  # fmt: skip
        if self.nested:
            e("ld.global.f32 offset, [$7];")
        e("sub.u32 lastn, $11, 1; sub.u32 lastm, $10, 1; shl.b32 rowbytes, $12, 5;")
        # row groups [attile, end): CTAs i, i + $15, i + 2 $15, ... divide the i-th of $15 even shares among them,
        # since they run on one multiprocessor
        e(f"add.u32 u, $11, {rows - 1}; div.u32 u, u, {rows};")
        e(
            "mov.u32 v, %ctaid.x; mov.u32 row, %nctaid.x; div.u32 row, row, $16; div.u32 slice, v, row; rem.u32 v, v, row;"
        )
        e("div.u32 row, row, $15; div.u32 idx, v, $15; rem.u32 v, v, $15;")
        e("mul.lo.u32 attile, v, u; div.u32 attile, attile, $15; add.u32 v, v, 1; mul.lo.u32 end, v, u; "
          "div.u32 end, end, $15;")  # fmt: skip
        e("sub.u32 u, end, attile; mul.lo.u32 v, u, idx; div.u32 v, v, row;")
        e("add.u32 idx, idx, 1; mul.lo.u32 u, u, idx; div.u32 u, u, row; add.u32 end, attile, u; "
          "add.u32 attile, attile, v;")  # fmt: skip
        # chunks first, first + warps_k, ... < stop of this warp, `per` of them a row group for every warp
        e("add.u32 u, $12, 3; shr.u32 u, u, 2; mul.lo.u32 first, slice, u; div.u32 first, first, $16;")
        e("add.u32 v, slice, 1; mul.lo.u32 stop, v, u; div.u32 stop, stop, $16;")
        e(f"sub.u32 u, stop, first; add.u32 u, u, {self.warps_k - 1}; shr.u32 per, u, {log2(self.warps_k)}; "
          "add.u32 first, first, wk;")  # fmt: skip
        e("sub.u32 u, end, attile; mul.lo.u32 steps, u, per; mov.u32 step, 0; mov.u32 atit, 0; mov.u32 turn, 0;")
        e("mov.u32 fetch, 0; mov.u32 fetchit, 0; mov.u32 fetchtile, attile;")

    def start_fetching(self) -> None:
        """The first chunks' words and scales, and the part of X that stays."""
        e, words = self.add, self.words
        e(f"mul.wide.u32 d, t, {4 * words}; add.u64 packed, $2, d; mul.wide.u32 d, t, {16 * words}; add.u64 x, $1, d;")
        self.clear_sums()
        for k in range(self.prefetch_depth):
            self.aim()
            self.fetch_scales(k)
            for b in range(self.groups):
                self.fetch_words(k, b)
        e("mov.u32 chunk, first;")
        if self.x_in_registers:
            e("setp.ge.u32 p, chunk, stop; @p bra TABLE;")
            self.find_x()
            for b in range(self.groups):
                self.load_x(b)

    def fill_tables(self) -> None:
        """With all that in flight: the table, an entry a half warp at a time, high nibble first; and code2."""
        e = self.add
        e("TABLE: and.b32 u, lane, 15; shl.b32 u, u, 3; mov.u32 look, table; add.u32 look, look, u;")
        e("shr.u32 u, tid, 5; shl.b32 u, u, 1; shr.u32 row, lane, 4; add.u32 row, row, u; mov.b32 v, f;")
        for i in range(0, 256, 2 * self.warps):
            e(f"add.u32 idx, row, {i}; shr.u32 u, idx, 4; shfl.sync.idx.b32 sub, v, u, 0x1f, 0xffffffff;")
            e("and.b32 u, idx, 15; shfl.sync.idx.b32 buf, v, u, 0x1f, 0xffffffff;")
            e("shl.b32 u, idx, 7; add.u32 u, u, look; st.shared.v2.b32 [u], {sub, buf};")
        for i in self.code2_parts():
            e(f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mov.u32 v, scales; mad.lo.u32 v, u, 4, v; "
              f"@p st.shared.f32 [v], code2{i};")  # fmt: skip
        if self.barriers:
            e(f"setp.eq.u32 p, tid, 0; @p mbarrier.init.shared.b64 [full], {32 * self.warps};")
            e(f"@p mbarrier.init.shared.b64 [free], {32 * self.warps_n * min(self.together, self.warps_k)};")
        e("bar.sync 0;")
        e("setp.eq.u32 p, steps, 0; @p bra DONE;")

    def code2_parts(self) -> range:
        """Of code2, a lane's entries: tid, tid + lanes, ..."""
        return range(0, 256, 32 * self.warps) if self.nested else range(0)

    def multiply_chunk(self, k: int) -> None:
        """The chunk in registers ``k``, while the next one of them is fetched into the same."""
        e = self.add
        e(f"mad.lo.u32 chunk, atit, {self.warps_k}, first; add.u32 u, atit, 1; setp.eq.u32 last, u, per;")
        self.aim()
        e(f"setp.ge.u32 p, chunk, stop; @p bra IDLE{k};")
        if not self.x_in_registers:
            self.find_x()
            self.load_x(0)
        for i in range(self.rows):
            if self.nested:  # two roundings, never an FMA
                e(f"mov.u32 v, scales; mad.lo.u32 v, q{k}_{i}, 4, v; ld.shared.f32 f, [v];")
                e(f"mul.rn.f32 f, f, am{k}_{i}; add.rn.f32 own{i}, f, offset;")
            else:
                e(f"mov.f32 own{i}, am{k}_{i};")
        self.fetch_scales(k)
        if self.load_128bit:
            e("shr.u32 column, t, 1;")
        for b in range(self.groups):
            if b + 1 < self.groups and not self.x_in_registers:
                self.load_x(b + 1)
            self.decode(k, b)
            self.fetch_words(k, b)
            self.multiply(b)
        e(f"bra.uni SUM{k};")
        e(f"IDLE{k}:")
        self.fetch_scales(k)
        for b in range(self.groups):
            self.fetch_words(k, b)

    def decode(self, k: int, b: int) -> None:
        """Group b of a chunk's words into A: 4 registers, rows g and g + 8 at the mma's low K, then at its high K."""
        e, words = self.add, self.words
        for i in range(self.rows):
            source = f"add.u32 v, column, {2 * b};" if self.load_128bit else f"mov.u32 v, {b};"
            e(f"{source} mov.b32 u, own{i}; shfl.sync.idx.b32 u, u, v, 0x1c1f, 0xffffffff; mov.b32 s{i}, u;")
        for i in range(self.rows):
            for byte in range(4 * words):
                register = 8 * words * (i // 2) + 2 * byte + i % 2
                e(f"dp4a.u32.u32 u, word{k}_{8 * i + words * b + byte // 4}, {0x80 << 8 * (byte % 4)}, look;")
                e(f"ld.shared.v2.f32 {{w0, w1}}, [u]; mul.rn.f32 w0, w0, s{i}; mul.rn.f32 w1, w1, s{i};")
                if self.dialect.pairs:
                    e(f"cvt.rn.{self.name}x2.f32 a{register}, w1, w0;")
                else:
                    e(f"cvt.rn.{self.name}.f32 low, w0; cvt.rn.{self.name}.f32 high, w1; "
                      f"mov.b32 a{register}, {{low, high}};")  # fmt: skip

    def multiply(self, b: int) -> None:
        words, depth = self.words, self.dialect.depth
        mma = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{self.name}.{self.name}.f32"
        for j in range(0, 4 * words, depth // 8):  # pairs of registers of A, single ones of B
            for n in range(self.n_tiles):
                for i in range(self.tiles):
                    c = vector("acc", 4 * (self.tiles * n + i), 4)
                    fragment = vector("xw", 32 * n + 4 * words * b + j, depth // 8)
                    self.add(f"{mma} {c}, {vector('a', 8 * words * i + 2 * j, depth // 4)}, {fragment}, {c};")

    def finish_rows(self, k: int) -> None:
        """After the last chunk of a row group: add up the warps' sums, store, begin the next group."""
        e, rows = self.add, self.rows
        e(f"SUM{k}: @!last bra NEXT{k};")
        e(f"mad.lo.u32 u, attile, {self.warps_n}, wn; mad.lo.u32 row, u, {8 * rows}, g; shl.b32 column, t, 1;")
        if self.warps_k == 1:
            for i in range(self.registers):  # register 2 (rows n + i) + k: row 8 i of the weight, row 8 n + k of X
                self.store(f"acc{i}", 8 * (i // 2 % rows), 8 * (i // 2 // rows) + i % 2)
        else:
            e(f"mov.u32 buf, sums; mad.lo.u32 buf, wn, {self.warps_k * self.together * 128}, buf; "
              "mad.lo.u32 buf, lane, 4, buf;")  # fmt: skip
            for r in range(0, self.registers, self.together):
                self.add_up(k, r)
        self.clear_sums()
        e(f"NEXT{k}: add.u32 step, step, 1; setp.lt.u32 more, step, steps;")
        self.advance("at")
        e("@more bra LOOP;" if k + 1 == self.prefetch_depth else "@!more bra DONE;")

    def clear_sums(self) -> None:
        self.add(" ".join(f"mov.f32 acc{i}, 0f00000000;" for i in range(self.registers)))

    def add_up(self, k: int, r: int) -> None:
        """Registers r to r + together of all warps along K, by sums[wn][wk][register][lane]; register i by warp i % warps_k.

        Two mbarriers in place of bar.sync: a warp that sums nothing now leaves its part (full) and goes on, and waits only
        where the sums before are not yet taken (free). 22.0 -> 18.9 us at 8 rows, 14336x4096, H200.
        """
        e, together, warps_k = self.add, self.together, self.warps_k
        e(f"xor.b32 v, turn, 1; {self.await_('free', 'v', f'FREE{k}_{r}')}")
        e(f"mad.lo.u32 u, wk, {together * 128}, buf;")
        e(" ".join(f"st.shared.f32 [u + {128 * i}], acc{r + i};" for i in range(together)))
        e(self.arrive("full"))
        e(f"sub.u32 sub, wk, {r % warps_k};")
        if together < warps_k:
            e(f"setp.ge.u32 p, sub, {together}; @p bra SUMMED{k}_{r};")
        e(self.await_("full", "turn", f"FULL{k}_{r}"))
        for i in self.mine:
            e(f"add.u32 u, sub, {i * warps_k}; mad.lo.u32 u, u, 128, buf; mov.f32 sum{i}, 0f00000000;")
            for j in range(warps_k):
                e(f"ld.shared.f32 f, [u + {j * together * 128}]; add.rn.f32 sum{i}, sum{i}, f;")
        e(self.arrive("free"))
        for i in self.mine:
            e(f"add.u32 idx, sub, {r + i * warps_k}; and.b32 c0, idx, 1; shr.u32 idx, idx, 1;")
            e(f"and.b32 c1, idx, {self.rows - 1}; shl.b32 c1, c1, 3; shr.u32 idx, idx, {log2(self.rows)};")
            e("mad.lo.u32 c0, idx, 8, c0;")
            self.store(f"sum{i}", "c1", "c0")
        e(f"SUMMED{k}_{r}: xor.b32 turn, turn, 1;")

    def arrive(self, barrier: str) -> str:
        """This warp has left its part of the sums (full), or taken what it adds up (free)."""
        if self.dialect.wait:
            # Every lane for itself: racecheck (2025.3.1) reports the stores of all lanes but one that arrives for its warp.
            return f"bar.warp.sync 0xffffffff; mbarrier.arrive.shared.b64 _, [{barrier}];"
        return "bar.sync 0;" if barrier == "full" else ""

    def await_(self, barrier: str, phase: str, label: str) -> str:
        """All of them have."""
        if self.dialect.wait:
            return f"{label}: {self.dialect.wait} p, [{barrier}], {phase}; @!p bra {label};"
        return "bar.sync 0;" if barrier == "free" else ""
