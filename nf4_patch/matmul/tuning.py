"""Where a fused matmul was measured to win, and with which configuration: tables, and nothing that reads them."""

from __future__ import annotations

from typing import NamedTuple

ANY = 2**62
MULTIPROCESSORS = 132  # of the GPU on which the tables were measured
TILE_COUNTS = (1, 2, 3, 4, 6, 8)  # 8-row tiles of X that a kernel for few rows is compiled for


class SmallMConfig(NamedTuple):
    """Up to 64 rows of X: how the work is cut."""

    tiles: int  # 16-row tiles of the weight that a warp carries at once
    warps_n: int  # of a CTA, next to each other along the rows of the weight,
    warps_k: int  # and along K; powers of two
    load_128bit: bool  # of the packed weight (half the L1 cycles, twice those of X), else 64-bit
    ctas_per_sm: int
    prefetch_depth: int = 1  # chunks of words and scales in flight per warp, one set of registers each
    split_k: bool = False  # K over several CTAs, their sums by a second launch, where rows alone leave the GPU idle

    @property
    def block_n(self) -> int:
        """Rows of the weight that a CTA takes at once."""
        return 16 * self.tiles * self.warps_n

    def fill(self, n: int, processors: int) -> float:
        """The fraction of the multiprocessors' time that is work, of a weight with ``n`` rows."""
        groups = -(-n // self.block_n)
        return groups / (processors * -(-groups // processors))


class SmallMRow(NamedTuple):
    """Where a config wins: capability, and the most rows of X, most K, fewest N."""

    capability: tuple[int, int]
    max_m: int
    max_k: int
    min_n: int
    config: SmallMConfig


# Of one [n, k], in ascending m: the config for up to so many rows of X, or None where dequantize + matmul is faster.
CalibratedRanges = tuple[tuple[int, SmallMConfig | None], ...]


# Where dequantize + matmul is faster than any row below: past 16 rows by small weights, and past 32 by larger ones that
# start off 16 bytes or have a scale every 16 elements. H200, us at 64 rows, this / dequantize + matmul: 256x2048 8.9 / 6.9,
# 1024x4096 off 16 bytes 11.1 / 10.2, 1024x4112 11.2 / 10.2; 1024x4096 8.8 / 9.8, 4096x4096 off 16 bytes 20.7 / 21.0.
MIN_ELEMENTS = {16: 2**21}  # by the rows past which it counts
MIN_ELEMENTS_UNALIGNED = {32: 2**24}

# The first row that fits is taken, of rows with the same limits the one that keeps the most multiprocessors at work, or the
# first of those; no row: the caller dequantizes and multiplies.
# H200, torch 2.11, triton 3.6.0, bf16, us per call, CUDA graph over weights that overflow the L2:
#                  14336x4096     4096x14336     4096x4096      8192x8192      28672x8192
#   M = 1 / 8      15.8 / 16.8    17.6 / 18.2    6.3 / 7.1      19.7 / 21.3    56.7 / 63.4
#   M = 16         20.2           19.4           7.7            23.2           75.6
#   M = 32 / 64    28.5 / 39.4    24.6 / 35.3    9.8 / 13.4     27.8 / 39.1    94.4 / 139
# One chunk of K per warp (K <= 4096 at 16 warps) keeps X in registers: 21.8 -> 16.9 at M = 1, 26.9 -> 21.7 at M = 16, of
# 14336x4096. Past 64 rows a second pass over the weight costs more than dequantize + matmul.
# A config's numbers: tiles, warps_n, warps_k, load_128bit, ctas_per_sm.
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


# By a model (docs/notes), 1.4 to 3.0 times as fast as bitsandbytes on a T4 from 4 rows on, and no faster below; not
# measured: `nf4-patch calibrate` tries them, config_for never takes them. fp16 only.
SMALL_M_CANDIDATES: tuple[SmallMRow, ...] = (
    SmallMRow((7, 5), 16, ANY, 1, SmallMConfig(1, 1, 8, True, 1)),
    SmallMRow((7, 5), 64, ANY, 1, SmallMConfig(2, 4, 2, False, 1, split_k=True)),
)
