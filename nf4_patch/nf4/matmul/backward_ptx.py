"""The inline PTX of the backward product: the text of one program for one configuration.

``dX[M, K] = dY[M, N] @ weight[N, K]``, matmul_ptx turned round: the sum runs over the rows of the packed weight. A warp
takes 16 columns of the weight at a time as the rows of A of ``mma.sync.m16n8k16``, 8-row tiles of dY as B:

* N goes in steps of 16 or 32 rows. Lane (g, t) = (lane / 4, lane % 4) owns rows t * depth ... of the step: neighbours in
  memory for dY, and the mma's own order permuted alike on both sides.
* Of each of these rows a lane loads 1, 2 or 4 words, 8 columns each. Byte j of all lanes is tile j: its high nibble
  row g of A, its low nibble row g + 8. So a lane ends with the sums of 8 * words neighbouring columns.
* A byte is looked up and scaled as in the forward. Of a step's scales each lane computes its share; shuffles hand them out.
* The warps of a program split the columns and N. Their sums meet once, at the end, in the table's shared memory, and are
  added in warp order: the result does not vary from run to run.
"""

from __future__ import annotations

import functools

from .small_m_ptx import TABLE_BYTES

AREA = TABLE_BYTES + 15360  # shared memory of a program, 47 KiB: a kernel gets 48 unasked


@functools.lru_cache(maxsize=256)
def program(
    words: int,  # 32-bit words of a row of the weight a lane loads at once: 1, 2 or 4
    depth: int,  # rows of the weight a lane and step: 4 or 8
    columns: int,  # 8-row tiles of dY
    along_k: int,  # warps side by side along the columns of the weight,
    along_n: int,  # and along its rows; powers of two, words * warps <= 32
    ahead: int,  # steps in flight, one set of registers each
    half: bool,  # fp16, else bf16
    nested: bool,
    tail: bool,  # N is no multiple of a step
    split: bool,  # fp32 partial sums out[slice, M, K] of the slices of N
    cluster: int,  # or so many programs, one a slice, add theirs up through each other's shared memory (sm_90)
) -> str:
    """Operands: $1 dY (its rows padded to a multiple of 32), $2 packed, $3 absmax, $4 code, $5 absmax2, $6 code2,
    $7 offset, $8 dX (addresses), $9 unused; $10 M, $11 N, $12 K / 64, $13 log2(blocksize / 64), $14 log2(blocksize2),
    $15 groups of columns, $16 slices of N. The grid is groups x slices, groups fastest; in clusters, slices fastest."""
    warps, step, units = along_k * along_n, 4 * depth, words * along_k  # a unit is 64 columns
    own = max(1, depth * words // 8)  # scales a lane computes
    width = 2 * words  # quads (4 sums) a lane holds of a row of dX
    rows = 2 * columns  # of dX a lane
    name, pack = ("f16", "cvt.rn.f16x2.f32") if half else ("bf16", "cvt.rn.bf16x2.f32")
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
    text: list[str] = []
    e = text.append

    def vector(prefix: str, first: int, count: int) -> str:
        return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"

    def word(k: int, i: int, w: int) -> str:
        return f"word{k}_{words * i + w}"

    def fetch(k: int) -> None:
        """Words, scales and dY of the next step into set k, if there is one."""
        e(f"setp.lt.u32 there, fetched, stop; mad.lo.u32 row, fetched, {step}, rowt;")
        for i in range(depth):
            e(
                f"add.u32 u, row, {i};"
                + (" min.u32 u, u, lastn;" if tail else "")
                + " mad.wide.u32 d, u, rowbytes, packed;"
            )
            target = word(k, i, 0) if words == 1 else vector(f"word{k}_", words * i, words)
            e(f"@there ld.global.L1::no_allocate{'' if words == 1 else f'.v{words}'}.b32 {target}, [d];")
        for r in range(own):
            e(f"add.u32 u, row, scalerow; add.u32 u, u, {r * 8 // words};")
            if tail:
                e("min.u32 u, u, lastn;")
            e("mad.lo.u32 u, u, $12, scaleunit; shr.u32 u, u, $13;")
            if nested:
                e(f"cvt.u64.u32 d, u; add.u64 d, $3, d; @there ld.global.u8 q{k}_{r}, [d];")
                e(f"shr.u32 u, u, $14; mul.wide.u32 d, u, 4; add.u64 d, $5, d; @there ld.global.nc.f32 am{k}_{r}, [d];")
            else:
                e(f"mul.wide.u32 d, u, 4; add.u64 d, $3, d; @there ld.global.f32 am{k}_{r}, [d];")
        e("mul.wide.u32 base, row, 2;")
        for c in range(columns):
            target = vector(f"x{k}_", depth // 2 * c, depth // 2)
            e(f"add.u64 d, dy{c}, base; @there ld.global.nc.v{depth // 2}.b32 {target}, [d];")
        e(f"add.u32 fetched, fetched, {along_n};")

    e("{")
    e(f".shared .align 16 .b8 table[{AREA if cluster > 1 else TABLE_BYTES + 1024 * nested}];")
    later = range(0, 256, 32 * warps) if nested else ()
    e(".reg .pred p, there; .reg .b16 h<4>; .reg .f32 offset, f, w0, w1, v0, v1, sum<4>, part<4>;")
    e(
        ".reg .b32 tid, lane, g, t, wk, wn, group, slice, u, v, row, rowt, lastn, lastm, rowbytes, unit, scalerow, scaleunit;"
    )
    e(
        ".reg .b32 source, look, at, fetched, stop, idx, high, low, m, slot, slotted, column; .reg .b64 d, base, packed, wide;"
    )
    e(
        f".reg .f32 coarse<{max(1, len(later))}>, own<{own}>, s<{depth}>, acc<{4 * width * rows}>; .reg .b32 a<{depth}>; .reg .b64 dy<{columns}>;"
    )
    for k in range(ahead):
        e(f".reg .b32 word{k}_<{words * depth}>, q{k}_<{own}>, x{k}_<{columns * depth // 2}>; .reg .f32 am{k}_<{own}>;")

    e("mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 g, lane, 2; and.b32 t, lane, 3;")
    e(f"shr.u32 u, tid, 5; and.b32 wk, u, {along_k - 1}; shr.u32 wn, u, {along_k.bit_length() - 1};")
    e("and.b32 u, lane, 15; mul.wide.u32 d, u, 4; add.u64 d, $4, d; ld.global.f32 f, [d];")
    for j, i in enumerate(later):
        e(
            f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mul.wide.u32 d, u, 4; add.u64 d, $6, d; @p ld.global.f32 coarse{j}, [d];"
        )
    if nested:
        e("ld.global.f32 offset, [$7];")
    e("sub.u32 lastn, $11, 1; sub.u32 lastm, $10, 1; shl.b32 rowbytes, $12, 5;")
    e("mov.u32 u, %ctaid.x;")
    if cluster > 1:
        e(f"div.u32 group, u, {cluster}; mov.u32 slice, %cluster_ctarank;")
    else:
        e("rem.u32 group, u, $15; div.u32 slice, u, $15;")
    slices = str(cluster) if cluster > 1 else "$16"
    # steps fetched, fetched + along_n, ... < stop of this warp
    e(f"add.u32 u, $11, {step - 1}; shr.u32 u, u, {step.bit_length() - 1}; mul.lo.u32 fetched, slice, u;")
    e(f"div.u32 fetched, fetched, {slices}; add.u32 v, slice, 1; mul.lo.u32 stop, v, u; div.u32 stop, stop, {slices};")
    e("add.u32 fetched, fetched, wn; mov.u32 at, fetched;")
    # a column past K repeats the last unit; its sums are not written
    e(f"mul.lo.u32 unit, group, {units}; mad.lo.u32 unit, wk, {words}, unit; sub.u32 idx, $12, 1;")
    e(f"mul.lo.u32 source, g, {words}; shr.u32 source, source, 3; add.u32 u, unit, source; min.u32 u, u, idx;")
    e(
        f"mul.lo.u32 v, g, {4 * words}; and.b32 v, v, 31; mad.lo.u32 v, u, 32, v; cvt.u64.u32 d, v; add.u64 packed, $2, d;"
    )
    e(f"shl.b32 rowt, t, {depth.bit_length() - 1}; mad.lo.u32 source, source, 4, t;")
    # scale r of lane (g, t) is that of row depth * t + (8 r + g) / words of the step and unit (8 r + g) % words
    e(f"and.b32 u, g, {min(8, depth * words) - 1}; shr.u32 scalerow, u, {words.bit_length() - 1};")
    e(f"and.b32 u, u, {words - 1}; add.u32 scaleunit, unit, u; min.u32 scaleunit, scaleunit, idx;")
    e("add.u32 v, $11, 31; and.b32 v, v, 0xffffffe0; shl.b32 v, v, 1;")
    for c in range(columns):  # a row of dY past M repeats the last; its sums are not written
        e(f"add.u32 u, g, {8 * c}; min.u32 u, u, lastm; mul.wide.u32 d, u, v; add.u64 dy{c}, $1, d;")
    e(" ".join(f"mov.f32 acc{i}, 0f00000000;" for i in range(4 * width * rows)))
    for k in range(ahead):
        fetch(k)

    # with all that in flight: the table, an entry a half warp at a time, high nibble first; and code2
    e("and.b32 u, lane, 15; shl.b32 u, u, 3; mov.u32 look, table; add.u32 look, look, u;")
    e("shr.u32 u, tid, 5; shl.b32 u, u, 1; shr.u32 row, lane, 4; add.u32 row, row, u; mov.b32 v, f;")
    for i in range(0, 256, 2 * warps):
        e(f"add.u32 idx, row, {i}; shr.u32 u, idx, 4; shfl.sync.idx.b32 high, v, u, 0x1f, 0xffffffff;")
        e("and.b32 u, idx, 15; shfl.sync.idx.b32 low, v, u, 0x1f, 0xffffffff;")
        e("shl.b32 u, idx, 7; add.u32 u, u, look; st.shared.v2.b32 [u], {high, low};")
    for j, i in enumerate(later):
        e(
            f"add.u32 u, tid, {i}; setp.lt.u32 p, u, 256; mov.u32 v, table; mad.lo.u32 v, u, 4, v; @p st.shared.f32 [v + {TABLE_BYTES}], coarse{j};"
        )
    e("bar.sync 0;")

    e("LOOP:")
    for k in range(ahead):
        e("setp.ge.u32 p, at, stop; @p bra.uni DONE;")
        for r in range(own):
            if nested:  # two roundings, never an FMA
                e(f"mov.u32 v, table; mad.lo.u32 v, q{k}_{r}, 4, v; ld.shared.f32 f, [v + {TABLE_BYTES}];")
                e(f"mul.rn.f32 f, f, am{k}_{r}; add.rn.f32 own{r}, f, offset;")
            else:
                e(f"mov.f32 own{r}, am{k}_{r};")
            if tail:  # a row past N: whatever stands in the last row, times 0
                e(f"mad.lo.u32 u, at, {step}, rowt; add.u32 u, u, scalerow; add.u32 u, u, {r * 8 // words};")
                e(f"setp.lt.u32 p, u, $11; selp.f32 own{r}, own{r}, 0f00000000, p;")
        for i in range(depth):
            e(f"add.u32 u, source, {i * words % 8 * 4}; mov.b32 v, own{i * words // 8};")
            e(f"shfl.sync.idx.b32 v, v, u, 0x1f, 0xffffffff; mov.b32 s{i}, v;")
        for j in range(4 * words):
            for i in range(
                0, depth, 2
            ):  # two rows of the weight, one register: high nibbles row g of A, low ones g + 8
                for row, (a, b) in ((i, ("w0", "w1")), (i + 1, ("v0", "v1"))):
                    e(f"dp4a.u32.u32 u, {word(k, row, j // 4)}, {0x80 << 8 * (j % 4)}, look;")
                    e(f"ld.shared.v2.f32 {{{a}, {b}}}, [u]; mul.rn.f32 {a}, {a}, s{row}; mul.rn.f32 {b}, {b}, s{row};")
                e(f"{pack} a{i}, v0, w0; {pack} a{i + 1}, v1, w1;")
            for i in range(0, depth, 4):
                for c in range(columns):
                    sums = vector("acc", 4 * (j * columns + c), 4)
                    e(f"{mma} {sums}, {vector('a', i, 4)}, {vector(f'x{k}_', (depth * c + i) // 2, 2)}, {sums};")
        fetch(k)
        e(f"add.u32 at, at, {along_n};")
    e("bra.uni LOOP;")

    # Then, some rows of dX a lane at a time: sums[wk][wn][row][quad][slot], 16 bytes a slot. The slots are permuted so that
    # lanes in their own order, writing, and neighbouring columns, reading, both meet 8 banks of 16 bytes at a time.
    # In a cluster each program puts its own sums behind, whole[wk][row][t][column], and each adds up its part of all.
    row_bytes, whole_bytes = 512 * width * warps, 512 * width * along_k
    if cluster > 1:
        fits = [n for n in range(1, rows + 1) if n * row_bytes + rows * whole_bytes <= AREA]
        together = max(fits, default=1)
        gathered = min(rows, (AREA - together * row_bytes) // whole_bytes)
    else:
        together = min(rows, TABLE_BYTES // row_bytes)
        gathered = rows
    e("DONE: bar.sync 0;")
    e("shr.u32 u, lane, 2; and.b32 u, u, 2; xor.b32 slot, lane, u; mov.u32 look, table;")
    bits = width.bit_length() - 1

    def place(item: str) -> None:
        """From an item of rows x t x g x quad: its row m of dX, its first column within the warp's, whether they exist."""
        e(
            f"and.b32 v, {item}, {8 * width - 1}; shl.b32 column, v, 2; shr.u32 low, {item}, {bits + 3}; and.b32 low, low, 3;"
        )
        e(
            f"shr.u32 v, {item}, {bits + 5}; add.u32 v, v, {first}; and.b32 m, v, 1; shr.u32 v, v, 1; mad.lo.u32 m, v, 8, m;"
        )
        e("mad.lo.u32 m, low, 2, m; setp.lt.u32 p, m, $10;")

    def add_up(address: str, count: int, stride: int) -> None:
        e(f"@p ld.shared.v4.f32 {{sum0, sum1, sum2, sum3}}, [{address}];")
        for i in range(1, count):
            e(f"@p ld.shared.v4.f32 {{part0, part1, part2, part3}}, [{address} + {stride * i}];")
            e(" ".join(f"add.rn.f32 sum{i}, sum{i}, part{i};" for i in range(4)))

    def store() -> None:
        """The sums into row m, columns ``column`` ... of the warp's that start at ``unit``."""
        e("shr.u32 v, column, 6; add.u32 v, v, unit; setp.lt.and.u32 p, v, $12, p;")
        e("mad.lo.u32 v, unit, 64, column; cvt.u64.u32 d, v; mul.wide.u32 wide, $12, 64; cvt.u64.u32 base, m;")
        if split:
            e("mul.wide.u32 packed, slice, $10; add.u64 base, base, packed;")
        e("mad.lo.u64 d, base, wide, d;")
        if split:
            e("shl.b64 d, d, 2; add.u64 d, d, $8; @p st.global.v4.f32 [d], {sum0, sum1, sum2, sum3};")
        else:
            e(f"{pack} u, sum1, sum0; {pack} v, sum3, sum2;")
            e("shl.b64 d, d, 1; add.u64 d, d, $8; @p st.global.v2.b32 [d], {u, v};")

    for begin in range(0, rows, gathered):
        end = min(rows, begin + gathered)
        whole = together * row_bytes
        for first in range(begin, end, together):
            here = min(together, end - first)
            if first > begin:
                e("bar.sync 0;")
            e(f"mad.lo.u32 u, wk, {along_n}, wn; mad.lo.u32 v, u, {512 * width * here}, look;")
            for i in range(here):
                c, odd = divmod(first + i, 2)
                for q in range(width):
                    mine = ", ".join(f"acc{4 * ((2 * q + z) * columns + c) + odd + y}" for z in (0, 1) for y in (0, 2))
                    e(
                        f"xor.b32 u, slot, {q}; mad.lo.u32 u, u, 16, v; st.shared.v4.f32 [u + {512 * (width * i + q)}], {{{mine}}};"
                    )
            e("bar.sync 0;")
            for turn in range(-(-here * width // along_n)):
                e(f"mad.lo.u32 idx, wn, 32, lane; add.u32 idx, idx, {32 * along_n * turn};")
                e(
                    f"and.b32 high, idx, {width - 1}; shr.u32 u, idx, {bits}; and.b32 u, u, 7; shr.u32 v, idx, {bits + 3};"
                )
                e(
                    "and.b32 v, v, 3; mad.lo.u32 u, u, 4, v; shr.u32 v, u, 2; and.b32 v, v, 2; xor.b32 u, u, v; xor.b32 u, u, high;"
                )
                e(f"shr.u32 v, idx, {bits + 5}; mad.lo.u32 v, v, {width}, high; mad.lo.u32 v, v, 32, u;")
                e(f"mad.lo.u32 v, wk, {32 * along_n * width * here}, v; mad.lo.u32 slotted, v, 16, look;")
                place("idx")
                if here * width % along_n:
                    e(f"setp.lt.and.u32 p, idx, {32 * here * width}, p;")
                add_up("slotted", along_n, 512 * width * here)
                if cluster > 1:
                    e(f"mad.lo.u32 u, wk, {32 * width * (end - begin)}, idx; mad.lo.u32 u, u, 16, look;")
                    e(f"@p st.shared.v4.f32 [u + {whole + 512 * width * (first - begin)}], {{sum0, sum1, sum2, sum3}};")
                else:
                    store()
        if cluster > 1:
            first, items = begin, 32 * width * (end - begin)  # a warp's columns
            e("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
            for turn in range(-(-along_k * items // (32 * warps * cluster))):
                e(f"mad.lo.u32 idx, slice, {32 * warps}, tid; add.u32 idx, idx, {32 * warps * cluster * turn};")
                e(f"mad.lo.u32 look, idx, 16, look; div.u32 high, idx, {items}; rem.u32 slotted, idx, {items};")
                e(f"setp.lt.u32 there, idx, {along_k * items};")
                place("slotted")
                e("and.pred p, p, there;")
                for r in range(cluster):
                    e(f"mapa.shared::cluster.u32 u, look, {r};")
                    target = "sum" if r == 0 else "part"
                    e(f"@p ld.shared::cluster.v4.f32 {vector(target, 0, 4)}, [u + {whole}];")
                    if r:
                        e(" ".join(f"add.rn.f32 sum{i}, sum{i}, part{i};" for i in range(4)))
                e(f"mul.lo.u32 unit, group, {units}; mad.lo.u32 unit, high, {words}, unit; mov.u32 look, table;")
                store()
            e("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
    e("mov.u32 $0, 0;")
    e("}")
    return "\n".join(text)
