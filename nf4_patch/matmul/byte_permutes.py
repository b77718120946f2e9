"""PTX that decodes NF4 with byte permutes (prmt) instead of a table in memory.

First the 16 possible weights of a block are rounded to 16 bits. Four registers hold their low bytes, and four hold their high
bytes. A nibble is the index of one of the 16 weights. Its three low bits select a byte of weights 0 to 7 and a byte of weights 8 to
15. Its highest bit selects one of these two bytes. The cost is 2.6 instructions per weight, plus 2 for each of the 16 possible
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

REGISTERS = (
    ".reg .b32 index, above, sign, under8, from8, lows, highs, pair<8>, low<4>, high<4>; .reg .f32 code<16>, even, odd;"
)


def vector(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"


def round_codes(scale: str, dtype: str) -> list[str]:
    """Multiply code0 to code15 by ``scale`` and round the products to ``dtype``, two at a time (sm_80 and newer)."""
    lines = []
    for i in range(8):
        lines += [f"mul.rn.f32 even, code{2 * i}, {scale};", f"mul.rn.f32 odd, code{2 * i + 1}, {scale};"]
        lines += [f"cvt.rn.{dtype}x2.f32 pair{i}, odd, even;"]
    for plane, choice in (("low", "0x6420"), ("high", "0x7531")):
        lines += [f"prmt.b32 {plane}{i}, pair{2 * i}, pair{2 * i + 1}, {choice};" for i in range(4)]
    return lines


def decode_word(word: str, registers: Sequence[str]) -> list[str]:
    """Decode the 8 weights of a packed 32-bit word into four registers of two weights each, in memory order."""
    lines = [f"and.b32 index, {word}, 0x77777777;", f"shl.b32 above, {word}, 4;"]
    for half, signs in enumerate(
        ("0x9d8c", "0xbfae")
    ):  # every byte of ``sign`` repeats a nibble's highest bit eight times
        lines += [f"prmt.b32 sign, {word}, above, {signs};"]
        for plane in ("low", "high"):
            lines += [f"prmt.b32 under8, {plane}0, {plane}1, index;", f"prmt.b32 from8, {plane}2, {plane}3, index;"]
            lines += [f"lop3.b32 {plane}s, sign, from8, under8, 0xCA;"]  # sign ? from8 : under8
        lines += [f"prmt.b32 {registers[2 * half]}, lows, highs, 0x4051;"]
        lines += [f"prmt.b32 {registers[2 * half + 1]}, lows, highs, 0x6273;", "shr.u32 index, index, 16;"]
    return lines
