"""PTX that decodes NF4 with byte permutes (the instruction prmt) instead of a table in memory.

The 16 values that a weight can have within its quantization block are rounded to 16 bits. Four registers hold their low
bytes, four their high bytes. The three low bits of a weight's nibble select the low byte of one of values 0 to 7 and of
one of values 8 to 15, and the highest bit selects one of these two. High bytes are found in the same way. Rounding and
sorting the 16 values takes 32 instructions. Decoding takes 2.6 per weight.
"""

from __future__ import annotations

from collections.abc import Sequence

REGISTERS = (
    ".reg .b32 index, above, sign, under8, from8, lows, highs, pair<8>, low<4>, high<4>; .reg .f32 code<16>, even, odd;"
)


def vector(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"


def round_codes(scale: str, dtype: str) -> list[str]:
    """Return PTX for sm_80 or newer that rounds the block's values, code0 to code15 times ``scale``, to ``dtype``.

    It sorts their bytes into the registers low and high.
    """
    lines = []
    for i in range(8):
        lines += [f"mul.rn.f32 even, code{2 * i}, {scale};", f"mul.rn.f32 odd, code{2 * i + 1}, {scale};"]
        lines += [f"cvt.rn.{dtype}x2.f32 pair{i}, odd, even;"]
    for plane, choice in (("low", "0x6420"), ("high", "0x7531")):
        lines += [f"prmt.b32 {plane}{i}, pair{2 * i}, pair{2 * i + 1}, {choice};" for i in range(4)]
    return lines


def decode_word(word: str, registers: Sequence[str]) -> list[str]:
    """Return PTX that decodes a packed 32-bit word of 8 weights into four registers, two per register in memory order."""
    lines = [f"and.b32 index, {word}, 0x77777777;", f"shl.b32 above, {word}, 4;"]
    # Each byte of the register ``sign`` belongs to one nibble, and repeats the nibble's highest bit eight times.
    for half, signs in enumerate(("0x9d8c", "0xbfae")):
        lines += [f"prmt.b32 sign, {word}, above, {signs};"]
        for plane in ("low", "high"):
            lines += [f"prmt.b32 under8, {plane}0, {plane}1, index;", f"prmt.b32 from8, {plane}2, {plane}3, index;"]
            lines += [f"lop3.b32 {plane}s, sign, from8, under8, 0xCA;"]  # sign ? from8 : under8
        lines += [f"prmt.b32 {registers[2 * half]}, lows, highs, 0x4051;"]
        lines += [f"prmt.b32 {registers[2 * half + 1]}, lows, highs, 0x6273;", "shr.u32 index, index, 16;"]
    return lines
