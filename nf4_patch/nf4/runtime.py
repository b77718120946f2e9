"""Functions that all kernels use: device queries, compilation, launches and allocation."""

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
except ImportError as error:  # Without Triton, every launch raises an error with the message in MISSING.
    triton = None
    MISSING = f"{type(error).__name__}: {error}"
TRITON_RELEASE = tuple(map(int, triton.__version__.split(".")[:2])) if triton is not None else (0, 0)


class KernelUnavailable(RuntimeError):
    """The kernel cannot run on this input or machine. ``reason`` names the member of ``Reason`` that is counted."""

    def __init__(self, message: str, reason: str = "KERNEL_FAILED"):
        super().__init__(message)
        # KERNEL_FAILED is permanent. After GRAPH_CAPTURE, MISALIGNED or NO_STORAGE a later call may succeed.
        self.reason = reason


class KernelEntry(NamedTuple):
    """Launcher of a compiled kernel: ``call(x, y, z, stream, *head, *arguments, *tail)``, where (x, y, z) is the grid.

    ``arguments`` are addresses and numbers. ``head`` and ``tail`` are the same in every launch.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    # "launcher": ``call`` is Triton's launcher. "c entry": ``call`` is the C function that the launcher would call.
    # ``nf4-patch doctor -v`` shows this value.
    launch_path: str

    @classmethod
    def of(cls, compiled: Any, values: tuple[Any, ...]) -> KernelEntry:
        """Build the entry from a compiled kernel and its constexpr values. It calls the kernel's launcher directly.

        Triton's ``kernel[grid](...)`` looks up the kernel first, for most of the 17 us of a call (H200 machine, Triton
        3.6.0).
        """
        compiled._init_handles()
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        values = values if TRITON_RELEASE >= (3, 3) else ()  # the launcher of Triton 3.2 accepts no constexprs
        if TRITON_RELEASE == (3, 6) and run.global_scratch_size == 0 and run.profile_scratch_size == 0:
            flags = run.launch_cooperative_grid, run.launch_pdl
            return cls(run.launch, (function, *flags, None, None, metadata, None, None, None), values, "c entry")
        return cls(run, (function, metadata, None, None, None), values, "launcher")

    def start(self, grid: tuple[int, int, int], stream: int, arguments: Iterable[Any]) -> None:
        """Launch. ``Launch`` and ``MatmulLaunch`` repeat this body, to save a call."""
        self.call(*grid, stream, *self.head, *arguments, *self.tail)


# All device queries use the names below, so that tests can run on the CPU. tests/support/quick_interpreter.py replaces
# these names and ``compile_kernel`` before other modules import them.
DEVICE = "cuda"  # the device type that the kernels run on
WORD = 4  # The address of the packed bytes must be a multiple of this number.
on_device: Any = torch.cuda.device
capability_of: Callable[[Any], tuple[int, int]] = torch.cuda.get_device_capability
name_of: Callable[[Any], str] = torch.cuda.get_device_name
is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # absent from builds without CUDA
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# empty_strided_cuda bypasses PyTorch's dispatcher and allocates on the current device. Inductor's generated code uses
# it too. A call takes 0.74 us; ``empty_like`` takes 1.14 us and ``torch.empty`` 2.2 us (H200 machine, torch 2.11).
empty_strided_cuda: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

memory_allocated: Callable[[int], int] = torch.cuda.memory_allocated
memory_reserved: Callable[[int], int] = torch.cuda.memory_reserved
mem_get_info: Callable[[int], tuple[int, int]] = torch.cuda.mem_get_info
empty_cache: Callable[[], None] = torch.cuda.empty_cache
# The value that set_per_process_memory_fraction set. PyTorch before 2.8 cannot return it, so 1 is assumed there.
memory_fraction: Callable[[int], float] = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)


def devices_in_use() -> list[int]:
    return [device for device in range(torch.cuda.device_count()) if memory_reserved(device)]


def allocation_retries(device: int) -> int:
    """Return how many allocations first made PyTorch free its unused memory."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new contiguous tensor of two or three dimensions.

    The allocation bypasses the dispatcher. Otherwise selective checkpointing could return this tensor again in the
    recompute, and a kernel would overwrite it.
    """
    device = like.get_device()
    if current_device() != device:
        with on_device(device):
            return empty(like, *shape, dtype=dtype)
    strides = (shape[-2] * shape[-1], shape[-1], 1)[-len(shape) :]
    result: torch.Tensor = empty_strided_cuda(shape, strides, dtype or like.dtype)
    return result


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy unless it is contiguous and 16-byte aligned."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def multiprocessors(device: int | torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def runs_on(tensor: torch.Tensor) -> bool:
    """Return whether the kernels run on the tensor's device. Dynamo can trace this function."""
    return tensor.device.type == DEVICE


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage holds all elements. Sharding and offloading shrink storages."""
    end = tensor.storage_offset() + tensor.numel()
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


Span = tuple[int, int]  # the address of a tensor's first byte, and the address after its last byte


def span(tensor: torch.Tensor) -> Span:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def spans(*tensors: torch.Tensor) -> tuple[Span, ...]:
    """Return the address ranges without duplicates."""
    return tuple(dict.fromkeys(map(span, tensors)))


def overlap(read: Iterable[Span], start: int, end: int) -> bool:
    """Return whether [start, end) overlaps one of the address ranges."""
    for first, last in read:  # noqa: SIM110 (any() of a generator takes three times as long)
        if first < end and start < last:
            return True
    return False


def fits(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> bool:
    """Return whether ``out`` has this shape, dtype and device index, is contiguous, and requires no gradient."""
    return (
        isinstance(out, torch.Tensor)
        and out.shape == shape
        and out.dtype is dtype
        and out.get_device() == device
        and out.is_contiguous()
        and not out.requires_grad
    )


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a flat bool tensor that is True where the bits are equal.

    Zeros of different sign differ. Any two NaNs are equal.
    """
    integers = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    a, b = a.reshape(-1), b.reshape(-1)
    return (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(equal_bits(a, b).all())


@functools.cache
def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, as 1000 * major + 10 * minor, or 0 without a driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, for which Triton raises a plain RuntimeError."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


_building = threading.RLock()


def built_once(built: dict[Any, Any], key: Any, build: Callable[[], Any]) -> Any:
    """Return ``built[key]``, which is the result of ``build`` at the first use.

    If ``build`` fails, store the error and raise it again at every later use. If memory runs out, or a CUDA graph is being
    captured, store nothing, because a later call might succeed.

    Raises:
        KernelUnavailable: ``build`` failed, or a CUDA graph is being captured.
        torch.cuda.OutOfMemoryError, MemoryError: memory ran out.
    """
    if key not in built:
        if is_capturing():
            raise KernelUnavailable("the kernel cannot compile while a CUDA graph is being captured", "GRAPH_CAPTURE")
        with _building:
            if key not in built:
                try:
                    built[key] = build()
                except (torch.cuda.OutOfMemoryError, MemoryError):
                    raise
                except KernelUnavailable as error:
                    built[key] = error.with_traceback(None)
                except Exception as error:  # The compiler, the driver or a read-only cache folder can raise anything.
                    if is_out_of_memory(error):
                        raise torch.cuda.OutOfMemoryError(str(error)) from error
                    built[key] = KernelUnavailable(f"{type(error).__name__}: {error}")
    found = built[key]
    if isinstance(found, KernelUnavailable):
        # Do not raise ``found`` itself, because its traceback would keep the frames of every call, and their weights, alive.
        raise KernelUnavailable(str(found), found.reason)
    return found


def is_interpreted(kernel: Any) -> bool:
    """Return whether TRITON_INTERPRET was set when the kernel was defined."""
    return not isinstance(kernel, triton.runtime.JITFunction)


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], **options: Any) -> Any:
    """Compile a kernel for the types of ``arguments`` and the constexprs ``values``. Return Triton's CompiledKernel.

    Raises:
        KernelUnavailable: TRITON_INTERPRET is set, so Triton compiles nothing.
    """
    if is_interpreted(kernel):
        raise KernelUnavailable("TRITON_INTERPRET is set, so Triton compiles no kernel. Unset it and start again")
    result = kernel.warmup(*arguments, **values, grid=(1,), **options)
    return result.result() if hasattr(result, "result") else result


_entries: dict[tuple[Any, ...], KernelEntry | KernelUnavailable] = {}


def compiled(kernel: Any, arguments: Iterable[Any], values: dict[str, Any], *kind: Any, **options: Any) -> KernelEntry:
    """Return a kernel's KernelEntry, compiled at the first use of these constexprs and this ``kind`` (see :func:`built_once`).

    Args:
        arguments: samples, whose types must be the same for the same ``kind``.
        values: the constexprs by name, in the order of the signature.
        kind: whatever else the code depends on: the device, dtypes, which sizes are multiples of 16.
        options: options of Triton's compiler. With ``launch_pdl`` (Triton >= 3.6, sm_90), the kernel may start before the
            previous kernel ends, and must wait for its results.
    """

    def build() -> KernelEntry:
        # Triton would compile an integer argument 1 as a constexpr. With a 2 instead, the kernel works for all integers.
        sample = tuple(2 if type(value) is int and value == 1 else value for value in arguments)
        result = compile_kernel(kernel, sample, values, **{"num_stages": 1, **options})
        return KernelEntry.of(result, tuple(values.values()))

    return built_once(_entries, (*kind, id(kernel), *values.values(), *options.items()), build)


def launch(
    kernel: Any, grid: tuple[int, int, int] | None, arguments: tuple[Any, ...], values: dict[str, Any], *kind: Any,
    **options: Any,
) -> None:  # fmt: skip
    """Launch a kernel on the current stream, or only compile it if ``grid`` is None. See ``compiled``.

    ``arguments`` are contiguous, 16-byte aligned tensors, and numbers. The kernel runs on the device of the first.

    Raises:
        KernelUnavailable: the kernel cannot be compiled, or is not compiled yet while a CUDA graph is being captured.
    """
    device = arguments[0].get_device()
    if current_device() != device:
        with on_device(device):
            return launch(kernel, grid, arguments, values, *kind, **options)
    entry = compiled(kernel, arguments, values, device, *kind, **options)
    if grid is not None:
        plain = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        entry.start(grid, current_stream(device), plain)
