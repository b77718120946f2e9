"""X[M, K] @ dequantize(weight)[N, K].T for hundreds of rows of X, on Hopper: launch table and launch.

It is for rollouts of 65 to 256 sequences at once on an H100 or H200. The weight is decoded on its way into wgmma, 128 of its
rows at once, for 128 or 256 rows of X (hopper_kernels.py).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from .. import runtime
from ..dequantize import reference
from ..dequantize.compilation import INTERPRETER_WARPS, PTX_TYPES, Variant, sample_weight
from ..runtime import TRITON_RELEASE, KernelEntry, KernelUnavailable, empty_strided_cuda
from ..weight import Weight
from . import byte_permutes
from .byte_permutes import vector
from .tuning import HOPPER_ROWS, MULTIPROCESSORS, HopperConfig

RELEASE: tuple[int, ...] = (0, 0)  # of Triton, if it is one with this Gluon
try:
    if TRITON_RELEASE >= (3, 6):
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from . import hopper_kernels as kernels

        RELEASE = TRITON_RELEASE
except Exception:  # what another release makes of an experimental interface
    pass

RELEASES = ((3, 6), (3, 7))  # of Triton, where it ran
BLOCK_N, BLOCK_K, MIN_STEPS = 128, 64, 4  # as in hopper_kernels; the fewest steps that are worth a CTA
FLAGS, SCALE_STEPS = 1024, 16  # as in hopper_kernels


def config_for(
    capability: tuple[int, int], m: int, n: int, k: int, processors: int = MULTIPROCESSORS
) -> HopperConfig | None:
    """The measured config for ``m`` rows of X and an [n, k] weight on so many multiprocessors; None where none is."""
    if RELEASE not in RELEASES or n % 8 or k % BLOCK_K:  # TMA writes rows of whole 16 bytes; a step of K has one scale
        return None
    for row in HOPPER_ROWS:
        fits = row.capability == capability and row.min_m <= m <= row.max_m and n * k >= row.min_elements
        if fits and HopperPlan.of(row.config, processors, m, n, k).fill(processors) >= row.min_fill:
            return row.config
    return None


def decode_ptx(dtype: str) -> str:
    """PTX of one thread: 8 words of a row, their scale and the codes' address -> 32 registers of two weights in ``dtype``.

    $0 to $31: register r of word w is $(8 * r + w); $32 to $39: the words; $40 to $47: their scale, eight times; $48: the
    address.
    """
    lines = ["{", byte_permutes.REGISTERS]
    lines += [f"ld.global.nc.v4.f32 {vector('code', i, 4)}, [$48 + {4 * i}];" for i in range(0, 16, 4)]
    lines += byte_permutes.round_codes("$40", "mul.rn.ftz.f32", dtype)
    for word in range(8):
        lines += byte_permutes.decode_word(f"${32 + word}", [f"${8 * r + word}" for r in range(4)])
    return "\n".join([*lines, "}"])


class HopperPlan(NamedTuple):
    """How the tiles are distributed: several whole ones per CTA, or each in ``split_k`` chunks, one per CTA."""

    ctas: int
    tiles: int  # of block_m x BLOCK_N
    tiles_m: int  # of them along M
    split_k: int

    @classmethod
    def of(cls, config: HopperConfig, processors: int, m: int, n: int, k: int) -> HopperPlan:
        """For x [m, k] by a weight [n, k] on a GPU of ``processors`` multiprocessors, one CTA on each."""
        tiles_m = -(-m // config.block_m)
        tiles = tiles_m * -(-n // BLOCK_N)
        split_k = max(1, min(processors // tiles, -(-k // BLOCK_K) // MIN_STEPS))
        ctas = tiles * split_k if split_k > 1 else -(-tiles // -(-tiles // processors))
        return cls(ctas, tiles, tiles_m, split_k)

    def fill(self, processors: int) -> float:
        """The fraction of the multiprocessors' time that is work, if every chunk takes as long."""
        return self.tiles * self.split_k / (processors * -(-self.tiles * self.split_k // self.ctas))


@functools.cache
def boxes(block_m: int, dtype: torch.dtype) -> tuple[tuple[list[int], Any, torch.dtype], ...]:
    """Box, layout in shared memory and dtype of x, packed, scales and out."""
    swizzled = (
        ([block_m, BLOCK_K], 128, dtype),
        ([BLOCK_N, BLOCK_K // 8], 32, torch.int32),
        ([BLOCK_N], 0, torch.float32),
        ([64, BLOCK_N], 128, dtype),
    )
    return tuple(
        (box, gl.NVMMASharedLayout(swizzle, 8 * kind.itemsize, rank=len(box)), kind) for box, swizzle, kind in swizzled
    )


class Address:
    """What Triton's launcher asks of a TensorDescriptor, for an address."""

    __slots__ = ("address", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, address: int, shape: tuple[int, ...]):
        self.address, self.shape = address, shape
        self.strides = (1,) if len(shape) == 1 else (shape[1], 1)

    base = property(lambda self: self)

    def data_ptr(self) -> int:
        return self.address


class HopperKernel:
    """The launches for one size and kind of argument on one device: the scales, then the matmul.

    As small_m.SmallMKernel, and with its arguments: ``entry`` takes the addresses of x, the weight's operands, the result
    and the bias. Scratch, fp32, is allocated by every call: scales (scales_kernel's), sums [ctas, block_m, BLOCK_N] where
    K is split, and FLAGS flags.
    """

    sum = None  # the tiles' chunks are added up inside the matmul

    def __init__(
        self, config: HopperConfig, device: torch.device, dtype: torch.dtype, weight: Weight, m: int, bias: bool
    ):
        n, k = weight.shape
        cut = HopperPlan.of(config, runtime.multiprocessors(device), m, n, k)
        steps = k // BLOCK_K
        self.scale_count = -(-steps * n // 32) * 32  # what follows starts on 128 bytes
        self.grid, self.sizes = cut.ctas, ()
        self.entry = KernelEntry(self.start, (), (), "two launches")
        self.shapes = (m, k), (n, k // 8), (steps * n,), (m, n)  # of x, packed, scales and out
        shift = (weight.blocksize // BLOCK_K).bit_length() - 1
        self.sum_count = cut.ctas * config.block_m * BLOCK_N if cut.split_k > 1 else 0
        self.scale_grid = -(-n // BLOCK_N) * -(-steps // SCALE_STEPS)
        self.scale_sizes = (n, steps, shift, max(0, weight.blocksize2.bit_length() - 1))
        self.matmul_sizes = (n, steps, cut.tiles_m, cut.tiles * cut.split_k, cut.split_k)
        self.scales, self.matmul = compiled(config, device, dtype, weight.offset_dtype(), bias)

    def start(self, grid, _y, _z, stream, x, packed, absmax, code, absmax2, code2, offset, out, bias) -> None:
        # its own at every call: the caching allocator keeps the streams apart
        scratch = empty_strided_cuda((self.scale_count + self.sum_count + FLAGS,), (1,), torch.float32)
        scales = scratch.data_ptr()
        sums = scales + 4 * self.scale_count
        flags = sums + 4 * self.sum_count
        self.scales.start(self.scale_grid, stream, absmax, absmax2, code2, offset, scales, flags, *self.scale_sizes)
        described = map(Address, (x, packed, scales, out), self.shapes)
        self.matmul.start(grid, stream, *described, sums, flags, code, bias, *self.matmul_sizes)


def compiled(
    config: HopperConfig, device: torch.device, dtype: torch.dtype, offset: torch.dtype | None, bias: bool
) -> tuple[KernelEntry, KernelEntry]:
    """The entries of scales_kernel and hopper_kernel, compiled for arguments of these types."""
    kinds = (dtype, torch.float32, torch.int32, torch.uint8)
    some = {kind: torch.empty(64 * 128, dtype=kind, device=device) for kind in kinds}
    floats, flags = some[torch.float32], some[torch.int32]
    described = (
        TensorDescriptor.from_tensor(some[kind].view(-1, *box[1:]), box, layout)
        for box, layout, kind in boxes(config.block_m, dtype)
    )
    absmax, added = (some[torch.uint8], torch.empty(1, dtype=offset, device=device)) if offset else (floats, floats)
    of_scales = (absmax, floats, floats, added, floats, flags, 64, 64, 0, 8)
    scales = runtime.compiled(kernels.scales_kernel, of_scales, {"FLAT": offset is None}, 4, device, dtype, offset)
    of_matmul = (*described, floats, flags, floats, some[dtype], 64, 64, 1, 1, 1)
    values: Any = {"BLOCK_M": config.block_m, "STAGES": config.stages, "DECODED": config.decoded, "BIAS": bias}
    values["PTX"] = decode_ptx(PTX_TYPES[dtype])
    return scales, runtime.compiled(kernels.hopper_kernel, of_matmul, values, 4, device, dtype)


_checked: dict[tuple[Any, ...], bool | KernelUnavailable] = {}


def checked(
    config: HopperConfig, device: torch.device, dtype: torch.dtype, weight: Weight, m: int, bias: bool
) -> HopperKernel:
    """A HopperKernel, trusted only after rows of X with a single 1 came back as the weight's bits on this device, five times.

    Raises:
        KernelUnavailable: they did not, now or before, or it cannot be compiled; or a CUDA graph is being captured.
    """
    key = (config, device, dtype, weight.offset_dtype(), bias)
    runtime.built_once(_checked, key, lambda: check(*key))
    return HopperKernel(config, device, dtype, weight, m, bias)


def check(
    config: HopperConfig, device: torch.device, dtype: torch.dtype, offset: torch.dtype | None, bias: bool
) -> bool:
    """What ``checked`` asks for; it returns True or raises KernelUnavailable."""
    m, n, k = config.block_m + 3, 2 * BLOCK_N + 8, 1024
    variant = Variant(INTERPRETER_WARPS, dtype, offset, BLOCK_K, 256 if offset else 0)
    weight = sample_weight(variant, n * k // 3, device)._replace(shape=(n, k))
    kernel = HopperKernel(config, device, dtype, weight, m, bias)
    columns = torch.arange(m, device=device) * 37 % k
    x = torch.zeros(m, k, dtype=dtype, device=device)
    x[torch.arange(m, device=device), columns] = 1
    added = (torch.arange(n, device=device) / 7).to(dtype) if bias else torch.zeros(n, dtype=dtype, device=device)
    want = (reference.dequantize(weight)[:, columns].t().float() + added.float()).to(dtype)
    for _ in range(5):
        out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
        pointers = [tensor.data_ptr() for tensor in (x, *weight.operands(), out, added)]
        kernel.entry.start(kernel.grid, runtime.current_stream(device.index), *pointers)
        if not torch.equal(out, want):
            raise KernelUnavailable(
                f"the fused matmul's bits differ from the reference on {torch.cuda.get_device_name(device)} "
                f"with Triton {runtime.triton.__version__} for {config}"
            )
    return True
