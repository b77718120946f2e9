"""What the fused matmul for few rows of X loads and stores in global memory, as PTX: the fields of a CTA and their traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Dialect(NamedTuple):
    """What a capability spells in its own way."""

    depth: int  # of K one mma takes: sm_75 needs two for the same fragments
    pairs: bool  # two fp32 are rounded and packed by one convert
    wait: str  # for an mbarrier; "": there are none, the CTA meets at bar.sync


DIALECTS = {
    (7, 5): Dialect(8, False, ""),  # fp16 only
    (8, 0): Dialect(16, True, "mbarrier.test_wait.parity.shared.b64"),  # spins
    (9, 0): Dialect(16, True, "mbarrier.try_wait.parity.shared.b64"),  # may suspend the warp
}


def log2(x: int) -> int:
    return x.bit_length() - 1


def vector(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"


@dataclass
class Traffic:
    """What a CTA is compiled for, and the lines of its source as they are written."""

    tiles: int  # 16-row tiles of the weight a warp carries at once
    n_tiles: int  # 8-row tiles of X
    warps_n: int  # side by side along the rows of the weight,
    warps_k: int  # and along K; powers of two
    load_128bit: bool  # of the packed weight (half the L1 cycles, twice those of X), else 64-bit
    prefetch_depth: int  # chunks of words and scales in flight, one set of registers each
    x_in_registers: bool  # each warp meets one chunk of K only: its part of X stays in registers
    half: bool  # fp16, else bf16
    nested: bool
    tail: bool  # K is no multiple of 256
    split_k: bool  # fp32 partial sums out[slice, M, N] of the slices of K
    bias: bool
    dialect: Dialect
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = 2 * self.tiles  # of the weight a lane
        # a chunk is so many groups of so many words a lane and row, one scale each
        self.groups, self.words = (2, 4) if self.load_128bit else (4, 2)
        self.name = "f16" if self.half else "bf16"

    def add(self, line: str) -> None:
        self.lines.append(line)

    def aim(self) -> None:
        """Addresses of what is to be fetched: 8 * rows rows of the weight x chunk, under ``there``; then step on."""
        e, rows = self.add, self.rows
        e(f"mad.lo.u32 sub, fetchit, {self.warps_k}, first; setp.lt.u32 there, fetch, steps; "
          "setp.lt.and.u32 there, sub, stop, there;")  # fmt: skip
        e(f"mad.lo.u32 u, fetchtile, {self.warps_n}, wn; mad.lo.u32 row, u, {8 * rows}, g;")
        e("mul.wide.u32 d, sub, 128; add.u64 base, packed, d; shl.b32 sub, sub, 2;")
        if self.tail:
            self.within_k("near", ", there")
        e("add.u32 sub, sub, t;")  # the scale of block t of the chunk is for lane t to fetch
        e("setp.lt.and.u32 scaled, sub, $12, there;" if self.tail else "and.pred scaled, there, there;")
        for i in range(rows):
            e(f"add.u32 u, row, {8 * i}; min.u32 u, u, lastn; mad.wide.u32 at{i}, u, rowbytes, base;")
            e(f"mad.lo.u32 block{i}, u, $12, sub; shr.u32 block{i}, block{i}, $13;")
        e("add.u32 fetch, fetch, 1;")
        self.advance("fetch")

    def advance(self, cursor: str) -> None:
        self.add(f"add.u32 {cursor}it, {cursor}it, 1; setp.eq.u32 p, {cursor}it, per;")
        self.add(f"@p mov.u32 {cursor}it, 0; @p add.u32 {cursor}tile, {cursor}tile, 1;")

    def within_k(self, name: str, also: str = "") -> None:
        """name<b>: this lane's words of group b lie within K."""
        for b in range(self.groups):
            self.add("shr.u32 u, t, 1; add.u32 u, u, sub;" if self.load_128bit else "mov.u32 u, sub;")
            condition = f"setp.lt{'.and' if also else ''}.u32 {name}{b}, u, $12{also};"
            self.add(f"add.u32 u, u, {b * 4 // self.groups}; {condition}")

    def fetch_words(self, k: int, b: int) -> None:
        there = f"near{b}" if self.tail else "there"
        for i in range(self.rows):
            target, offset = vector(f"word{k}_", 8 * i + self.words * b, self.words), 128 // self.groups * b
            self.add(f"@{there} ld.global.L1::no_allocate.v{self.words}.b32 {target}, [at{i} + {offset}];")

    def fetch_scales(self, k: int) -> None:
        e = self.add
        for i in range(self.rows):
            if self.tail:  # else a lane past K would look up what it never loaded
                e(f"mov.u32 q{k}_{i}, 0; mov.f32 am{k}_{i}, 0f00000000;")
            if self.nested:
                e(f"cvt.u64.u32 d, block{i}; add.u64 d, $3, d; @scaled ld.global.u8 q{k}_{i}, [d];")
                e(f"shr.u32 u, block{i}, $14; mul.wide.u32 d, u, 4; add.u64 d, $5, d; "
                  f"@scaled ld.global.nc.f32 am{k}_{i}, [d];")  # fmt: skip
            else:
                e(f"mul.wide.u32 d, block{i}, 4; add.u64 d, $3, d; @scaled ld.global.f32 am{k}_{i}, [d];")

    def find_x(self) -> None:
        e = self.add
        e("mul.wide.u32 d, chunk, 512; add.u64 base, x, d; shl.b32 sub, chunk, 2; mul.wide.u32 wide, $12, 128;")
        if self.tail:
            self.within_k("in")
        for n in range(self.n_tiles):  # a row of X past M repeats the last; its sums are not written
            e(f"add.u32 u, g, {8 * n}; min.u32 u, u, lastm; cvt.u64.u32 d, u; mad.lo.u64 x{n}, d, wide, base;")

    def load_x(self, b: int) -> None:
        within = f"@in{b} " if self.tail else ""
        for n in range(self.n_tiles):
            for word in range(self.words):
                first, offset = 32 * n + 4 * (self.words * b + word), 512 // self.groups * b + 16 * word
                if self.tail:
                    self.add(" ".join(f"mov.b32 xw{first + i}, 0;" for i in range(4)))
                self.add(f"{within}ld.global.nc.v4.b32 {vector('xw', first, 4)}, [x{n} + {offset}];")

    def store(self, value: str, drow: str | int, dcolumn: str | int) -> None:
        """The finished sum for row ``row + drow`` of the weight and row ``column + dcolumn`` of X."""
        e = self.add
        e(f"add.u32 u, row, {drow}; add.u32 v, column, {dcolumn}; setp.lt.u32 p, u, $11; setp.lt.and.u32 p, v, $10, p;")
        if self.bias and not self.split_k:
            e("mul.wide.u32 d, u, 2; add.u64 d, $9, d; mov.b16 high, 0; @p ld.global.b16 high, [d];")
            e("cvt.f32.f16 f, high;" if self.half else "mov.b16 low, 0; mov.b32 idx, {low, high}; mov.b32 f, idx;")
            e(f"add.rn.f32 {value}, {value}, f;")
        e("cvt.u64.u32 d, v; cvt.u64.u32 wide, $11; cvt.u64.u32 base, u;")
        if self.split_k:
            e("mul.wide.u32 part, slice, $10; add.u64 d, d, part;")
        e("mad.lo.u64 d, d, wide, base;")
        if self.split_k:
            e(f"shl.b64 d, d, 2; add.u64 d, d, $8; @p st.global.f32 [d], {value};")
        else:
            e(f"shl.b64 d, d, 1; add.u64 d, d, $8; cvt.rn.{self.name}.f32 high, {value}; @p st.global.b16 [d], high;")
