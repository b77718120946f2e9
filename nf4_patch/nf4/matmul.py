"""X[M, K] @ dequantize(weight)[N, K].T in one pass over the packed weight: launch table, launch, plain twin."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import launch, matmul_ptx, reference
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
    ahead: int = 1  # chunks in flight a warp
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
    config: Any  # a Config, here or of matmul_dx


ANY = 2**62

# The first row that fits is taken; no row: the caller dequantizes and multiplies.
# H200, torch 2.11, triton 3.6.0, bf16, us a call, CUDA graph over weights that overflow the L2:
#                  14336x4096     4096x14336     4096x4096      8192x8192      28672x8192
#   M = 1 / 8      16.9 / 17.8    19.0 / 21.3    7.0 / 7.7      22.0 / 25.0    64.4 / 73.5
#   M = 16         21.7           23.2           9.3            26.6           91.7
#   M = 32 / 64    31.2 / 43.1    29.5 / 40.2    12.8 / 16.7    32.1 / 43.2    114 / 159
# The other configs tried for a row are 3 to 60 % slower on most of these shapes; 4 and 16 warps likewise.
# One chunk of K a warp (K <= 4096 at 16 warps) keeps X in registers: 21.8 -> 16.9 at M = 1, 26.9 -> 21.7 at M = 16.
# Past 64 rows a second pass over the weight costs more than dequantize + matmul. Dequantizing in slices that stay in
# the L2 does not help that either: 186 -> 197 to 210 us at M = 1024, 14336x4096.
ROWS: tuple[Row, ...] = (
    Row((9, 0), 8, 4096, 1, Config(tiles=1, along_n=1, along_k=16, wide=True, resident=1)),
    Row((9, 0), 8, ANY, 4000, Config(tiles=2, along_n=1, along_k=8, wide=True, resident=1, ahead=2)),
    Row((9, 0), 8, ANY, 1, Config(tiles=1, along_n=1, along_k=8, wide=True, resident=2)),
    Row((9, 0), 16, 4096, 5000, Config(tiles=1, along_n=1, along_k=16, wide=True, resident=1)),
    Row((9, 0), 16, ANY, 2100, Config(tiles=2, along_n=1, along_k=8, wide=False, resident=2)),
    Row((9, 0), 16, ANY, 1, Config(tiles=1, along_n=1, along_k=8, wide=False, resident=2, ahead=2)),
    Row((9, 0), 64, ANY, 12000, Config(tiles=2, along_n=4, along_k=2, wide=False, resident=1, sliced=True)),
    Row((9, 0), 64, ANY, 1, Config(tiles=2, along_n=2, along_k=4, wide=False, resident=1, sliced=True)),
)


# Modelled, not measured on a T4: used by `nf4-patch calibrate`, never by config_for. By the model (docs/t4.md) 1.4 to 3.0 times
# as fast as bitsandbytes from 4 rows on, and no faster below. fp16 only.
CANDIDATES: tuple[Row, ...] = (
    Row((7, 5), 16, ANY, 1, Config(tiles=1, along_n=1, along_k=8, wide=True, resident=1)),
    Row((7, 5), 64, ANY, 1, Config(tiles=2, along_n=4, along_k=2, wide=False, resident=1, sliced=True)),
)


def config_for(
    capability: tuple[int, int], m: int, n: int, k: int, rows: tuple[Row, ...] | None = None
) -> Any:  # fmt: skip
    """The measured config for ``m`` rows of X and an [n, k] weight; None where none is."""
    for row in ROWS if rows is None else rows:
        if row.capability == capability and m <= row.m and k <= row.k and n >= row.n:
            return row.config
    return None


def refusal(
    x: torch.Tensor, packed: torch.Tensor, blocksize: int, n: int, k: int, bias: torch.Tensor | None = None
) -> str | None:
    """Why :func:`matmul_4bit` cannot serve these arguments; None if it can."""
    return refusal_of("x", x, packed, blocksize, n, k, x.numel() // k, ROWS, bias)


def refusal_of(
    name: str, x: torch.Tensor, packed: torch.Tensor, blocksize: int, n: int, k: int, m: int, rows: tuple[Row, ...],
    bias: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """The refusal of a product of ``m`` rows of x, called ``name``, for which ``rows`` is the table."""
    if triton is None:
        return "Triton is not installed"
    if not isinstance(kernels.matmul_4bit_kernel, triton.runtime.JITFunction):
        return "Triton's interpreter (TRITON_INTERPRET=1) does not run PTX"
    if not x.is_cuda or torch.version.hip:
        return f"{name} is on {x.device}; the kernel runs on NVIDIA GPUs"
    if x.dtype not in DTYPES:
        return f"{name} is {x.dtype}; the kernel multiplies in float16 or bfloat16"
    capability = torch.cuda.get_device_capability(x.device)
    if x.dtype is torch.bfloat16 and capability < (8, 0):
        return f"{name} is torch.bfloat16; tensor cores multiply it from compute capability 8.0 on, this GPU has {capability[0]}.{capability[1]}"
    if blocksize not in BLOCKSIZES:
        return f"blocksize {blocksize} is none of {BLOCKSIZES}"
    if k % blocksize:
        return f"K = {k} is no multiple of the blocksize {blocksize}: a block spans two rows"
    if packed.data_ptr() % 16:
        return f"the packed weight starts at {packed.data_ptr():#x}, not on 16 bytes"
    if bias is not None and (bias.dtype is not x.dtype or not bias.is_contiguous() or bias.data_ptr() % 16):
        return f"bias is {bias.dtype}, strides {bias.stride()}; it must be {x.dtype}, contiguous, on 16 bytes"
    if config_for(capability, m, n, k, rows) is None:
        return f"no measured config for {m} rows on {torch.cuda.get_device_name(x.device)}"
    return None


class Plan(NamedTuple):
    """How a config serves one size on one GPU."""

    shares: int  # even shares of the rows of the weight, one a multiprocessor and slice
    programs: int
    slices: int  # whose sums a second launch adds
    text: str
    cluster: int = 1  # programs that add up theirs themselves


def plan(
    config: Config, processors: int, m: int, n: int, k: int, half: bool, nested: bool, bias: bool,
    capability: tuple[int, int] = (9, 0),
) -> Plan:  # fmt: skip
    groups = -(-n // config.rows)
    chunks = -(-k // 256)
    slices = min(max(1, processors // groups), chunks) if config.sliced else 1
    shares = min(groups, max(1, processors // slices))
    programs = shares * min(config.resident, -(-groups // shares)) * slices
    still = config.wide and chunks <= config.along_k
    columns = next(count for count in TILE_COUNTS if m <= 8 * count)
    text = matmul_ptx.program(
        config.tiles, columns, config.along_n, config.along_k, config.wide, config.ahead, still,
        half, nested, k % 256 != 0, slices > 1, bias and slices == 1, capability,
    )  # fmt: skip
    return Plan(shares, programs, slices, text)


def constants(text: str, cluster: int = 1) -> dict[str, Any]:
    """The constexpr arguments of matmul_4bit_kernel."""
    return {"PTX": text, "CONSTRAINTS": matmul_ptx.CONSTRAINTS, "CLUSTER": cluster}


SUM_BLOCK = 1024
_starts: dict[tuple[Any, ...], launch.Start | launch.KernelUnavailable] = {}


def compiled(
    kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], warps: int, dtype: torch.dtype
) -> launch.Start:
    """The start of a kernel, compiled at the first use of its text on this device; a failure is remembered.

    The text depends on the 8-row tiles of X and not on M: 64 lengths of a prompt are six compilations at most.
    """
    key = (arguments[0].device, dtype, *values.values(), warps)
    known = _starts.get(key)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            raise launch.KernelUnavailable(
                "a CUDA graph is being captured; the kernel compiles outside one", "CAPTURING"
            )
        known = _starts[key] = _compile(kernel, arguments, values, warps)
    if isinstance(known, launch.KernelUnavailable):
        raise known
    return known


def _compile(
    kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], warps: int
) -> launch.Start | launch.KernelUnavailable:
    try:
        clusters = values.get("CLUSTER", 1)
        result = kernel.warmup(*arguments, **values, grid=(1,), num_warps=warps, num_stages=1, num_ctas=clusters)
        result = result.result() if hasattr(result, "result") else result
        return launch.starter(result, tuple(values.values()))[0]
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler, the driver, a read-only cache: theirs to raise, ours to name
        return launch.KernelUnavailable(f"{type(error).__name__}: {error}")


class Kernel:
    """The launches for one size and kind of argument on one device, as plain integers."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], cut: Plan, warps: int, blocksize: int, blocksize2: int,
                 m: int, n: int, k: int, bias: bool = False, start: launch.Start | None = None):  # fmt: skip
        x, out = tensors[0], tensors[7]
        self.grid, self.slices = cut.programs, cut.slices
        shift2 = max(0, blocksize2.bit_length() - 1)
        self.sizes = (m, n, k // 64, (blocksize // 64).bit_length() - 1, shift2, cut.shares, cut.slices)
        self.sum_grid, self.sum_sizes = -(-out.numel() // SUM_BLOCK), (out.numel(), out.shape[-1])
        part = out if cut.slices == 1 else torch.empty(0, dtype=torch.float32, device=x.device)
        values = constants(cut.text, cut.cluster)
        arguments = (*tensors[:7], part, tensors[8], *self.sizes)
        self.start = start or compiled(kernels.matmul_4bit_kernel, arguments, values, warps, x.dtype)
        if cut.slices > 1:
            values = {"SLICES": cut.slices, "BIAS": bias, "BLOCK": SUM_BLOCK}
            arguments = (part, out, tensors[8], *self.sum_sizes)
            self.sum = compiled(kernels.sum_slices_kernel, arguments, values, 4, out.dtype)

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Launch with x, packed, absmax, code, absmax2, code2, offset, out, bias, on their device's current stream."""
        out = tensors[7]
        index = out.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self.slices == 1:
            self.start(self.grid, stream, *pointers, *self.sizes)
            return
        part = torch.empty(self.slices * out.numel(), dtype=torch.float32, device=out.device)
        pointers[7] = part.data_ptr()
        self.start(self.grid, stream, *pointers, *self.sizes)
        self.sum(self.sum_grid, stream, pointers[7], out.data_ptr(), pointers[8], *self.sum_sizes)


def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_kernels: dict[tuple[Any, ...], Kernel] = {}


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T (+ bias)`` with the weight decoded inside the kernel; fp32 accumulation.

    The weights it multiplies by are, bit for bit, those of dequantize in x's dtype. The same arguments give the same
    bits at every run: sums across warps and slices are taken in a fixed order.

    Args:
        x: [..., k], fp16 or bf16.
        packed, absmax, code, absmax2, code2, offset: as in :class:`Layout`, contiguous; the offset in fp32.
        blocksize, blocksize2: elements a block; blocks a second-level block, a power of two.
        n, k: rows and columns of the weight; k a multiple of the blocksize.
        bias: [n], x's dtype.
        config: instead of the table's; then the caller answers for :func:`refusal`.
        out: filled and returned if given: contiguous, [..., n], x's dtype and device.

    Returns:
        [..., n] in x's dtype.

    Raises:
        ValueError: what :func:`refusal` says.
        KernelUnavailable: the kernel is not compiled yet and a CUDA graph is being captured.
    """
    device = x.device
    m = x.numel() // k
    if out is None:
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=device)
    if m == 0:
        return out
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    nested = absmax2 is not None
    key = (device, x.dtype, nested, bias is None, m, n, k, blocksize, blocksize2, config)
    kernel = _kernels.get(key)
    second = (code, code, code)  # a flat weight has none; the kernel reads none
    if absmax2 is not None and code2 is not None and offset is not None:
        second = (absmax2, code2, offset)
    if kernel is None or packed.data_ptr() % 16 or bias is not None:
        why = refusal(x, packed, blocksize, n, k, bias) if config is None else None
        if why is not None:
            raise ValueError(f"matmul_4bit cannot serve this: {why}; dequantize and multiply")
    tensors = (x, packed, absmax, code, *second, out, code if bias is None else bias)
    if kernel is None:
        capability = torch.cuda.get_device_capability(device)
        chosen = config or config_for(capability, m, n, k)
        half = x.dtype is torch.float16
        cut = plan(chosen, processors(device), m, n, k, half, nested, bias is not None, capability)
        with torch.cuda.device(device):
            kernel = Kernel(
                tensors, cut, chosen.along_n * chosen.along_k, blocksize, blocksize2, m, n, k, bias is not None
            )
        _kernels[key] = kernel
    kernel(tensors)
    return out


def matmul_reference(x: torch.Tensor, layout: Layout, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch: the weight rounded to x's dtype, products and sums in fp32, one rounding at the end."""
    weight = reference.dequantize(layout._replace(dtype=x.dtype, packed=layout.bytes()))
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
