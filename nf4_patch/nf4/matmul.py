"""X[M, K] @ dequantize(weight)[N, K].T in one pass over the packed weight: launch table, launch, plain twin."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from . import matmul_ptx, reference
from .layout import Layout

try:
    import triton

    from . import matmul_kernels as kernels
except ImportError:  # no Triton on this machine: refusal() says so
    triton = None

DTYPES = (torch.float16, torch.bfloat16)
BLOCKSIZES = (64, 128, 256, 512, 1024, 2048, 4096)
TILE_COUNTS = (1, 2, 3, 4, 6, 8)  # 8-row tiles of X that a kernel is compiled for


class Config(NamedTuple):
    """How the work is cut; see matmul_ptx.program for the first four."""

    tiles: int
    along_n: int
    along_k: int
    wide: bool
    resident: int  # programs a multiprocessor
    sliced: bool = False  # K over several programs, their sums by a second launch, where rows alone leave it idle

    @property
    def rows(self) -> int:
        """Rows of the weight a program takes at once."""
        return 16 * self.tiles * self.along_n


class Row(NamedTuple):
    """Where a config serves: capability, and the most rows of X, most K, fewest N."""

    capability: tuple[int, int]
    m: int
    k: int
    n: int
    config: Config


ANY = 2**62

# The first row that fits is taken; no row: the caller dequantizes and multiplies.
# H200, torch 2.11, triton 3.6.0, bf16, us a call, CUDA graph over weights that overflow the L2:
#                  14336x4096     4096x14336     4096x4096      8192x8192      28672x8192
#   M = 1 / 8      18.2 / 19.1    20.1 / 23.8    7.8 / 8.7      23.1 / 28.1    69.8 / 86.1
#   M = 16         23.4           24.4           9.6            30.3           93.4
#   M = 32 / 64    33.3 / 46.8    31.3 / 42.6    13.1 / 17.4    35.7 / 47.9    122 / 171
# Past 64 rows a second pass over the weight costs more than dequantize + matmul.
# One chunk of K a warp (K <= 4096 at 16 warps) keeps X in registers: 22.5 -> 18.2 at M = 1, 29.8 -> 23.4 at M = 16.
ROWS: tuple[Row, ...] = (
    Row((9, 0), 8, 4096, 1, Config(tiles=1, along_n=1, along_k=16, wide=True, resident=1)),
    Row((9, 0), 8, ANY, 1, Config(tiles=1, along_n=1, along_k=8, wide=True, resident=2)),
    Row((9, 0), 16, 4096, 5000, Config(tiles=1, along_n=1, along_k=16, wide=True, resident=1)),
    Row((9, 0), 16, ANY, 2100, Config(tiles=2, along_n=1, along_k=8, wide=False, resident=2)),
    Row((9, 0), 16, ANY, 1, Config(tiles=1, along_n=1, along_k=8, wide=False, resident=3)),
    Row((9, 0), 64, ANY, 1, Config(tiles=2, along_n=4, along_k=2, wide=False, resident=1, sliced=True)),
)


def config_for(capability: tuple[int, int], m: int, n: int, k: int) -> Config | None:
    """The measured config for ``m`` rows of X and an [n, k] weight; None where none is."""
    for row in ROWS:
        if row.capability == capability and m <= row.m and k <= row.k and n >= row.n:
            return row.config
    return None


def refusal(
    x: torch.Tensor, packed: torch.Tensor, blocksize: int, n: int, k: int, bias: torch.Tensor | None = None
) -> str | None:
    """Why :func:`matmul_4bit` cannot serve these arguments; None if it can."""
    if triton is None:
        return "Triton is not installed"
    if not x.is_cuda or torch.version.hip:
        return f"x is on {x.device}; the kernel runs on NVIDIA GPUs"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; the kernel multiplies in float16 or bfloat16"
    if blocksize not in BLOCKSIZES:
        return f"blocksize {blocksize} is none of {BLOCKSIZES}"
    if k % blocksize:
        return f"K = {k} is no multiple of the blocksize {blocksize}: a block spans two rows"
    if packed.data_ptr() % 16:
        return f"the packed weight starts at {packed.data_ptr():#x}, not on 16 bytes"
    if bias is not None and (bias.dtype is not x.dtype or not bias.is_contiguous()):
        return f"bias is {bias.dtype}, strides {bias.stride()}; x is {x.dtype} and bias must be contiguous"
    if config_for(torch.cuda.get_device_capability(x.device), x.numel() // k, n, k) is None:
        return f"no measured config for {x.numel() // k} rows on {torch.cuda.get_device_name(x.device)}"
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Plan(NamedTuple):
    """Grid and text of one launch."""

    config: Config
    shares: int  # even shares of the rows of the weight, one a multiprocessor and slice
    programs: int
    slices: int
    text: str


@functools.lru_cache(maxsize=4096)
def plan(
    config: Config, processors: int, m: int, n: int, k: int, half: bool, nested: bool, bias: bool, sleep: bool = True
) -> Plan:
    """How ``config`` serves this size on a GPU of so many multiprocessors."""
    groups = -(-n // config.rows)
    chunks = -(-k // 256)
    slices = min(max(1, processors // groups), chunks) if config.sliced else 1
    shares = min(groups, max(1, processors // slices))
    programs = shares * min(config.resident, -(-groups // shares))
    still = config.wide and -(-chunks // slices) <= config.along_k
    columns = next(count for count in TILE_COUNTS if m <= 8 * count)
    text = matmul_ptx.program(
        config.tiles, columns, config.along_n, config.along_k, config.wide, still,
        half, nested, k % 256 != 0, slices > 1, bias and slices == 1, sleep,
    )  # fmt: skip
    return Plan(config, shares, programs, slices, text)


def matmul_4bit(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    absmax2: torch.Tensor | None,
    code2: torch.Tensor | None,
    offset: torch.Tensor | None,
    blocksize: int,
    blocksize2: int,
    n: int,
    k: int,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """``x @ weight.T (+ bias)`` with the weight decoded inside the kernel; fp32 accumulation.

    The weights it multiplies by are, bit for bit, those of dequantize in x's dtype. The same arguments give the same
    bits at every run: sums across warps and slices are taken in a fixed order.

    Args:
        x: [..., k], fp16 or bf16.
        packed, absmax, code, absmax2, code2, offset: as in :class:`Layout`; the offset in fp32.
        blocksize, blocksize2: elements a block; blocks a second-level block, a power of two.
        n, k: rows and columns of the weight; k a multiple of the blocksize.
        bias: [n], x's dtype.
        config: instead of the table's.

    Returns:
        [..., n] in x's dtype.

    Raises:
        ValueError: what :func:`refusal` says.
    """
    if config is None:
        why = refusal(x, packed, blocksize, n, k, bias)
        if why is not None:
            raise ValueError(f"matmul_4bit cannot serve this: {why}; dequantize and multiply")
    device = x.device
    m = x.numel() // k
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=device)
    if m == 0:
        return out
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    capability = torch.cuda.get_device_capability(device)
    config = config or config_for(capability, m, n, k)
    assert config is not None
    nested = absmax2 is not None
    half = x.dtype is torch.float16
    launch = plan(config, multiprocessors(device), m, n, k, half, nested, bias is not None, capability >= (9, 0))
    second: tuple[Any, ...] = (absmax2, code2, offset) if nested else (code, code, code)
    target = out
    if launch.slices > 1:
        target = torch.empty((launch.slices, m, n), dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        kernels.matmul_4bit_kernel[(launch.programs, launch.slices)](
            x, packed, absmax, code, *second, target, code if bias is None else bias,
            m, n, k // 64, (blocksize // 64).bit_length() - 1, max(blocksize2, 1).bit_length() - 1, launch.shares,
            PTX=launch.text, CONSTRAINTS=matmul_ptx.CONSTRAINTS,
            num_warps=config.along_n * config.along_k, num_stages=1,
        )  # fmt: skip
        if launch.slices > 1:
            kernels.sum_slices_kernel[(triton.cdiv(m * n, 1024),)](
                target, out, code if bias is None else bias, m * n, n,
                SLICES=launch.slices, BIAS=bias is not None, BLOCK=1024, num_warps=4,
            )  # fmt: skip
    return out


def matmul_reference(x: torch.Tensor, layout: Layout, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch: the weight rounded to x's dtype, products and sums in fp32, one rounding at the end."""
    weight = reference.dequantize(layout._replace(dtype=x.dtype, packed=layout.bytes()))
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
