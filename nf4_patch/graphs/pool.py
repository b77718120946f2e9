"""Memory and streams that all captures on a GPU share.

The module also contains the context managers that protect the state of the process during a capture.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..nf4.runtime import is_out_of_memory
from ..patching.reasons import Reason
from .arguments import Slot

MARGIN_PART = 1 / 32  # the part of the GPU's memory that graphs leave free, because free memory is fragmented
SYNCHRONIZES = "called a synchronizing CUDA operation"  # PyTorch's warning in sync debug mode contains this text


class Refusal(Exception):
    """Says that a layer cannot be captured. ``reason`` is the Reason, ``detail`` is what was found in the layer."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class PoolMemory:
    """The address and the size of a tensor's memory, as ``__cuda_array_interface__``.

    PyTorch can make a second tensor from this object. The second tensor uses the memory, but does not own it.
    """

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": (tensor.untyped_storage().nbytes(),), "typestr": "|u1", "version": 3, "strides": None,
            "data": (tensor.untyped_storage().data_ptr(), False),
        }  # fmt: skip


def unowned(tensor: Tensor) -> Tensor:
    """Return an alias of ``tensor`` that does not keep the memory of ``tensor`` allocated.

    So the graphs of other layers can reuse this memory.
    """
    storage = torch.as_tensor(PoolMemory(tensor), device=tensor.device).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which all captures on this GPU run.

    The captures share one stream, because cuBLAS allocates a workspace for each stream (32 MiB on Hopper).
    """
    return torch.cuda.Stream(device)


class Pool:
    """The memory, the capture stream and the replay stream that all graphs of one GPU share."""

    def __init__(self, device: int):
        self.device = device
        self.lock = threading.RLock()  # a replay holds it from the copy of its inputs to the copy of its results
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()  # the static buffers of all live graphs
        self.replay_stream = torch.cuda.current_stream(device).cuda_stream
        self.broken = False  # True after a capture failed
        self.taken = 0  # bytes that PyTorch has reserved for the pool
        self.longest = 0  # most elements of a layer's input for which there are graphs
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = capture_stream(device)
        self.generator = torch.cuda.default_generators[device]
        self.keeper = torch.cuda.CUDAGraph()  # an empty graph that keeps the pool alive while no layer is captured
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            # capture_begin allocates the generator's state. If this allocation fails, PyTorch 2.11 aborts the process.
            # This tensor is allocated first, so that a lack of memory raises an OutOfMemoryError instead.
            something = torch.empty(2**10, device=device)
            with self.capturing(self.keeper):
                something.zero_()

    @contextlib.contextmanager
    def leaving_enough(self) -> Iterator[None]:
        """Capture inside the ``with`` block, and check that the GPU still has enough memory for the rest of a step.

        The rest of a step needs at most as much memory as whole steps without graphs needed at their peak.

        Raises:
            torch.cuda.OutOfMemoryError: there would be too little memory.
        """
        before = torch.cuda.memory_reserved(self.device)
        yield
        reserved = torch.cuda.memory_reserved(self.device)
        self.taken += reserved - before
        free, total = torch.cuda.mem_get_info(self.device)
        peak, limit = torch.cuda.max_memory_allocated(self.device), free + reserved - int(MARGIN_PART * total)
        if self.taken + peak > limit:
            gib = [f"{size / 2**30:.2f} GiB" for size in (self.taken, peak, limit)]
            raise torch.cuda.OutOfMemoryError("CUDA graphs take {}, the rest of a step up to {}, of {}".format(*gib))

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record the GPU work that the ``with`` block launches on the current stream as the CUDA graph ``graph``."""
        with own_casts():
            graph.capture_begin(self.handle, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                # capture_end raises an error that only says that the capture is invalid. The original error says why.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()

    def repair(self) -> None:
        """Repair PyTorch's state after a failed capture, and mark the pool as broken.

        After the failure, PyTorch still allocates from the pool, and PyTorch's random generator is still in capture
        mode. The repair ends these allocations and gives the generator a new state. Earlier graphs read the generator's
        old state, so the caller has to drop all graphs.
        """
        self.broken = True
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
        self.generator.graphsafe_set_state(self.generator.clone_state())

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Inside the ``with`` block, allocate this thread's tensors from the pool. Before PyTorch 2.8, do nothing."""
        begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)  # PyTorch >= 2.8
        if begin is None:
            yield
            return
        begin(self.device, self.handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
            torch._C._cuda_releasePool(self.device, self.handle)


@contextlib.contextmanager
def own_casts() -> Iterator[None]:
    """Keep the weights that autocast casts inside the ``with`` block apart from those that it casts outside.

    Autocast keeps a cast weight until the end of its outermost context. A graph would read this weight even later.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def repaired(pool: Pool) -> Iterator[None]:
    """If the ``with`` block raises an error, repair the pool and raise an error that the caller understands.

    Raises:
        Refusal: the capture failed, so the layer cannot be captured.
        torch.cuda.OutOfMemoryError: the GPU has no memory for the graphs.
    """
    try:
        yield
    except RuntimeError as error:
        pool.repair()
        if is_out_of_memory(error):
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        raise Refusal(Reason.GRAPH_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]) from None
    except BaseException:
        pool.repair()
        raise


def requested(device: int) -> int:
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


@contextlib.contextmanager
def quiet_garbage() -> Iterator[None]:
    """Disable garbage collection inside the ``with`` block.

    A collection in the middle of a capture could destroy another graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def synchronizations() -> Iterator[list[str]]:
    """Yield a list. When the ``with`` block ends, the list gets the source lines that synchronized with the GPU.

    Such lines cannot be captured.
    """
    before, found = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # "error" would also hit other threads that synchronize now
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [f"{w.filename}:{w.lineno}" for w in caught if SYNCHRONIZES in str(w.message)]


@contextlib.contextmanager
def host_generators() -> Iterator[Callable[[], bool]]:
    """Restore the random generators of the host after the ``with`` block: Python's, NumPy's and PyTorch's for the CPU.

    Yield a function that returns whether one of these generators was used inside the block.
    """
    numpy: Any = sys.modules.get("numpy.random")

    def states() -> list[Any]:
        return [random.getstate(), bytes(torch.get_rng_state().tolist()), numpy and repr(numpy.get_state(legacy=False))]

    before = states()
    of_python, of_torch, of_numpy = random.getstate(), torch.get_rng_state(), numpy and numpy.get_state()
    try:
        yield lambda: states() != before
    finally:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if numpy:
            numpy.set_state(of_numpy)
