"""Inline PTX that decodes one group of packed nibbles.

The 16 lanes of a half warp decode 16 consecutive groups, which lie in one or two quantization blocks. An element has
one of its block's 16 values. Lane i computes and rounds the value of table entry i. For two blocks, it keeps both
values in one register. To decode an element, a lane reads the value from the lane whose number is the element's nibble.
On sm_75, this takes 6 instructions fewer per element than multiplying and rounding each element.
"""

from __future__ import annotations

import functools

# Restricts shfl.idx to 16 lanes, so that it reads only the low 4 bits of the index, and the bits above a nibble need no
# mask.
SEGMENT = "0x101f"
EVERY_LANE = "0xffffffff"
# With these selectors, prmt joins the low halves or the high halves of two registers.
SELECT_LOW, SELECT_HIGH = 0x5410, 0x7632


def shift_of(element: int) -> int:
    """Return the right shift that moves an element's nibble to the low bits of its 32-bit word.

    Even elements are high nibbles.
    """
    return 8 * (element // 2) + 4 * (1 - element % 2)


def _round_bf16(source: str, target: str) -> list[str]:
    """Return PTX that rounds fp32 to bf16, to nearest even, in the high half of ``target``. sm_75 has no such instruction."""
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
    """Return PTX that rounds two fp32 registers to ``dtype`` and packs both results into the register ``p``."""
    if has_packed_convert:
        return [f"cvt.rn.{dtype}x2.f32 p, {high}, {low};"]
    if dtype == "f16":
        return [f"cvt.rn.f16.f32 lo, {low};", f"cvt.rn.f16.f32 hi, {high};", "mov.b32 p, {lo, hi};"]
    if low == high:
        return [*_round_bf16(low, "u"), f"prmt.b32 p, u, u, {SELECT_HIGH};"]
    return [*_round_bf16(low, "u"), *_round_bf16(high, "v"), f"prmt.b32 p, u, v, {SELECT_HIGH};"]


@functools.cache
def decode(dtype: str, elements: int, blocks: int, has_packed_convert: bool) -> tuple[str, str]:
    """Return PTX that decodes 2, 4 or 8 (``elements``) nibbles per lane, and the constraint string of its operands.

    The output operands come first: elements * itemsize / 4 registers of 32 bits. The four input operands follow:
        r: the lane's nibbles, in the low bits
        f: the lane's entry of the 16-entry table
        f: the scale of the lane's quantization block
        r: SELECT_LOW if the lane's groups lie in the first block, SELECT_HIGH if they lie in the second

    Args:
        dtype: "f16", "bf16" or "f32".
        blocks: quantization blocks per 16 lanes: 1, or 2 for 16-bit dtypes. The second block starts at lane 8.
        has_packed_convert: whether the GPU has cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32 (sm_80 and newer).
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
    # The & marks outputs that are written before all inputs are read, so they must not share a register with an input.
    constraints = ",".join(["=&r"] * outputs + ["r", "f", "f", "r"])
    return "{\n" + "\n".join(lines) + "\n}", constraints
