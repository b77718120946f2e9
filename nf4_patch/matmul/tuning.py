"""Tables of the sizes for which the fused matmul is used, and of the config for each size."""

from __future__ import annotations

from typing import NamedTuple

ANY = 2**62
MULTIPROCESSORS = 132  # number of multiprocessors of the GPU on which the tables were measured
TILE_COUNTS = (1, 2, 3, 4, 6, 8)  # numbers of 8-row tiles of X for which kernels are compiled


class SmallMConfig(NamedTuple):
    """A config of the fused matmul for up to 64 rows of X."""

    tiles: int  # 16-row tiles of the weight per warp
    warps_n: int  # number of warps of a CTA along the rows of the weight, a power of two
    warps_k: int  # number of warps of a CTA along K, a power of two
    # whether a load reads 128 bits of the packed weight instead of 64. Loads of 128 bits halve the L1 cycles for the
    # weight, but double the L1 cycles for X
    load_128bit: bool
    ctas_per_sm: int
    prefetch_depth: int = 1  # number of chunks of K that a warp loads at the same time, each into its own registers
    split_k: bool = False  # CTAs split K if the rows alone do not fill the GPU; a second launch adds up their sums

    @property
    def block_n(self) -> int:
        """Return the rows of the weight that a CTA computes per iteration."""
        return 16 * self.tiles * self.warps_n

    def fill(self, n: int, processors: int) -> float:
        """Return the fraction of time in which the multiprocessors have work."""
        groups = -(-n // self.block_n)
        return groups / (processors * -(-groups // processors))


class SmallMRow(NamedTuple):
    """A config, and the limits of the sizes for which it is used."""

    capability: tuple[int, int]
    max_m: int  # most rows of X
    max_k: int
    min_n: int
    config: SmallMConfig


# A weight with fewer elements than these minimums is dequantized and multiplied, because that is faster. A minimum
# applies if X has more rows than the minimum's key. MIN_ELEMENTS_SHORT_STEP is for weights that have a scale every 16 elements.
# These times in us were measured with 64 rows of X on an H200:
#   weight                fused   dequantize + matmul
#   256x2048               8.9     6.9   below MIN_ELEMENTS
#   1024x4096              8.8     9.8
#   1024x4112             11.2    10.2   below MIN_ELEMENTS_SHORT_STEP (a scale every 16 elements)
MIN_ELEMENTS = {16: 2**21}
MIN_ELEMENTS_SHORT_STEP = {32: 2**24}

# Each row holds capability, max_m, max_k, min_n and a config, whose arguments are tiles, warps_n, warps_k, load_128bit and
# ctas_per_sm. The first row whose limits fit the size is used. If no row fits, the caller dequantizes and multiplies.
# Among rows with the same limits, the first row that keeps the most multiprocessors busy is used.
#
# The fused matmul takes these times per call in us, for M rows of X and weights [N, K].
# They were measured in bf16 with a CUDA graph over weights that overflow the L2 cache (H200, torch 2.11, triton 3.6.0).
#   N x K     14336x4096   4096x14336   4096x4096   8192x8192   28672x8192
#   M = 1           15.8         17.6         6.3        19.7         56.7
#   M = 8           16.8         18.2         7.1        21.3         63.4
#   M = 16          20.2         19.4         7.7        23.2         75.6
#   M = 32          28.5         24.6         9.8        27.8         94.4
#   M = 64          39.4         35.3        13.4        39.1          139
# X stays in registers if each warp has only one chunk of K, which is the case for K up to 4096 with 16 warps.
# A 14336x4096 weight then takes 16.9 us instead of 21.8 at M = 1, and 21.7 us instead of 26.9 at M = 16.
# Above 64 rows, the fused matmul would have to read the weight twice, and would be slower than dequantize + matmul.
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


# Configs for a T4, which supports fp16 only. On a GPU without a row in the table above, choice.py measures these configs
# at the first use of a size. A performance model (docs/notes) predicts that on a T4 they are 1.4 to 3.0 times as fast as
# bitsandbytes from 4 rows of X upwards, and not faster below 4 rows.
SMALL_M_CANDIDATES: tuple[SmallMRow, ...] = (
    SmallMRow((7, 5), 16, ANY, 1, SmallMConfig(1, 1, 8, True, 1)),
    SmallMRow((7, 5), 64, ANY, 1, SmallMConfig(2, 4, 2, False, 1, split_k=True)),
)
