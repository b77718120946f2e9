"""Generate the inline PTX of the fused matmul for few rows of X. The PTX is the code of one CTA for a given config.

A CTA computes a part of ``out[M, N] = X[M, K] @ weight[N, K].T`` with the instruction ``mma.sync.m16n8k16``. The A operand of
an mma is a tile of 16 rows of the weight, and the B operand is a tile of 8 rows of X. Accumulators are fp32. The weight and X
are loaded from global memory directly into registers, not through shared memory.

* A warp processes K in chunks of 256 elements, which are 128 bytes of a packed row. Per chunk, a lane loads two groups
  of 128 bits, or four groups of 64 bits, from each of its rows. A and B use the same permutation of K. The permutation
  is chosen so that a lane loads exactly the bytes that it needs for its part of the A operand.
* Each byte holds two weights, which are decoded together. A table in shared memory maps each value of a byte to two fp32
  codes. There are 16 copies of the table. One ``dp4a`` computes the address of an entry (byte * 128 + the start of the
  lane's copy), and one 64-bit load reads the entry. Each product code * scale is rounded once, so the decoded weights are
  bit-identical to those of dequantize.
* On Hopper and newer, a warp with two tiles of the weight decodes only one half of its rows with the table. It decodes
  the other half with byte permutes (byte_permutes.py), because the arithmetic units have time left.
* The warps of a CTA split K and add their partial sums in warp order, so results do not vary between runs.
* As soon as a group is decoded, the same group of a later chunk is loaded into the same registers.

These are the bottlenecks, as measured with Nsight Compute on an H200. With up to 16 rows of X and no byte permutes, the L1
data pipe limits the speed. For 16 rows x 256 elements of the weight, a warp uses this pipe for 200 cycles, and 128 of these
cycles are table lookups. From 32 rows upwards, the latency of loads of X limits the speed, because these loads wait in the
same pipe behind loads of the weight.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import byte_permutes
from .byte_permutes import vector
from .tuning import SmallMConfig

# The size of 16 copies of the decoding table, which has 256 entries of 8 bytes. Shared memory serves 16 lanes per cycle
# with 64-bit loads, so each of these 16 lanes gets its own copy of the table.
TABLE_BYTES = 32768
# Shared memory for partial sums. With the table and code2, less than 48 KiB are used. More would need an opt-in.
SUM_BYTES = 8192
# Shared memory for the partial sums and an adapter together, which is the rest of 48 KiB after the table, code2 (1,024
# bytes), and the codes and barriers (256 bytes).
SHARED_BYTES = 49152 - TABLE_BYTES - 1024 - 256


class Dialect(NamedTuple):
    """The PTX instructions of one GPU generation."""

    mma_k: int  # K of one mma: 16, or 8 on sm_75, where two mma instructions replace one
    packed_convert: bool  # whether one instruction rounds two fp32 numbers and packs them
    wait: str  # instruction that waits for an mbarrier; "" if the CTA uses bar.sync instead
    hopper: bool = False  # use dependent launches, and byte permutes for half the rows of a warp with two tiles


DIALECTS = {
    (7, 5): Dialect(8, False, ""),  # fp16 only
    (8, 0): Dialect(16, True, "mbarrier.test_wait.parity.shared.b64"),  # a waiting warp spins
    (9, 0): Dialect(16, True, "mbarrier.try_wait.parity.shared.b64", True),  # a waiting warp may be suspended
}

OFFSETS = {
    "f32": "ld.global.f32 offset, [$7];",
    "f16": "ld.global.b16 high, [$7]; cvt.f32.f16 offset, high;",
    "bf16": "ld.global.b16 high, [$7]; mov.b16 low, 0; mov.b32 offset, {low, high};",  # cvt for bf16 needs sm_90
}


def log2(x: int) -> int:
    return x.bit_length() - 1


class AdapterLayout(NamedTuple):
    """The layout of a LoRA adapter, as constants of the PTX."""

    rank: int  # a multiple of 4
    wide: bool  # B is fp32, else it has x's dtype
    parts: int  # K is split into this many parts; the inner product s * x @ A.T is the sum of the products of the parts

    @property
    def ranks(self) -> int:
        """Return how many mma blocks of 16 columns B has."""
        return -(-self.rank // 16)

    @property
    def fragments(self) -> int:
        """Return how many mma operands 16 rows of B need (``Cta.split``)."""
        return self.ranks * (1 + self.wide)

    def inner_bytes(self, n_tiles: int) -> int:
        """Return the bytes of shared memory for the inner product, one 16-bit array or, if ``wide``, two."""
        return 256 * n_tiles * self.fragments

    def sum_bytes(self, n_tiles: int) -> int:
        """Return the bytes of shared memory for the warps' partial sums next to the inner product, or 0 if none fit."""
        left = SHARED_BYTES - self.inner_bytes(n_tiles)
        return next((size for size in (SUM_BYTES, SUM_BYTES // 2) if size <= left), 0)


@dataclass
class Cta:
    """Generates the PTX of one CTA. The docstring of a method describes the PTX that the method emits."""

    config: SmallMConfig
    n_tiles: int  # 8-row tiles of X
    x_in_registers: bool  # True if each warp has only one chunk of K; its part of X then stays in registers
    half: bool  # True for fp16, False for bf16
    offset: str  # dtype of the offset: f32, f16 or bf16; "" for a flat weight
    step: int  # elements of K that always share a scale: 64, 32, or 16 (with 64-bit loads only)
    tail: bool  # whether K is not a multiple of 256
    split_k: bool  # whether CTAs split K and write fp32 partial sums to out[split_k, M, N]
    bias: bool
    capability: tuple[int, int]
    adapter: AdapterLayout | None = None

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        self.emit = self.lines.append
        self.tiles, self.warps_n, self.warps_k, self.load_128bit, _, self.prefetch_depth, _ = self.config
        self.dialect = DIALECTS[max(known for known in DIALECTS if known <= self.capability)]
        self.rows = 2 * self.tiles  # rows of the weight per lane
        # Byte permutes are faster with two tiles per warp, but not with one.
        # For 8 rows, 4096x14336, the kernel takes 18.2 us with byte permutes, and 20.1 without (H200, triton 3.6.0).
        # For 64 rows, 14336x4096, the kernel takes 39.2 us with byte permutes, and 42.3 without.
        self.permutes = self.dialect.hopper and self.tiles > 1
        # From each of its rows, a lane loads ``groups`` groups per chunk. A group consists of ``words`` 32-bit words.
        # A chunk consists of ``steps`` steps of K. The ``step`` elements of one step share a scale.
        # Group b of a lane belongs to step b * group_steps + lane_step of the chunk.
        self.groups, self.words = (2, 4) if self.load_128bit else (4, 2)
        self.steps, self.group_steps = 256 // self.step, 256 // self.groups // self.step
        lanes = self.step // (8 * self.words)  # number of lanes whose words belong to the same step
        self.lane_step = "mov.u32 {}, 0;" if lanes == 4 else f"shr.u32 {{}}, t, {log2(lanes)};"
        self.scales = self.rows * self.steps // 4  # lane t loads the scales of steps t, t + 4, ... of each of its rows
        self.name = "f16" if self.half else "bf16"
        self.dependent = self.dialect.hopper and self.config.ctas_per_sm == 1 and not self.config.split_k
        # lora_inner_kernel starts this kernel only after all earlier launches have ended. So the weight can be read while
        # lora_inner_kernel still runs, which hides the latency. X is read after the wait, because a cache may hold older values.
        self.waits_late = self.dependent and self.adapter is not None
        self.warps, self.registers = self.warps_n * self.warps_k, 4 * self.tiles * self.n_tiles
        self.ranks, self.wide = (self.adapter.ranks, self.adapter.wide) if self.adapter else (0, False)
        self.sum_bytes = self.adapter.sum_bytes(self.n_tiles) if self.adapter else SUM_BYTES
        # ``together`` is the number of accumulators that the warps add up at a time (see ``add_up``).
        # Of these accumulators, a warp adds up number sub + i * warps_k for each i in ``mine``.
        self.together = math.gcd(self.registers, self.sum_bytes // (128 * self.warps))
        self.mine = range(max(1, self.together // self.warps_k))

    def source(self) -> str:
        self.declare()
        # Programmatic dependent launch is used only with one CTA per multiprocessor and without split_k, where it saves
        # 0.6 us at 1 to 8 rows (H200, triton 3.6.0). With two CTAs per multiprocessor, a call would take up to 14 us
        # longer. With split_k, it would take 0.2 us longer for three of four sizes.
        if self.dependent:
            self.emit("griddepcontrol.launch_dependents;")
            if not self.waits_late:
                self.emit("griddepcontrol.wait;")
        self.partition()
        self.start_fetching()
        self.fill_tables()
        self.emit("LOOP:")
        for k in range(self.prefetch_depth):
            self.multiply_chunk(k)
            self.epilogue(k)
        self.emit("DONE: mov.u32 $0, 0; }")
        return "\n".join(self.lines)

    def declare(self) -> None:
        e, rows, code2 = self.emit, self.rows, ", ".join(f"code2{i}" for i in range(0, 256, 32 * self.warps))
        e("{")
        e(f".shared .align 16 .b8 table[{TABLE_BYTES}];")
        if self.permutes:
            e(f".shared .align 16 .b8 codes[64]; {byte_permutes.REGISTERS}")
        if self.offset:
            e(".shared .align 16 .b8 scales[1024];")
        if self.warps_k > 1:
            barriers = " .shared .align 8 .b64 full, free;" if self.dialect.wait else ""
            e(f".shared .align 16 .b8 sums[{self.sum_bytes}];{barriers}")
        e(".reg .pred p, more, last, there, scaled<4>, in<4>, near<4>; .reg .b16 high, low;")
        e(f".reg .f32 offset, f, w0, w1, {code2};")
        e(".reg .b32 tid, lane, g, t, wn, wk, lastn, lastm, rowbytes, u, v, row, column, idx, sub, look, buf, turn;")
        e(".reg .b32 step, steps, per, atit, attile, end, first, stop, chunk, fetch, fetchit, fetchtile, split;")
        e(".reg .b32 dm, dn; .reg .b64 d, base, wide, part, packed, x;")
        e(
            f".reg .b32 xw<{32 * self.n_tiles}>, a<{8 * self.words * self.tiles}>, block<{self.scales}>; .reg .b64 at<{rows}>;"
        )
        for k in range(self.prefetch_depth):
            e(f".reg .b32 word{k}_<{8 * rows}>, q{k}_<{self.scales}>; .reg .f32 am{k}_<{self.scales}>;")
        e(f".reg .f32 own<{self.scales}>, s<{rows}>, acc<{self.registers}>, sum<{len(self.mine)}>;")
        e(f".reg .b64 x<{self.n_tiles}>;")
        if self.adapter:
            fragments = 4 * self.tiles * self.ranks  # number of registers for B; each register holds two 16-bit numbers
            e(f".shared .align 16 .b8 inner[{self.adapter.inner_bytes(self.n_tiles)}]; .reg .pred ours, within;")
            e(f".reg .f32 lu<4>, piece<{4 * self.adapter.parts}>; .reg .b32 lx<4>, lb<{fragments}>, rest<4>;")
            if self.wide:
                e(f".reg .f32 wide<{2 * fragments}>;")

    def partition(self) -> None:
        """Compute which rows and chunks of K this warp processes. Start to load code, code2 and offset."""
        e, rows = self.emit, 8 * self.rows * self.warps_n
        # g is lane / 4, and t is lane % 4.
        # A lane holds rows g and g + 8 of each tile of the weight, and row g of each tile of X.
        e("mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 g, lane, 2; and.b32 t, lane, 3;")
        e(f"shr.u32 u, tid, 5; and.b32 wk, u, {self.warps_k - 1}; shr.u32 wn, u, {log2(self.warps_k)};")
        e("and.b32 u, lane, 15; mul.wide.u32 d, u, 4; add.u64 d, $4, d; ld.global.f32 f, [d];")
        for i in self.code2_parts():
            e(f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mul.wide.u32 d, u, 4; add.u64 d, $6, d;")
            e(f"@p ld.global.f32 code2{i}, [d];")
        if self.offset:
            e(OFFSETS[self.offset])
        e(f"sub.u32 lastn, $11, 1; sub.u32 lastm, $10, 1; mul.lo.u32 rowbytes, $12, {self.step // 2};")
        # This CTA computes row groups attile to end - 1. All row groups are split evenly into $15 partitions.
        # CTAs i, i + $15, i + 2 * $15, ... share partition i, because normally one multiprocessor runs them.
        e(f"add.u32 u, $11, {rows - 1}; div.u32 u, u, {rows};")
        e("mov.u32 v, %ctaid.x; mov.u32 row, %nctaid.x; div.u32 row, row, $16;")
        e("div.u32 split, v, row; rem.u32 v, v, row;")
        e("div.u32 row, row, $15; div.u32 idx, v, $15; rem.u32 v, v, $15;")
        e("mul.lo.u32 attile, v, u; div.u32 attile, attile, $15; add.u32 v, v, 1; mul.lo.u32 end, v, u;")
        e("div.u32 end, end, $15;")
        e("sub.u32 u, end, attile; mul.lo.u32 v, u, idx; div.u32 v, v, row;")
        e("add.u32 idx, idx, 1; mul.lo.u32 u, u, idx; div.u32 u, u, row; add.u32 end, attile, u;")
        e("add.u32 attile, attile, v;")
        # Per row group, this warp computes the chunks ``first``, ``first + warps_k``, ... that are below ``stop``.
        # ``per`` is the number of iterations that the warp needs for these chunks.
        e(f"add.u32 u, $12, {self.steps - 1}; shr.u32 u, u, {log2(self.steps)};")
        e("mul.lo.u32 first, split, u; div.u32 first, first, $16;")
        e("add.u32 v, split, 1; mul.lo.u32 stop, v, u; div.u32 stop, stop, $16;")
        e(f"sub.u32 u, stop, first; add.u32 u, u, {self.warps_k - 1}; shr.u32 per, u, {log2(self.warps_k)};")
        e("add.u32 first, first, wk;")
        e("sub.u32 u, end, attile; mul.lo.u32 steps, u, per; mov.u32 step, 0; mov.u32 atit, 0; mov.u32 turn, 0;")
        e("mov.u32 fetch, 0; mov.u32 fetchit, 0; mov.u32 fetchtile, attile;")

    def start_fetching(self) -> None:
        """Start to load the first chunks' packed words and scales.

        Also load X, if it stays in registers and no earlier kernel may still write it.
        """
        e, words = self.emit, self.words
        e(f"mul.wide.u32 d, t, {4 * words}; add.u64 packed, $2, d; mul.wide.u32 d, t, {16 * words}; add.u64 x, $1, d;")
        self.clear_sums()
        self.clear_lora()
        for k in range(self.prefetch_depth):
            self.compute_addresses()
            self.fetch_scales(k)
            for b in range(self.groups):
                self.fetch_words(k, b)
        e("mov.u32 chunk, first;")
        if self.x_in_registers and not self.waits_late:
            self.keep_x("TABLE")

    def keep_x(self, end: str) -> None:
        """Load this warp's part of X into registers, or jump to ``end`` if the warp has no chunk of K."""
        self.emit(f"setp.ge.u32 p, chunk, stop; @p bra {end};")
        self.find_x()
        for b in range(self.groups):
            self.load_x(b)

    def fill_tables(self) -> None:
        """Fill the decoding table and code2 in shared memory, while the first loads are in flight.

        An entry holds the codes of the byte's high and low nibble. The 16 lanes of a half warp write it into the table's
        16 copies.
        """
        e = self.emit
        e("TABLE: and.b32 u, lane, 15; shl.b32 u, u, 3; mov.u32 look, table; add.u32 look, look, u;")
        e("shr.u32 u, tid, 5; shl.b32 u, u, 1; shr.u32 row, lane, 4; add.u32 row, row, u; mov.b32 v, f;")
        if self.permutes:
            e("mov.u32 u, codes; mad.lo.u32 u, tid, 4, u; setp.lt.u32 p, tid, 16; @p st.shared.b32 [u], v;")
        for i in range(0, 256, 2 * self.warps):
            e(f"add.u32 idx, row, {i}; shr.u32 u, idx, 4; shfl.sync.idx.b32 sub, v, u, 0x1f, 0xffffffff;")
            e("and.b32 u, idx, 15; shfl.sync.idx.b32 buf, v, u, 0x1f, 0xffffffff;")
            e("shl.b32 u, idx, 7; add.u32 u, u, look; st.shared.v2.b32 [u], {sub, buf};")
        for i in self.code2_parts():
            e(f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mov.u32 v, scales; mad.lo.u32 v, u, 4, v;")
            e(f"@p st.shared.f32 [v], code2{i};")
        if self.warps_k > 1 and self.dialect.wait:
            e(f"setp.eq.u32 p, tid, 0; @p mbarrier.init.shared.b64 [full], {32 * self.warps};")
            e(f"@p mbarrier.init.shared.b64 [free], {32 * self.warps_n * min(self.together, self.warps_k)};")
        if self.adapter:
            self.fill_inner()
        e("bar.sync 0;")
        e("setp.eq.u32 p, steps, 0; @p bra DONE;")

    def fill_inner(self) -> None:
        """Add up the parts of the adapter's inner product in order, and store the sums in shared memory.

        The array inner[8 * n_tiles][16 * ranks] holds them, rounded to 16 bits. With ``wide``, a second one holds the
        rounding errors.
        """
        e, quads, count = self.emit, 4 * self.ranks, self.adapter.parts  # type: ignore[union-attr]
        if self.waits_late:
            e("griddepcontrol.wait;")
            if self.x_in_registers:
                self.keep_x("INNER")
                e("INNER:")
        e(f"mul.wide.u32 wide, $10, {64 * self.ranks};")
        # In each iteration, a thread adds up four neighbouring columns of one row.
        for i in range(0, 8 * self.n_tiles * quads, 32 * self.warps):
            e(f"add.u32 idx, tid, {i}; setp.lt.u32 p, idx, {8 * self.n_tiles * quads};")
            e(f"div.u32 u, idx, {quads}; rem.u32 v, idx, {quads}; min.u32 u, u, lastm; mad.lo.u32 u, u, {quads}, v;")
            e("mul.wide.u32 d, u, 16; add.u64 d, $17, d;")
            for j in range(count):
                e(f"@p ld.global.v4.f32 {vector('piece', 4 * j, 4)}, [d]; add.u64 d, d, wide;")
            for c in range(4):
                e(f"mov.f32 lu{c}, piece{c};")
                e(" ".join(f"add.rn.f32 lu{c}, lu{c}, piece{4 * j + c};" for j in range(1, count)))
            e("mov.u32 sub, inner; mad.lo.u32 sub, idx, 8, sub;")
            self.split(("lx0", "lx1"), ("lx2", "lx3"), "lu", 0)
            e("@p st.shared.v2.b32 [sub], {lx0, lx1};")
            if self.wide:
                e(f"@p st.shared.v2.b32 [sub + {256 * self.n_tiles * self.ranks}], {{lx2, lx3}};")

    def split(self, high: tuple[str, str], low: tuple[str, str], source: str, first: int) -> None:
        """Round the four fp32 registers from ``source`` + ``first`` to 16 bits, and pack them into the two registers ``high``.

        With ``wide``, pack the rounded rounding errors into ``low``, because high + low is more precise than high alone.
        """
        e = self.emit
        for i, (to, rest) in enumerate(zip(high, low, strict=True)):
            left, right = (f"{source}{first + 2 * i + j}" for j in (0, 1))
            e(f"cvt.rn.{self.name}x2.f32 {to}, {right}, {left};")
            if self.wide:  # bf16: the upper half of fp32's bits
                e(f"shl.b32 u, {to}, 16; mov.b32 w0, u; sub.rn.f32 w0, {left}, w0;")
                e(f"and.b32 u, {to}, 0xffff0000; mov.b32 w1, u; sub.rn.f32 w1, {right}, w1;")
                e(f"cvt.rn.{self.name}x2.f32 {rest}, w1, w0;")

    def clear_lora(self) -> None:
        """Set the registers for columns of B beyond the rank to 0, because ``fetch_lora`` does not load them."""
        if self.adapter and self.adapter.rank % 16:
            name, count = ("wide", 8) if self.wide else ("lb", 4)
            first = count * self.tiles * (self.ranks - 1)
            self.emit(" ".join(f"mov.b32 {name}{i}, 0;" for i in range(first, first + count * self.tiles)))

    def fetch_lora(self) -> None:
        """Start to load the adapter's B when a row group starts, so that ``add_lora`` need not wait.

        Only the first warp along K loads B.
        """
        e, size, rank = self.emit, 4 if self.wide else 2, self.adapter.rank  # type: ignore[union-attr]
        e("setp.eq.u32 ours, atit, 0; setp.eq.and.u32 ours, wk, 0, ours;")
        if self.split_k:
            e("setp.eq.and.u32 ours, split, 0, ours;")
        if rank % 16:
            e(f"setp.lt.and.u32 within, t, {rank % 16 // 4}, ours;")
        e(
            f"mad.lo.u32 u, attile, {self.warps_n}, wn; mad.lo.u32 v, u, {8 * self.rows}, g; mul.wide.u32 wide, t, {4 * size};"
        )
        for i in range(self.rows):
            e(f"add.u32 u, v, {8 * i}; min.u32 u, u, lastn; mul.wide.u32 d, u, {rank * size};")
            e("add.u64 d, d, wide; add.u64 d, $18, d;")
            for c in range(self.ranks):  # lane t holds columns 4 * t to 4 * t + 3 of inner and of B
                loads = "within" if 16 * (c + 1) > rank else "ours"
                if self.wide:
                    to = f"v4.f32 {vector('wide', 4 * (self.rows * c + i), 4)}"
                else:
                    first = 4 * (self.tiles * c + i // 2) + i % 2
                    to = f"v2.b32 {{lb{first}, lb{first + 2}}}"
                e(f"@{loads} ld.global.{to}, [d + {16 * size * c}];")

    def add_lora(self, k: int) -> None:
        """Add inner @ B.T to the accumulators of the first warp along K.

        For each pair of tiles, one mma runs per 16 columns of B, or three if B is fp32.
        """
        e, line = self.emit, 32 * self.ranks
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{self.name}.{self.name}.f32"
        e(f"setp.ge.u32 p, wk, 1; @p bra ADDED{k};")
        if self.split_k:
            e(f"setp.ge.u32 p, split, 1; @p bra ADDED{k};")
        e(f"mov.u32 sub, inner; mad.lo.u32 sub, g, {line}, sub; mad.lo.u32 sub, t, 8, sub;")
        for c in range(self.ranks):
            for i in range(self.tiles):
                first = 4 * (self.tiles * c + i)
                for half in (0, 1) if self.wide else ():  # rows g and g + 8
                    high = f"lb{first + half}", f"lb{first + half + 2}"
                    self.split(high, (f"rest{half}", f"rest{half + 2}"), "wide", 4 * (self.rows * c + 2 * i + half))
                for n in range(self.n_tiles):
                    sums, b = vector("acc", 4 * (self.tiles * n + i), 4), vector("lb", first, 4)
                    at = 8 * line * n + 32 * c
                    e(f"ld.shared.v2.b32 {{lx0, lx1}}, [sub + {at}];")
                    e(f"{mma} {sums}, {b}, {{lx0, lx1}}, {sums};")
                    if self.wide:
                        e(f"{mma} {sums}, {vector('rest', 0, 4)}, {{lx0, lx1}}, {sums};")
                        e(f"ld.shared.v2.b32 {{lx2, lx3}}, [sub + {at + 8 * line * self.n_tiles}];")
                        e(f"{mma} {sums}, {b}, {{lx2, lx3}}, {sums};")
        e(f"ADDED{k}:")

    def code2_parts(self) -> range:
        """Return the offsets i for which thread tid loads entry tid + i of code2."""
        return range(0, 256, 32 * self.warps) if self.offset else range(0)

    def multiply_chunk(self, k: int) -> None:
        """Multiply the chunk in register set ``k``, and load a later chunk into each register that was used."""
        e = self.emit
        e(f"mad.lo.u32 chunk, atit, {self.warps_k}, first; add.u32 u, atit, 1; setp.eq.u32 last, u, per;")
        if self.adapter:
            self.fetch_lora()
        self.compute_addresses()
        e(f"setp.ge.u32 p, chunk, stop; @p bra IDLE{k};")
        if not self.x_in_registers:
            self.find_x()
            self.load_x(0)
        for i in range(self.scales):
            if self.offset:  # dequantize rounds the product and the sum separately, so no FMA is used
                e(f"mov.u32 v, scales; mad.lo.u32 v, q{k}_{i}, 4, v; ld.shared.f32 f, [v];")
                e(f"mul.rn.f32 f, f, am{k}_{i}; add.rn.f32 own{i}, f, offset;")
            else:
                e(f"mov.f32 own{i}, am{k}_{i};")
        self.fetch_scales(k)
        e(self.lane_step.format("column"))
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
        """Decode group ``b`` of the chunk in register set ``k`` into the A operands of the mma.

        Of an operand's four registers, the first two hold rows g and g + 8 in the lower half of the mma's K, the others
        in the upper.
        """
        e, words = self.emit, self.words
        which, lane = divmod(b * self.group_steps, 4)
        e(f"add.u32 v, column, {lane};")
        for i in range(self.rows):
            own = f"own{self.rows * which + i}"
            e(f"mov.b32 u, {own}; shfl.sync.idx.b32 u, u, v, 0x1c1f, 0xffffffff; mov.b32 s{i}, u;")
        for i in range(self.rows):
            decode_row = self.permute if self.permutes and i % 2 else self.look_up
            sources = [f"word{k}_{8 * i + words * b + word}" for word in range(words)]
            decode_row(f"s{i}", sources, [f"a{8 * words * (i // 2) + 2 * byte + i % 2}" for byte in range(4 * words)])

    def look_up(self, scale: str, words: list[str], registers: list[str]) -> None:
        """Decode the packed ``words`` of one row with the table, two weights per register."""
        for j, register in enumerate(registers):
            self.emit(
                f"dp4a.u32.u32 u, {words[j // 4]}, {0x80 << 8 * (j % 4)}, look; ld.shared.v2.f32 {{w0, w1}}, [u];"
            )
            self.emit(f"mul.rn.f32 w0, w0, {scale}; mul.rn.f32 w1, w1, {scale};")
            if self.dialect.packed_convert:
                self.emit(f"cvt.rn.{self.name}x2.f32 {register}, w1, w0;")
            else:
                self.emit(f"cvt.rn.{self.name}.f32 low, w0; cvt.rn.{self.name}.f32 high, w1;")
                self.emit(f"mov.b32 {register}, {{low, high}};")

    def permute(self, scale: str, words: list[str], registers: list[str]) -> None:
        """Decode like ``look_up``, but with byte permutes."""
        self.lines += [f"ld.shared.v4.f32 {vector('code', i, 4)}, [codes + {4 * i}];" for i in range(0, 16, 4)]
        self.lines += byte_permutes.round_codes(scale, self.name)
        for j, word in enumerate(words):
            self.lines += byte_permutes.decode_word(word, registers[4 * j : 4 * j + 4])

    def multiply(self, b: int) -> None:
        words, depth = self.words, self.dialect.mma_k
        mma = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{self.name}.{self.name}.f32"
        for j in range(0, 4 * words, depth // 8):  # j counts the registers of B, and the pairs of registers of A
            for n in range(self.n_tiles):
                for i in range(self.tiles):
                    c = vector("acc", 4 * (self.tiles * n + i), 4)
                    fragment = vector("xw", 32 * n + 4 * words * b + j, depth // 8)
                    self.emit(f"{mma} {c}, {vector('a', 8 * words * i + 2 * j, depth // 4)}, {fragment}, {c};")

    def epilogue(self, k: int) -> None:
        """Go to the next chunk. After the last chunk of a row group, first add up the warps' sums and store the result."""
        e, rows = self.emit, self.rows
        e(f"SUM{k}: @!last bra NEXT{k};")
        if self.adapter:
            self.add_lora(k)
        e(f"mad.lo.u32 u, attile, {self.warps_n}, wn; mad.lo.u32 row, u, {8 * rows}, g; shl.b32 column, t, 1;")
        if self.warps_k == 1:
            # Accumulator 2 * (rows * n + i) + k belongs to row 8 * i of the weight and row 8 * n + k of X.
            # Both row numbers count from this lane's first row.
            for i in range(self.registers):
                self.store(f"acc{i}", 8 * (i // 2 % rows), 8 * (i // 2 // rows) + i % 2)
        else:
            e(f"mov.u32 buf, sums; mad.lo.u32 buf, wn, {self.warps_k * self.together * 128}, buf;")
            e("mad.lo.u32 buf, lane, 4, buf;")
            for r in range(0, self.registers, self.together):
                self.add_up(k, r)
        self.clear_sums()
        e(f"NEXT{k}: add.u32 step, step, 1; setp.lt.u32 more, step, steps;")
        self.advance("at")
        e("@more bra LOOP;" if k + 1 == self.prefetch_depth else "@!more bra DONE;")

    def clear_sums(self) -> None:
        self.emit(" ".join(f"mov.f32 acc{i}, 0f00000000;" for i in range(self.registers)))

    def add_up(self, k: int, r: int) -> None:
        """Add up accumulators r to r + together - 1 of the warps that split K, and store the sums.

        Warp i % warps_k adds up accumulator i. Partial sums are exchanged in shared memory,
        sums[wn][wk][accumulator][lane].

        Two mbarriers replace bar.sync, so that a warp with nothing to add up goes on once it has written its sums
        (``full``). It may write the next ones when these have been read (``free``). 8 rows of X and a 14336x4096 weight
        take 18.9 us instead of 22.0 (H200).
        """
        e, together, warps_k = self.emit, self.together, self.warps_k
        e(f"xor.b32 v, turn, 1; {self.wait_for('free', 'v', f'FREE{k}_{r}')}")
        e(f"mad.lo.u32 u, wk, {together * 128}, buf;")
        e(" ".join(f"st.shared.f32 [u + {128 * i}], acc{r + i};" for i in range(together)))
        e(self.arrive("full"))
        e(f"sub.u32 sub, wk, {r % warps_k};")
        if together < warps_k:
            e(f"setp.ge.u32 p, sub, {together}; @p bra SUMMED{k}_{r};")
        e(self.wait_for("full", "turn", f"FULL{k}_{r}"))
        for i in self.mine:
            e(f"add.u32 u, sub, {i * warps_k}; mad.lo.u32 u, u, 128, buf; mov.f32 sum{i}, 0f00000000;")
            for j in range(warps_k):
                e(f"ld.shared.f32 f, [u + {j * together * 128}]; add.rn.f32 sum{i}, sum{i}, f;")
        e(self.arrive("free"))
        for i in self.mine:
            e(f"add.u32 idx, sub, {r + i * warps_k}; and.b32 dm, idx, 1; shr.u32 idx, idx, 1;")
            e(f"and.b32 dn, idx, {self.rows - 1}; shl.b32 dn, dn, 3; shr.u32 idx, idx, {log2(self.rows)};")
            e("mad.lo.u32 dm, idx, 8, dm;")
            self.store(f"sum{i}", "dn", "dm")
        e(f"SUMMED{k}_{r}: xor.b32 turn, turn, 1;")

    def arrive(self, barrier: str) -> str:
        """Return the PTX with which a warp arrives at a barrier.

        It arrives at ``full`` after it has written its partial sums, and at ``free`` after it has read the sums to add
        up.
        """
        if self.dialect.wait:
            # One arrival per warp would be enough, but then the tool racecheck (2025.3.1) would report the other lanes'
            # stores as races.
            return f"bar.warp.sync 0xffffffff; mbarrier.arrive.shared.b64 _, [{barrier}];"
        return "bar.sync 0;" if barrier == "full" else ""

    def wait_for(self, barrier: str, phase: str, label: str) -> str:
        """Return the PTX that waits at ``full`` or ``free`` for every warp that uses this barrier."""
        if self.dialect.wait:
            return f"{label}: {self.dialect.wait} p, [{barrier}], {phase}; @!p bra {label};"
        return "bar.sync 0;" if barrier == "free" else ""

    def compute_addresses(self) -> None:
        """Compute the addresses of the next chunk to load, and the predicate ``there``, which is false if none is left."""
        e, rows = self.emit, self.rows
        e(f"mad.lo.u32 sub, fetchit, {self.warps_k}, first; setp.lt.u32 there, fetch, steps;")
        e("setp.lt.and.u32 there, sub, stop, there;")
        e(f"mad.lo.u32 u, fetchtile, {self.warps_n}, wn; mad.lo.u32 row, u, {8 * rows}, g;")
        e(f"mul.wide.u32 d, sub, 128; add.u64 base, packed, d; mul.lo.u32 sub, sub, {self.steps};")
        if self.tail:
            self.within_k("near", ", there")
        e("add.u32 sub, sub, t;")  # lane t loads the scales of steps t, t + 4, ... of the chunk
        for j in range(self.steps // 4):
            within = f"setp.lt.and.u32 scaled{j}, u, $12, there;" if self.tail else f"and.pred scaled{j}, there, there;"
            e(f"add.u32 u, sub, {4 * j}; {within}")
        for i in range(rows):
            e(f"add.u32 u, row, {8 * i}; min.u32 u, u, lastn; mad.wide.u32 at{i}, u, rowbytes, base;")
            e("mad.lo.u32 v, u, $12, sub;")
            for j in range(self.steps // 4):
                e(f"add.u32 u, v, {4 * j}; shr.u32 block{rows * j + i}, u, $13;")
        e("add.u32 fetch, fetch, 1;")
        self.advance("fetch")

    def advance(self, cursor: str) -> None:
        self.emit(f"add.u32 {cursor}it, {cursor}it, 1; setp.eq.u32 p, {cursor}it, per;")
        self.emit(f"@p mov.u32 {cursor}it, 0; @p add.u32 {cursor}tile, {cursor}tile, 1;")

    def within_k(self, name: str, also: str = "") -> None:
        """For each group b, set the predicate ``name`` + b, which is true if this lane's words of the group are within K.

        Args:
            also: "", or ", " and the name of another predicate that must be true as well.
        """
        for b in range(self.groups):
            condition = f"setp.lt{'.and' if also else ''}.u32 {name}{b}, u, $12{also};"
            self.emit(
                f"{self.lane_step.format('u')} add.u32 u, u, sub; add.u32 u, u, {b * self.group_steps}; {condition}"
            )

    def fetch_words(self, k: int, b: int) -> None:
        there, ahead = f"near{b}" if self.tail else "there", ".L2::256B" if self.permutes else ""
        for i in range(self.rows):
            target, offset = vector(f"word{k}_", 8 * i + self.words * b, self.words), 128 // self.groups * b
            self.emit(f"@{there} ld.global.L1::no_allocate{ahead}.v{self.words}.b32 {target}, [at{i} + {offset}];")

    def fetch_scales(self, k: int) -> None:
        e = self.emit
        for i in range(self.scales):
            scaled = f"scaled{i // self.rows}"
            if self.tail:  # first set the registers to 0, because a lane past K skips the loads below
                e(f"mov.u32 q{k}_{i}, 0; mov.f32 am{k}_{i}, 0f00000000;")
            if self.offset:
                e(f"cvt.u64.u32 d, block{i}; add.u64 d, $3, d; @{scaled} ld.global.u8 q{k}_{i}, [d];")
                e(f"shr.u32 u, block{i}, $14; mul.wide.u32 d, u, 4; add.u64 d, $5, d;")
                e(f"@{scaled} ld.global.nc.f32 am{k}_{i}, [d];")
            else:
                e(f"mul.wide.u32 d, block{i}, 4; add.u64 d, $3, d; @{scaled} ld.global.f32 am{k}_{i}, [d];")

    def find_x(self) -> None:
        e = self.emit
        e(f"mul.wide.u32 d, chunk, 512; add.u64 base, x, d; mul.lo.u32 sub, chunk, {self.steps};")
        e(f"mul.wide.u32 wide, $12, {2 * self.step};")
        if self.tail:
            self.within_k("in")
        for n in range(self.n_tiles):  # rows past M are read as the last row of X, and their sums are not stored
            e(f"add.u32 u, g, {8 * n}; min.u32 u, u, lastm; cvt.u64.u32 d, u; mad.lo.u64 x{n}, d, wide, base;")

    def load_x(self, b: int) -> None:
        within = f"@in{b} " if self.tail else ""
        for n in range(self.n_tiles):
            for word in range(self.words):
                first, offset = 32 * n + 4 * (self.words * b + word), 512 // self.groups * b + 16 * word
                if self.tail:
                    self.emit(" ".join(f"mov.b32 xw{first + i}, 0;" for i in range(4)))
                self.emit(f"{within}ld.global.nc.v4.b32 {vector('xw', first, 4)}, [x{n} + {offset}];")

    def store(self, value: str, drow: str | int, dcolumn: str | int) -> None:
        """Store a sum, plus the bias, for the weight's row ``row + drow`` and X's row ``column + dcolumn``."""
        e = self.emit
        e(f"add.u32 u, row, {drow}; add.u32 v, column, {dcolumn}; setp.lt.u32 p, u, $11; setp.lt.and.u32 p, v, $10, p;")
        if self.bias:
            e("mul.wide.u32 d, u, 2; add.u64 d, $9, d; mov.b16 high, 0; @p ld.global.b16 high, [d];")
            e("cvt.f32.f16 f, high;" if self.half else "mov.b16 low, 0; mov.b32 idx, {low, high}; mov.b32 f, idx;")
            e(f"add.rn.f32 {value}, {value}, f;")
        e("cvt.u64.u32 d, v; cvt.u64.u32 wide, $11; cvt.u64.u32 base, u;")
        if self.split_k:
            e("mul.wide.u32 part, split, $10; add.u64 d, d, part;")
        e("mad.lo.u64 d, d, wide, base;")
        if self.split_k:
            e(f"shl.b64 d, d, 2; add.u64 d, d, $8; @p st.global.f32 [d], {value};")
        else:
            e(f"shl.b64 d, d, 1; add.u64 d, d, $8; cvt.rn.{self.name}.f32 high, {value}; @p st.global.b16 [d], high;")


@functools.lru_cache(maxsize=256)
def program(*fields: Any) -> str:
    """Return the PTX source for a :class:`Cta` with these fields. The operands of the PTX are:

    * Addresses: $1 x, $2 packed, $3 absmax, $4 code, $5 absmax2, $6 code2, $7 offset, $8 out, $9 bias.
    * Integers: $10 M, $11 N, $12 K / step, $13 log2(blocksize / step), $14 log2(blocksize2), $15 sm_partitions,
      $16 split_k.
    * For an adapter: $17 the parts of the inner product s * x @ A.T, fp32 [parts, M, 16 * ranks], and $18 B [N, rank].

    The grid has sm_partitions x CTAs per partition x split_k CTAs. The partition's number varies fastest (see
    SmallMPlan).
    """
    return Cta(*fields).source()
