"""X[M, K] @ dequantize(weight)[N, K].T in one pass over the packed weight: launch table, launch, plain twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..dequantize import launch, reference
from ..layout import Layout
from . import calibration
from . import hopper as matmul_wide
from . import small_m_ptx as matmul_ptx
from .hopper import multiprocessors, operands

try:
    import triton

    from . import kernels
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
    capability: tuple[int, int], m: int, n: int, k: int, rows: tuple[Row, ...] | None = None,
    device: int | None = None, backward: bool = False,
) -> Any:  # fmt: skip
    """The measured config for ``m`` rows of X and an [n, k] weight; None where none is.

    What was calibrated on ``device`` for this very n and k goes before the table.
    """
    calibrated = calibration.rows(device, backward).get((n, k))
    if calibrated is not None and (rows is not None or m <= max((most for most, _ in calibrated), default=0)):
        return next((config for most, config in calibrated if m <= most), None)
    for row in ROWS if rows is None else rows:
        if row.capability == capability and m <= row.m and k <= row.k and n >= row.n:
            return row.config
    return matmul_wide.config_for(capability, m, n, k, device) if rows is None else None


def refusal(x: torch.Tensor, layout: Layout, bias: torch.Tensor | None = None) -> str | None:
    """Why :func:`matmul_4bit` cannot serve these arguments; None if it can."""
    n, k = layout.shape
    return refusal_of("x", x, layout, x.numel() // k, config_for) or refusal_of_bias(bias, x.dtype, n)


def refusal_of(name: str, x: torch.Tensor, layout: Layout, m: int, config_of: Callable[..., Any]) -> str | None:
    """The refusal of a product of ``m`` rows of x, called ``name``, whose config ``config_of`` finds."""
    n, k = layout.shape
    if triton is None:
        return "Triton is not installed"
    if not isinstance(kernels.matmul_4bit_kernel, triton.runtime.JITFunction):
        return "Triton's interpreter (TRITON_INTERPRET=1) does not run PTX"
    if not x.is_cuda or torch.version.hip:
        return f"{name} is on {x.device}; the kernel runs on NVIDIA GPUs"
    if x.device != layout.packed.device:
        return f"{name} is on {x.device}, the weight on {layout.packed.device}"
    if x.dtype not in DTYPES:
        return f"{name} is {x.dtype}; the kernel multiplies in float16 or bfloat16"
    capability = torch.cuda.get_device_capability(x.device)
    if x.dtype is torch.bfloat16 and capability < (8, 0):
        return (
            f"{name} is torch.bfloat16; tensor cores multiply it from compute capability 8.0 on, "
            f"this GPU has {capability[0]}.{capability[1]}"
        )
    if layout.blocksize not in BLOCKSIZES:
        return f"blocksize {layout.blocksize} is none of {BLOCKSIZES}"
    if k % layout.blocksize:
        return f"K = {k} is no multiple of the blocksize {layout.blocksize}: a block spans two rows"
    if layout.packed.data_ptr() % 16:
        return f"the packed weight starts at {layout.packed.data_ptr():#x}, not on 16 bytes"
    if layout.offset is not None and layout.offset.dtype is not torch.float32:
        return f"the offset is {layout.offset.dtype}; the kernel reads float32"
    if config_of(capability, m, n, k, device=x.device.index) is None:
        return f"no measured config for {m} rows on {torch.cuda.get_device_name(x.device)}"
    return None


def refusal_of_bias(bias: torch.Tensor | None, dtype: torch.dtype, n: int) -> str | None:
    if bias is None or (
        bias.dtype is dtype and bias.shape == (n,) and bias.is_contiguous() and bias.data_ptr() % 16 == 0
    ):
        return None
    return (
        f"bias is {bias.dtype} {list(bias.shape)}, strides {bias.stride()}; "
        f"it must be {dtype} [{n}], contiguous, on 16 bytes"
    )


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
_entries: dict[tuple[Any, ...], launch.Entry | launch.KernelUnavailable] = {}


def compiled(
    kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], warps: int, device: torch.device, dtype: torch.dtype
) -> launch.Entry:  # fmt: skip
    """The entry of a kernel, compiled at the first use of its text on this device; a failure is remembered.

    The text depends on the 8-row tiles of X and not on M: 64 lengths of a prompt are six compilations at most.
    """
    key = (device, dtype, id(kernel), *values.values(), warps)
    known = _entries.get(key)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            raise launch.KernelUnavailable(
                "a CUDA graph is being captured; the kernel compiles outside one", "CAPTURING"
            )
        known = _entries[key] = _compile(kernel, arguments, values, warps)
    if isinstance(known, launch.KernelUnavailable):
        raise known
    return known


def _compile(
    kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], warps: int
) -> launch.Entry | launch.KernelUnavailable:
    try:
        clusters = values.get("CLUSTER", 1)
        result = kernel.warmup(*arguments, **values, grid=(1,), num_warps=warps, num_stages=1, num_ctas=clusters)
        result = result.result() if hasattr(result, "result") else result
        return launch.Entry.of(result, tuple(values.values()))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler, the driver, a read-only cache: theirs to raise, ours to name
        return launch.KernelUnavailable(f"{type(error).__name__}: {error}")


class Kernel:
    """The compiled launches for one size and kind of argument on one device.

    Args:
        outer: columns of the result.
        entry: of the first launch, where it is compiled already.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, layout: Layout, cut: Plan, warps: int, m: int, outer: int,
        bias: bool, entry: launch.Entry | None = None,
    ):  # fmt: skip
        n, k = layout.shape
        blocks = (k // 64, (layout.blocksize // 64).bit_length() - 1, max(0, layout.blocksize2.bit_length() - 1))
        self.grid, self.slices, self.total = cut.programs, cut.slices, m * outer
        self.sizes = (m, n, *blocks, cut.shares, cut.slices)
        self.sum_grid, self.sum_sizes = -(-self.total // SUM_BLOCK), (self.total, outer)
        # what is allocated at every call: at an address that is a multiple of 16, as an empty tensor's 0 is
        out, part = (torch.empty(0, dtype=each, device=device) for each in (dtype, torch.float32))
        values = constants(cut.text, cut.cluster)
        arguments = (out, *operands(layout), out if cut.slices == 1 else part, out, *self.sizes)
        self.entry = entry or compiled(kernels.matmul_4bit_kernel, arguments, values, warps, device, dtype)
        self.sum: launch.Entry | None = None
        if cut.slices > 1:
            values = {"SLICES": cut.slices, "BIAS": bias, "BLOCK": SUM_BLOCK}
            self.sum = compiled(kernels.sum_slices_kernel, (part, out, out, *self.sum_sizes), values, 4, device, dtype)


class Product:
    """The product with one weight of an x of one shape, resolved once: addresses, sizes and kernels as plain integers.

    It keeps no tensor alive and is valid for as long as the layout has the same ``identity``, and the bias its address.
    """

    __slots__ = (
        "call", "device", "dtype", "grid", "head", "pad", "part", "shape", "strides", "sum", "sum_grid", "sum_head",
        "sum_tail", "tail", "tally", "weight",
    )  # fmt: skip

    def __init__(
        self, kernel: Kernel | matmul_wide.Kernel, x: torch.Tensor, layout: Layout, outer: int,
        bias: torch.Tensor | None = None, pad: int = 0,
    ):  # fmt: skip
        self.device, self.dtype, self.pad = x.get_device(), x.dtype, pad
        self.weight = tuple(tensor.data_ptr() for tensor in operands(layout))
        spare = (layout.code if bias is None else bias).data_ptr()  # unread without a bias
        self.grid = kernel.grid
        self.call, self.head, tail, _ = kernel.entry
        self.tail = (spare, *kernel.sizes, *tail)
        result = torch.empty((*x.shape[:-1], outer), dtype=x.dtype, device="meta")
        self.shape, self.strides = tuple(result.shape), result.stride()
        self.sum: Any = None
        if kernel.sum is not None:
            self.part, self.sum_grid = (kernel.slices * kernel.total,), kernel.sum_grid
            self.sum, self.sum_head, tail, _ = kernel.sum
            self.sum_tail = (spare, *kernel.sum_sizes, *tail)
        self.tally: Any = None  # the caller's counter

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The result for an x of the shape, dtype and device it was resolved for, new or in ``out`` (contiguous)."""
        device = self.device
        if launch.current_device() != device:
            with torch.cuda.device(device):
                return self(x, out)
        if out is not None and out.data_ptr() % 16:
            return out.copy_(self(x))
        if self.pad:
            x = F.pad(x, (0, self.pad))
        start = x.data_ptr()
        if start % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
            start = x.data_ptr()
        if out is None:
            out = launch.empty_strided_cuda(self.shape, self.strides, self.dtype)
        stream = launch.current_stream(device)
        if self.sum is None:
            self.call(self.grid, 1, 1, stream, *self.head, start, *self.weight, out.data_ptr(), *self.tail)
            return out
        part = launch.empty_strided_cuda(self.part, (1,), torch.float32)
        self.call(self.grid, 1, 1, stream, *self.head, start, *self.weight, part.data_ptr(), *self.tail)
        self.sum(self.sum_grid, 1, 1, stream, *self.sum_head, part.data_ptr(), out.data_ptr(), *self.sum_tail)
        return out


_kernels: dict[tuple[Any, ...], Kernel | matmul_wide.Kernel] = {}
calibration.dependents.append(_kernels.clear)


def product(
    x: torch.Tensor, layout: Layout, bias: torch.Tensor | None = None, config: Config | matmul_wide.Config | None = None
) -> Product:  # fmt: skip
    """:func:`matmul_4bit` resolved, for every x of this shape."""
    n, k = layout.shape
    m = x.numel() // k
    key = (x.device, x.dtype, layout.nested(), bias is None, m, n, k, layout.blocksize, layout.blocksize2, config)
    kernel = _kernels.get(key)
    if kernel is None:
        capability = torch.cuda.get_device_capability(x.device)
        chosen: Any = config or config_for(capability, m, n, k, device=x.device.index)
        kind = (x.device, x.dtype, layout)
        with torch.cuda.device(x.device):
            if isinstance(chosen, matmul_wide.Config):
                kernel = matmul_wide.checked(chosen, *kind, m, bias is not None, compiled)
            else:
                half = x.dtype is torch.float16
                cut = plan(
                    chosen, multiprocessors(x.device), m, n, k, half, layout.nested(), bias is not None, capability
                )
                kernel = Kernel(*kind, cut, chosen.along_n * chosen.along_k, m, n, bias is not None)
        _kernels[key] = kernel
    return Product(kernel, x, layout, n, bias)


def matmul_4bit(
    x: torch.Tensor,
    layout: Layout,
    bias: torch.Tensor | None = None,
    config: Config | matmul_wide.Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T (+ bias)`` with the weight decoded inside the kernel; fp32 accumulation.

    The weights it multiplies by are, bit for bit, those of dequantize in x's dtype. The same arguments give the same
    bits at every run: sums across warps and slices are taken in a fixed order.

    Args:
        x: [..., K], fp16 or bf16.
        layout: of the weight, shape [N, K], K a multiple of the blocksize; contiguous, the offset in fp32. Its dtype
            is not looked at.
        bias: [N], x's dtype.
        config: instead of the table's; then the caller answers for :func:`refusal`.
        out: filled and returned if given: contiguous, [..., N], x's dtype and device.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: what :func:`refusal` says.
        KernelUnavailable: the kernel is not compiled yet and a CUDA graph is being captured.
    """
    why = refusal(x, layout, bias) if config is None and x.numel() else None
    if why is not None:
        raise ValueError(f"matmul_4bit cannot serve this: {why}; dequantize and multiply")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], layout.shape[0])) if out is None else out
    return product(x, layout, bias, config)(x, out)


def matmul_reference(x: torch.Tensor, layout: Layout, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch: the weight rounded to x's dtype, products and sums in fp32, one rounding at the end."""
    weight = reference.dequantize(layout._replace(dtype=x.dtype, packed=layout.bytes()))
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
