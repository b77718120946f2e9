"""What every launch needs: the device, the entry of a compiled kernel, the stream and the allocator."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

MISSING = ""
try:
    import triton
except ImportError as error:  # every launch then fails with this sentence
    triton = None
    MISSING = f"{type(error).__name__}: {error}"
TRITON_RELEASE = tuple(map(int, triton.__version__.split(".")[:2])) if triton is not None else (0, 0)


class KernelUnavailable(RuntimeError):
    """The kernel cannot run here; the message says why, ``reason`` names the Reason."""

    def __init__(self, message: str, reason: str = "KERNEL_FAILED"):
        super().__init__(message)
        self.reason = reason  # KERNEL_FAILED (for good), or GRAPH_CAPTURE, MISALIGNED, NO_STORAGE (this time)


class KernelEntry(NamedTuple):
    """How a compiled kernel is launched from plain integers: ``call(grid, 1, 1, stream, *head, *arguments, *tail)``."""

    call: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    launch_path: str  # for people: "c entry" or "launcher"

    @classmethod
    def of(cls, compiled: Any, values: tuple[Any, ...]) -> KernelEntry:
        """Triton's own ``kernel[grid](...)`` costs 17 us per call (H200 machine, 3.6.0), most of it finding the
        compiled kernel again. ``run`` is what it calls in the end, in every release from 3.2.
        """
        compiled._init_handles()
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        values = values if TRITON_RELEASE >= (3, 3) else ()  # 3.2 passes no constexpr to the launcher
        if TRITON_RELEASE == (3, 6) and run.global_scratch_size == 0 and run.profile_scratch_size == 0:
            flags = run.launch_cooperative_grid, run.launch_pdl
            return cls(run.launch, (function, *flags, None, None, metadata, None, None, None), values, "c entry")
        return cls(run, (function, metadata, None, None, None), values, "launcher")

    def start(self, grid: int, stream: int, *arguments: Any) -> None:
        """Launch. Launch and MatmulLaunch write this line out: one Python call less."""
        self.call(grid, 1, 1, stream, *self.head, *arguments, *self.tail)


# The device: all that is asked of PyTorch about it. Tests on a CPU exchange these, and ``compile_kernel``, before another module
# takes them from here (tests/support/quick_interpreter.py).
DEVICE = "cuda"  # the type of what the kernels run on
WORD = 4  # it reads a packed weight that starts at a multiple of so many bytes
on_device: Any = torch.cuda.device
capability_of: Callable[[Any], tuple[int, int]] = torch.cuda.get_device_capability
name_of: Callable[[Any], str] = torch.cuda.get_device_name
is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # absent from builds without CUDA
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Allocation on the current device without the dispatcher, as Inductor's own code allocates:
# 0.74 us; ``empty_like`` takes 1.14 and ``torch.empty`` 2.2 (H200 machine, torch 2.11).
empty_strided_cuda: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


def multiprocessors(device: int | torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether a kernel can run where the tensor is. Written to be traced."""
    return tensor.device.type == DEVICE


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a tensor whose storage was freed or cut, as sharding and offloading do."""
    end = tensor.storage_offset() + tensor.numel()
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


Span = tuple[int, int]


def span(tensor: torch.Tensor) -> Span:
    """The addresses of a tensor's first byte and of the byte after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def spans(*tensors: torch.Tensor) -> tuple[Span, ...]:
    """Where they lie in memory."""
    return tuple(dict.fromkeys(map(span, tensors)))


def overlap(read: Iterable[Span], start: int, end: int) -> bool:
    """Whether what is written to [start, end) overwrites some of what is read."""
    for first, last in read:  # noqa: SIM110 (any() of a generator takes three times as long)
        if first < end and start < last:
            return True
    return False


def fits(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> bool:
    """Whether a result of this shape, dtype and device index can be written to ``out``: dense, with no gradient."""
    return (
        isinstance(out, torch.Tensor)
        and out.shape == shape
        and out.dtype is dtype
        and out.get_device() == device
        and out.is_contiguous()
        and not out.requires_grad
    )


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """For each element, flat: equal to the bit, signs of zero included; a NaN equals any NaN."""
    integers = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    a, b = a.reshape(-1), b.reshape(-1)
    return (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(equal_bits(a, b).all())


@functools.cache
def driver_version() -> int:
    """The newest CUDA that the driver runs, 1000 * major + 10 * minor; 0: there is none."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def is_out_of_memory(error: BaseException) -> bool:
    """Triton raises a plain RuntimeError where the driver has no memory to load or launch a kernel."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


_building = threading.RLock()


def built_once(known: dict[Any, Any], key: Any, build: Callable[[], Any]) -> Any:
    """``known[key]``, built at its first use; a failure is remembered and raised again at once.

    Raises:
        KernelUnavailable: it cannot be built; or a CUDA graph is being captured, which is not remembered.
        torch.cuda.OutOfMemoryError, MemoryError: not remembered either.
    """
    if key not in known:
        if is_capturing():
            raise KernelUnavailable("a CUDA graph is being captured; the kernel compiles outside one", "GRAPH_CAPTURE")
        with _building:
            if key not in known:
                try:
                    known[key] = build()
                except (torch.cuda.OutOfMemoryError, MemoryError):
                    raise
                except KernelUnavailable as error:
                    known[key] = error.with_traceback(None)
                except Exception as error:  # of the compiler, the driver or a read-only cache
                    if is_out_of_memory(error):
                        raise torch.cuda.OutOfMemoryError(str(error)) from error
                    known[key] = KernelUnavailable(f"{type(error).__name__}: {error}")
    found = known[key]
    if isinstance(found, KernelUnavailable):
        # a new one: the same error raised twice would keep the frames of both, and their weights
        raise KernelUnavailable(str(found), found.reason)
    return found


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], **options: Any) -> Any:
    """Triton's CompiledKernel for arguments of these types and these constexprs; nothing is launched.

    Raises:
        KernelUnavailable: TRITON_INTERPRET is set, and Triton compiles nothing.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise KernelUnavailable("TRITON_INTERPRET is set, so that Triton compiles no kernel: unset it and start again")
    result = kernel.warmup(*arguments, **values, grid=(1,), **options)
    return result.result() if hasattr(result, "result") else result


_entries: dict[tuple[Any, ...], KernelEntry | KernelUnavailable] = {}


def compiled(
    kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], warps: int, *kind: Any,
    options: dict[str, Any] | None = None,
) -> KernelEntry:  # fmt: skip
    """The entry of a kernel, compiled at the first use of these constexprs with this device and dtype (``kind``);
    see :func:`built_once`.

    Args:
        options: of Triton's compiler. ``launch_pdl``: it starts while the kernel before it ends, whose results it waits for
            itself (Triton >= 3.6, sm_90).
    """
    options = options or {}

    def build() -> KernelEntry:
        result = compile_kernel(kernel, arguments, values, num_warps=warps, **{"num_stages": 1, **options})
        return KernelEntry.of(result, tuple(values.values()))

    return built_once(_entries, (*kind, id(kernel), *values.values(), warps, *options.items()), build)
