"""Tables of the sizes for which the fused matmul was measured to be faster, with the config for each."""

from __future__ import annotations

from typing import NamedTuple

ANY = 2**62
MULTIPROCESSORS = 132  # of the GPU on which the tables were measured
TILE_COUNTS = (1, 2, 3, 4, 6, 8)  # numbers of 8-row tiles of X for which kernels are compiled


class SmallMConfig(NamedTuple):
    """How the work for up to 64 rows of X is divided."""

    tiles: int  # 16-row tiles of the weight per warp
    warps_n: int  # warps of a CTA along the rows of the weight, a power of two
    warps_k: int  # warps of a CTA along K, a power of two
    load_128bit: bool  # load the packed weight in 128 bits, not 64: half its L1 cycles, twice the L1 cycles of X
    ctas_per_sm: int
    prefetch_depth: int = 1  # chunks in flight per warp, each with a set of registers
    split_k: bool = False  # split K over CTAs if the rows alone do not fill the GPU; a second launch adds the sums

    @property
    def block_n(self) -> int:
        """Return the rows of the weight per CTA and iteration."""
        return 16 * self.tiles * self.warps_n

    def fill(self, n: int, processors: int) -> float:
        """Return the fraction of the multiprocessors' time that is used for a weight with ``n`` rows."""
        groups = -(-n // self.block_n)
        return groups / (processors * -(-groups // processors))


class SmallMRow(NamedTuple):
    """The limits within which a config is used: capability, most rows of X, largest K, smallest N."""

    capability: tuple[int, int]
    max_m: int
    max_k: int
    min_n: int
    config: SmallMConfig


# Smaller weights are faster with dequantize + matmul: above 16 rows, weights below 2^21 elements; above 32 rows, also weights
# below 2^24 elements that are not 16-byte aligned or have a scale every 16 elements.
# us at 64 rows, fused / dequantize + matmul: 256x2048 8.9 / 6.9, 1024x4096 unaligned 11.1 / 10.2, 1024x4112 11.2 / 10.2;
# 1024x4096 8.8 / 9.8, 4096x4096 unaligned 20.7 / 21.0 (H200).
MIN_ELEMENTS = {16: 2**21}  # minimum by the rows above which it applies
MIN_ELEMENTS_UNALIGNED = {32: 2**24}

# The first row that fits is used. Among rows with the same limits, it is the row that keeps the most multiprocessors busy, or
# the first of several such rows. If no row fits, the caller dequantizes and multiplies.
# us per call, CUDA graph over weights that overflow the L2 cache (H200, torch 2.11, triton 3.6.0, bf16):
#                  14336x4096     4096x14336     4096x4096      8192x8192      28672x8192
#   M = 1 / 8      15.8 / 16.8    17.6 / 18.2    6.3 / 7.1      19.7 / 21.3    56.7 / 63.4
#   M = 16         20.2           19.4           7.7            23.2           75.6
#   M = 32 / 64    28.5 / 39.4    24.6 / 35.3    9.8 / 13.4     27.8 / 39.1    94.4 / 139
# With one chunk of K per warp (K <= 4096 at 16 warps), X stays in registers: 14336x4096 takes 16.9 us instead of 21.8 at
# M = 1, and 21.7 us instead of 26.9 at M = 16. Above 64 rows, a second pass over the weight costs more than
# dequantize + matmul.
# The arguments of a config are tiles, warps_n, warps_k, load_128bit and ctas_per_sm.
SMALL_M_ROWS: tuple[SmallMRow, ...] = (
    SmallMRow((9, 0), 8, 4096, 1, SmallMConfig(1, 1, 16, True, 1)),
    SmallMRow((9, 0), 8, ANY, 4000, SmallMConfig(2, 1, 8, True, 1, prefetch_depth=2)),
    SmallMRow((9, 0), 8, ANY, 1, SmallMConfig(1, 1, 8, True, 2)),
    SmallMRow((9, 0), 16, 4096, 5000, SmallMConfig(1, 1, 16, True, 1)),
    SmallMRow((9, 0), 16, ANY, 2100, SmallMConfig(2, 2, 4, False, 1)),
    SmallMRow((9, 0), 16, ANY, 2100, SmallMConfig(2, 1, 8, False, 1)),
    SmallMRow((9, 0), 16, ANY, 1, SmallMConfig(1, 1, 8, False, 2, prefetch_depth=2)),
    SmallMRow((9, 0), 64, ANY, 1400, SmallMConfig(2, 4, 2, False, 1)),
    SmallMRow((9, 0), 64, ANY, 1400, SmallMConfig(2, 2, 4, False, 1)),
    SmallMRow((9, 0), 64, ANY, 1400, SmallMConfig(2, 1, 8, False, 1)),
    SmallMRow((9, 0), 64, ANY, 1, SmallMConfig(2, 1, 8, False, 1, split_k=True)),
)


# Candidates for a T4, fp16 only. A model (docs/notes) predicts 1.4 to 3.0 times the speed of bitsandbytes from 4 rows upwards,
# and no gain below. On a GPU without a row in the table above, choice.py measures them at the first use of a size.
SMALL_M_CANDIDATES: tuple[SmallMRow, ...] = (
    SmallMRow((7, 5), 16, ANY, 1, SmallMConfig(1, 1, 8, True, 1)),
    SmallMRow((7, 5), 64, ANY, 1, SmallMConfig(2, 4, 2, False, 1, split_k=True)),
)
