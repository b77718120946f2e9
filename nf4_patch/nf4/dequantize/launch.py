"""The short way from a layout to a running kernel: launch configs, compilation, remembered launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..layout import Layout
from . import ptx, reference

try:
    import triton

    from . import kernels
except ImportError as error:  # no Triton on this machine: every launch is refused with this sentence
    triton = None
    MISSING = f"{type(error).__name__}: {error}"

MINIMUM_CAPABILITY = (7, 5)


class KernelUnavailable(RuntimeError):
    """The kernel cannot serve here; the message says why, ``reason`` in one word of four."""

    def __init__(self, message: str, reason: str = "KERNEL_FAILED"):
        super().__init__(message)
        self.reason = reason  # KERNEL_FAILED (for good), CAPTURING, MISALIGNED or NO_MEMORY (this time)


class Config(NamedTuple):
    """How a program is cut: ``num_warps * 32`` lanes, ``steps`` groups a lane, cache policies of both streams."""

    num_warps: int
    steps: int
    load: str
    store: str


# (lowest capability, fewest elements) a row serves; the last row that does is taken.
# H200, torch 2.11, triton 3.6.0, percent of the same traffic without a decode, 8 warps and 16: 512x2048 98.6 and 96.2,
# 1024x4096 97.9 and 96.7, 4096x4096 95.8 and 98.3, 14336x4096 96.9 and 98.8, 8192x8192 97.7 and 99.6.
# An earlier kernel, 1024x4096, 4096x4096, 4096x14336: 4 warps 92.6, 96.7, 98.0; 1 step 84, 92-95, 92-94;
# evict_first on one stream only 87, 94, 96, on neither 86, 94, 95; the matmul that reads the output is as fast with it.
# sm_75 to sm_89 and sm_100 on are not measured: 4 warps keep the most programs of the smallest GPU (T4) in flight.
CONFIGS: dict[tuple[tuple[int, int], int], Config] = {
    ((7, 5), 0): Config(num_warps=4, steps=2, load="evict_first", store="evict_first"),
    ((8, 0), 0): Config(num_warps=8, steps=2, load="evict_first", store="evict_first"),
    ((9, 0), 2**23): Config(num_warps=16, steps=2, load="evict_first", store="evict_first"),
}
INTERPRETER_CONFIG = Config(num_warps=512, steps=1, load="", store="")  # few large programs: a program is a Python call
PACKED_CONVERT = (8, 0)  # cvt.rn.{f16,bf16}x2.f32

PTX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
TRITON_POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


# Triton's interpreter (TRITON_INTERPRET=1 when the kernels were imported) runs them, on tensors of any device.
INTERPRETED = triton is not None and not isinstance(kernels.dequantize_kernel, triton.runtime.JITFunction)


def config_for(capability: tuple[int, int], numel: int) -> Config:
    rows = [row for row in CONFIGS if row[0] <= capability and row[1] <= numel]
    return CONFIGS[max(rows)]


class Variant(NamedTuple):
    """Everything a compiled kernel depends on."""

    config: Config
    dtype: torch.dtype
    offset_dtype: torch.dtype | None  # None: flat
    blocksize: int
    blocksize2: int
    even: bool
    tail: bool
    wide: bool  # n needs 64 bits
    aligned: bool  # the packed weight starts on 16 bytes, not only on 4

    @classmethod
    def of(cls, layout: Layout, config: Config) -> Variant:
        n = layout.numel()
        return cls(
            config=config,
            dtype=layout.dtype,
            offset_dtype=None if layout.offset is None else layout.offset.dtype,
            blocksize=layout.blocksize,
            blocksize2=layout.blocksize2,
            even=n % elements_of(layout, config) == 0,
            tail=n % 8 != 0,
            wide=n >= 2**31,
            aligned=layout.packed.data_ptr() % 16 == 0,
        )


def group_of(layout: Layout | Variant) -> int:
    """Elements a lane: 16 bytes of output, halved at blocksize 32 so that 16 lanes span two blocks (one in fp32)."""
    return 16 // layout.dtype.itemsize // (2 if layout.blocksize == 32 else 1)


def elements_of(layout: Layout | Variant, config: Config | None = None) -> int:
    """Elements a program."""
    config = config or layout.config  # type: ignore[union-attr]
    return group_of(layout) * 32 * config.num_warps * config.steps


def constants(variant: Variant, capability: tuple[int, int] | None) -> dict[str, Any]:
    """The kernel's constexprs in the order of its signature. No capability: the plain twin."""
    group = group_of(variant)
    name = PTX_TYPES[variant.dtype]
    text = layout_text = ""
    if capability is not None:
        blocks = 2 if 16 * group > variant.blocksize else 1
        text = ptx.decode(name, group, blocks, capability >= PACKED_CONVERT)
        layout_text = ptx.constraints(name, group)
    return {
        "BLOCKSIZE": variant.blocksize,
        "BLOCKSIZE2": variant.blocksize2,
        "GROUP": group,
        "LANES": 32 * variant.config.num_warps,
        "STEPS": variant.config.steps,
        "EVEN": variant.even,
        "TAIL": variant.tail,
        "FLUSH": capability is not None,
        "PTX": text,
        "CONSTRAINTS": layout_text,
        "LOAD": variant.config.load,
        "STORE": variant.config.store,
    }


def signature(variant: Variant) -> dict[str, str]:
    """The types of the kernel's arguments, as Triton writes them, for compilers that have no tensors to look at."""
    offset = TRITON_POINTERS[variant.offset_dtype or torch.float32]
    return {
        "packed": "*u8",
        "absmax": "*fp32" if variant.offset_dtype is None else "*u8",
        "code": "*fp32",
        "absmax2": "*fp32",
        "code2": "*fp32",
        "offset": offset,
        "out": TRITON_POINTERS[variant.dtype],
        "n": "i64" if variant.wide else "i32",
    }


def on_16_bytes(variant: Variant) -> tuple[str, ...]:
    """The arguments that Triton specializes on 16-byte alignment."""
    return ("packed", "out") if variant.aligned else ("out",)


def operands(layout: Layout, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The kernel's tensors in the order of its signature; a flat layout repeats absmax, which is then not read."""
    second = (layout.absmax2, layout.code2, layout.offset) if layout.nested() else (layout.absmax,) * 3
    absmax2, code2, offset = second
    return (layout.bytes(), layout.absmax, layout.code, absmax2, code2, offset, out)  # type: ignore[return-value]


class Entry(NamedTuple):
    """How a compiled kernel is launched from plain integers: ``call(grid, 1, 1, stream, *head, *arguments, *tail)``."""

    call: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    way: str  # for people

    @classmethod
    def of(cls, compiled: Any, values: tuple[Any, ...]) -> Entry:
        """Triton's own ``kernel[grid](...)`` costs 17 us a call (H200 machine, 3.6.0), most of it finding the
        compiled kernel again. ``run`` is what it calls in the end, in every release from 3.2.
        """
        compiled._init_handles()
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        release = tuple(int(part) for part in triton.__version__.split(".")[:2])
        values = values if release >= (3, 3) else ()  # 3.2 passes no constexpr to the launcher
        if release == (3, 6) and run.global_scratch_size == 0 and run.profile_scratch_size == 0:
            flags = run.launch_cooperative_grid, run.launch_pdl
            return cls(run.launch, (function, *flags, None, None, metadata, None, None, None), values, "c entry")
        return cls(run, (function, metadata, None, None, None), values, "launcher")

    def start(self, grid: int, stream: int, *arguments: int) -> None:
        """Launch. Launch and Product write this line out: a Python call less."""
        self.call(grid, 1, 1, stream, *self.head, *arguments, *self.tail)


class Kernel:
    """One compiled variant on one device, trusted only after its bits matched the reference there."""

    def __init__(self, variant: Variant, device: torch.device):
        capability = torch.cuda.get_device_capability(device)
        self.elements = elements_of(variant)
        sample = sample_layout(variant, self.elements, device)
        out = torch.full((sample.numel(),), float("nan"), dtype=variant.dtype, device=device)
        values = constants(variant, capability)
        tensors = operands(sample, out)
        n = 2**31 if variant.wide else sample.numel()
        with torch.cuda.device(device):
            compiled = kernels.dequantize_kernel.warmup(
                *tensors, n, **values, grid=(1,), num_warps=variant.config.num_warps, enable_fp_fusion=False
            )
            self.compiled = compiled.result() if hasattr(compiled, "result") else compiled
            self.entry = Entry.of(self.compiled, tuple(values.values()))
            self.way = self.entry.way
            pointers = [tensor.data_ptr() for tensor in tensors]
            grid = -(-sample.numel() // self.elements)
            self.entry.start(grid, current_stream(device.index), *pointers, sample.numel())
        expected = reference.dequantize(sample)
        if not same_bits(out, expected):
            raise KernelUnavailable(
                f"the kernel's bits differ from the reference on {torch.cuda.get_device_name(device)} "
                f"with Triton {triton.__version__} for {variant}"
            )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, signs of zero included; a NaN equals any NaN."""
    integers = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    a, b = a.reshape(-1), b.reshape(-1)
    return bool(torch.all((a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())))


def sample_layout(variant: Variant, elements: int, device: torch.device) -> Layout:
    """A small layout of this variant with every byte value in it. No random numbers: training must not notice."""
    n = 3 * elements if variant.even else 3 * elements + 8 + (3 if variant.tail else 0)
    blocks = -(-n // variant.blocksize)

    def bytes_of(count: int, stride: int) -> torch.Tensor:
        return (torch.arange(count, device=device) * stride % 256).to(torch.uint8)

    packed = bytes_of(-(-n // 2) + 4, 97)
    packed = packed[: -(-n // 2)] if variant.aligned else packed[4 : 4 + -(-n // 2)]
    code = torch.arange(-8, 8, device=device).float() / 7.3
    absmax = bytes_of(blocks, 59)
    second: tuple[Any, Any, Any] = (None, None, None)
    if variant.offset_dtype is None:
        absmax = absmax.float() / 91
    else:
        code2 = torch.arange(-128, 128, device=device).float() / 127.7
        absmax2 = torch.arange(1, -(-blocks // variant.blocksize2) + 1, device=device).float() / 3.1
        second = (absmax2, code2, torch.full((), 0.37, dtype=variant.offset_dtype, device=device))
    return Layout(packed, absmax, code, *second, variant.blocksize, variant.blocksize2, (n,), variant.dtype)


_kernels: dict[tuple[Variant, torch.device], Kernel | KernelUnavailable] = {}
_lock = threading.Lock()


def kernel_for(variant: Variant, device: torch.device) -> Kernel:
    """The compiled kernel of ``variant`` on ``device``; a failure is remembered and raised again at once."""
    known = _kernels.get((variant, device))
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            raise KernelUnavailable("a CUDA graph is being captured; the kernel compiles outside one", "CAPTURING")
        with _lock:
            known = _kernels.get((variant, device))
            if known is None:
                known = _kernels[variant, device] = _build(variant, device)
    if isinstance(known, KernelUnavailable):
        raise known
    return known


def _build(variant: Variant, device: torch.device) -> Kernel | KernelUnavailable:
    if triton is None:
        return KernelUnavailable(MISSING)
    try:
        return Kernel(variant, device)
    except torch.cuda.OutOfMemoryError:
        raise
    except KernelUnavailable as error:
        return error
    except Exception as error:  # the compiler, the driver, a read-only cache: theirs to raise, ours to name
        return KernelUnavailable(f"{type(error).__name__}: {error}")


def compiled_kernels() -> dict[tuple[Variant, torch.device], Kernel | KernelUnavailable]:
    """What has been compiled or refused so far, by variant and device."""
    return dict(_kernels)


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a tensor whose storage was freed or cut, as sharding and offloading do."""
    end = tensor.storage_offset() + tensor.numel()
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


def identity(
    table: str | int, packed: torch.Tensor, absmax: Any, code: Any, absmax2: Any, code2: Any, offset: Any,
    blocksize: int, blocksize2: int, shape: Sequence[int], dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """Everything a resolved launch depends on, as a key: the same addresses, sizes and types give the same result.

    Args:
        table: what stands for ``code``, which is not read: the quant_type, or the address of the code.
        packed ... dtype: the fields of a Layout, in its order.

    Raises:
        AttributeError: a field is no tensor.
    """
    if absmax2 is None:
        return (
            packed.data_ptr(), packed.shape, packed.dtype, packed.is_contiguous(), absmax.data_ptr(), absmax.numel(),
            blocksize, shape, dtype, table,
        )  # fmt: skip
    return (
        packed.data_ptr(), packed.shape, packed.dtype, packed.is_contiguous(), absmax.data_ptr(), absmax.numel(),
        absmax2.data_ptr(), absmax2.numel(), code2.data_ptr(), offset.data_ptr(), offset.dtype,
        blocksize, blocksize2, shape, dtype, table,
    )  # fmt: skip


current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # absent from builds without CUDA
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _empty_strided(shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# Allocation on the current device without the dispatcher, as Inductor's own code allocates:
# 0.74 us; ``empty_like`` takes 1.14 and ``torch.empty`` 2.2 (H200 machine, torch 2.11).
empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided)


class Launch:
    """The launch of one layout, resolved once: addresses, sizes and kernel as plain integers.

    It keeps no tensor alive and is valid for as long as the layout has the same ``identity``.
    """

    __slots__ = (
        "call", "dense_shape", "device", "dtype", "grid", "head", "n", "shape", "strides", "tail", "tally", "transposed", "view",
    )  # fmt: skip

    def __init__(self, layout: Layout, transposed: bool = False):
        device = layout.packed.device
        tensors = operands(layout, layout.packed)[:6]
        if not all(has_memory(tensor) for tensor in tensors):
            raise KernelUnavailable("a tensor of the weight is larger than its memory", "NO_MEMORY")
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers[0] % 4:
            raise KernelUnavailable(f"the packed weight starts at {pointers[0]:#x}, not on 4 bytes", "MISALIGNED")
        config = config_for(torch.cuda.get_device_capability(device), layout.numel())
        kernel = kernel_for(Variant.of(layout, config), device)
        self.n, self.dtype, self.device = layout.numel(), layout.dtype, device.index
        self.grid = -(-self.n // kernel.elements)
        self.call, head, tail, _ = kernel.entry
        self.head, self.tail = (*head, *pointers), (self.n, *tail)
        self.dense_shape, self.transposed = tuple(layout.shape), transposed
        result = self.transposed_if_asked(torch.empty(self.dense_shape, dtype=layout.dtype, device="meta"))
        self.shape, self.strides = tuple(result.shape), result.stride()
        self.tally: Any = None  # the caller's counter
        self.view: torch.Tensor | None = None  # the result in the shared buffer

    def transposed_if_asked(self, weight: torch.Tensor) -> torch.Tensor:
        """What the caller gets for a dense ``weight``: [K, N] with the strides of a transpose, if asked."""
        return weight.t() if self.transposed else weight

    def new(self) -> torch.Tensor:
        """A new weight."""
        device = self.device
        if current_device() != device:
            with torch.cuda.device(device):
                return self.new()
        out = empty_strided_cuda(self.shape, self.strides, self.dtype)
        self.call(self.grid, 1, 1, current_stream(device), *self.head, out.data_ptr(), *self.tail)
        return out

    def shared(self) -> torch.Tensor:
        """The weight in a buffer that the next such call may overwrite; a new one off the default stream."""
        if current_stream(self.device) != 0:  # 0: the default stream, on which order is given
            return self.new()
        if self.view is None:
            buffer = shared_buffer(self.n, self.dtype, self.device)[: self.n]
            self.view = self.transposed_if_asked(buffer.view(self.dense_shape))
        self.fill(self.view)
        return self.view

    def into(self, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out``: dense, 16-byte aligned, n elements of the launch's dtype on its device."""
        self.fill(out)
        return self.transposed_if_asked(out)

    def fill(self, out: torch.Tensor) -> None:
        device = self.device
        if current_device() != device:
            with torch.cuda.device(device):
                return self.fill(out)
        self.call(self.grid, 1, 1, current_stream(device), *self.head, out.data_ptr(), *self.tail)


_buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def shared_buffer(n: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """The device's buffer of at least n elements.

    It grows in place: every view of it, in whatever launch, then looks at the new memory, and none holds the old.
    """
    buffer = _buffers.get((device, dtype))
    if buffer is None or buffer.numel() < n:
        with torch.inference_mode(False):  # training may write what generation allocated
            if buffer is None:
                buffer = torch.empty(0, dtype=dtype, device=torch.device("cuda", device))
            storage = buffer.untyped_storage()
            before = storage.nbytes()
            storage.resize_(0)  # freed before the larger one is taken
            try:
                storage.resize_(n * dtype.itemsize)
            except torch.cuda.OutOfMemoryError:
                storage.resize_(before)
                raise
            buffer = _buffers[device, dtype] = buffer.new_empty(0).set_(storage, 0, (n,), (1,))
    return buffer


class Memo:
    """Remembered launches by ``identity``. Bounded."""

    def __init__(self, limit: int = 16384):  # a 70B model has 560 weights, each in one or two dtypes
        self.limit = limit
        self.launches: dict[tuple[Any, ...], Launch] = {}

    def remember(self, key: tuple[Any, ...], launch: Launch) -> Launch:
        if len(self.launches) >= self.limit:
            self.launches.clear()
        self.launches[key] = launch
        return launch


_memo = Memo()  # of the op: a compiled graph calls it as often as eager code calls a target


def remembered(layout: Layout) -> Launch | None:
    """The launch of a layout that ``dequantize`` has run before; its shape must be a tuple."""
    return _memo.launches.get(identity(layout.code.data_ptr(), *layout))


def dequantize(layout: Layout, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run the kernel on a layout that passed its guards, ``layout.shape``; out, if given, is filled and returned.

    Any alignment: a weight off 4 bytes or an ``out`` off 16 is copied through an aligned buffer.
    Under Triton's interpreter the tensors may be on any device.
    """
    if INTERPRETED:
        return _interpret(layout, out)
    if layout.packed.data_ptr() % 4:
        layout = layout._replace(packed=layout.packed.clone())
    layout = layout._replace(shape=tuple(layout.shape))
    launch = remembered(layout) or _memo.remember(identity(layout.code.data_ptr(), *layout), Launch(layout))
    if out is not None and out.data_ptr() % 16 == 0:
        return launch.into(out)
    result = launch.new()
    return result if out is None else out.copy_(result)


def _interpret(layout: Layout, out: torch.Tensor | None) -> torch.Tensor:
    variant = Variant.of(layout, INTERPRETER_CONFIG)
    values = constants(variant, None)
    if out is None:
        out = torch.empty(tuple(layout.shape), dtype=layout.dtype, device=layout.packed.device)
    grid = (-(-layout.numel() // elements_of(variant)),)
    kernels.dequantize_kernel[grid](*operands(layout, out.view(-1)), layout.numel(), **values)
    return out
