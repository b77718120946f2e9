"""Inline PTX that decodes one group of packed nibbles.

The 16 lanes of a half warp decode 16 consecutive groups, which span one or two quantization blocks. A block has only 16
possible values, so each lane multiplies and rounds ONE of them. When the half warp spans two blocks, each lane computes
two values and keeps them in the two halves of a register. Every element is then a single shuffle of a rounded value.
On sm_75 that is 6 instructions per element fewer than multiplying and rounding each element.
"""

from __future__ import annotations

import functools

SEGMENT = "0x101f"  # shfl.idx within 16 lanes. The index wraps at 4 bits, so a nibble needs no mask.
EVERY_LANE = "0xffffffff"
SELECT_LOW, SELECT_HIGH = 0x5410, 0x7632  # prmt selectors of both low halves and of both high halves


def shift_of(element: int) -> int:
    """Return the number of bits to the right of an element's nibble in its 32-bit word.

    The first element is the high nibble of the lowest byte.
    """
    return 8 * (element // 2) + 4 * (1 - element % 2)


def _round_bf16(source: str, target: str) -> list[str]:
    """Round fp32 to bf16, to nearest even, into the high half of ``target``.

    Integer instructions do the rounding, because sm_75 has no conversion to bf16.
    """
    return [
        f"mov.b32 {target}, {source};",
        f"shr.u32 t, {target}, 16;",
        "and.b32 t, t, 1;",
        "add.u32 t, t, 0x7fff;",
        f"add.u32 {target}, {target}, t;",
        f"setp.nan.f32 nan, {source}, {source};",
        f"selp.b32 {target}, 0x7fff0000, {target}, nan;",
    ]


def _pack(dtype: str, low: str, high: str, has_packed_convert: bool) -> list[str]:
    """Round two fp32 registers to 16 bits and pack them into ``p``."""
    if has_packed_convert:
        return [f"cvt.rn.{dtype}x2.f32 p, {high}, {low};"]
    if dtype == "f16":
        return [f"cvt.rn.f16.f32 lo, {low};", f"cvt.rn.f16.f32 hi, {high};", "mov.b32 p, {lo, hi};"]
    if low == high:
        return [*_round_bf16(low, "u"), f"prmt.b32 p, u, u, {SELECT_HIGH};"]
    return [*_round_bf16(low, "u"), *_round_bf16(high, "v"), f"prmt.b32 p, u, v, {SELECT_HIGH};"]


@functools.cache
def decode(dtype: str, elements: int, blocks: int, has_packed_convert: bool) -> tuple[str, str]:
    """Return PTX that decodes ``elements`` nibbles into 32-bit registers, and the constraints of its operands.

    The operands are first the outputs, elements * itemsize / 4 registers. Four inputs follow: the nibbles in the low bits (r),
    the lane's entry of the 16-entry table (f), the lane's block scale (f), and the prmt selector of the lane's block (r).

    Args:
        dtype: "f16", "bf16" or "f32".
        elements: nibbles per lane, 2, 4 or 8.
        blocks: quantization blocks per 16 lanes: 1, or 2 (16-bit dtypes only), of which the second starts at lane 8.
        has_packed_convert: the GPU has cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32 (sm_80 and newer).
    """
    outputs = elements if dtype == "f32" else elements // 2
    nibbles, entry, scale, select = (f"${outputs + i}" for i in range(4))
    lines = [".reg .b32 i, t, u, v, p, e0, e1;", ".reg .b16 lo, hi;", ".reg .f32 s, x, y;", ".reg .pred nan;"]
    if dtype == "f32":
        lines += [f"mul.rn.ftz.f32 x, {entry}, {scale};", "mov.b32 p, x;"]
    elif blocks == 1:
        lines += [f"mul.rn.ftz.f32 x, {entry}, {scale};", *_pack(dtype, "x", "x", has_packed_convert)]
    else:
        for lane, product in ((0, "x"), (8, "y")):
            lines.append(f"shfl.sync.idx.b32 s, {scale}, {lane}, {SEGMENT}, {EVERY_LANE};")
            lines.append(f"mul.rn.ftz.f32 {product}, {entry}, s;")
        lines += _pack(dtype, "x", "y", has_packed_convert)

    def shuffle(target: str, element: int) -> list[str]:
        shift = shift_of(element)
        index = "i" if shift else nibbles
        shifted = [f"shr.u32 i, {nibbles}, {shift};"] if shift else []
        return [*shifted, f"shfl.sync.idx.b32 {target}, p, {index}, {SEGMENT}, {EVERY_LANE};"]

    for output in range(outputs):
        if dtype == "f32":
            lines += shuffle("e0", output) + [f"mov.b32 ${output}, e0;"]
        else:
            lines += shuffle("e0", 2 * output) + shuffle("e1", 2 * output + 1)
            lines.append(f"prmt.b32 ${output}, e0, e1, {select};")
    # The & is needed because inputs are read after outputs are written.
    constraints = ",".join(["=&r"] * outputs + ["r", "f", "f", "r"])
    return "{\n" + "\n".join(lines) + "\n}", constraints
