"""Record GPU work as CUDA graphs. The other modules of this folder use graphs only through ``Recorder``.

In tests without a GPU, classes in tests/support/recorders.py stand in for ``Recorder``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..memory.spare import MemoryInfo, spare
from ..nf4 import runtime
from ..nf4.runtime import is_out_of_memory
from ..patching.reasons import Reason
from .arguments import Slot
from .refusal import Refusal

SYNCHRONIZES = "called a synchronizing CUDA operation"  # PyTorch's warning in sync debug mode begins with this text
Result = TypeVar("Result")


class Recording(Protocol):
    """Work that ``Recorder.record`` recorded."""

    def replay(self) -> None:
        """Repeat the work on the current stream. The results lie in the same memory as those of the recorded work."""

    def reset(self) -> None:
        """Free the recording."""


class PoolMemory:
    """The address and the size of a tensor's memory, as ``__cuda_array_interface__``.

    PyTorch can make a second tensor from this object. The second tensor uses the memory, but does not own it.
    """

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": (tensor.untyped_storage().nbytes(),), "typestr": "|u1", "version": 3, "strides": None,
            "data": (tensor.untyped_storage().data_ptr(), False),
        }  # fmt: skip


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which all captures on this GPU run.

    The captures share one stream, because cuBLAS allocates a workspace for each stream (32 MiB on Hopper).
    """
    return torch.cuda.Stream(device)


class Recorder:
    """A memory pool for graphs on one GPU, with the streams and the random generator that these graphs use."""

    # the highest peak of allocated memory so far, and the most bytes that a step needed beside this pool
    peak = rest = 0

    def __init__(self, device: int):
        self.device = device
        self.lock = threading.RLock()  # a replay holds it from the copy of its inputs to the copy of its results
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()  # the static buffers of all live graphs
        self.replay_stream = runtime.current_stream(device)
        self.broken = False  # True after a capture failed
        self.taken = 0  # bytes that PyTorch has reserved for the pool
        self.begun: int | None = None  # bytes that PyTorch had reserved when ``leaving_enough`` began
        self.longest = 0  # most elements of a layer's input for which there are graphs
        self.prepare()

    def prepare(self) -> None:
        device = self.device
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

    def close(self) -> None:
        """Free the memory pool, once all recordings are reset."""
        self.keeper.reset()

    @property
    def stream_id(self) -> int:
        return int(self.stream.cuda_stream)

    # --- recording ---

    def record(
        self, work: Callable[..., Result], before: Recording | None = None, *given: Any, keeps: bool = False
    ) -> tuple[Any, Result]:
        """Run ``work(*given)`` and record it. Return the Recording, and the result of the work.

        Args:
            before: the Recording whose result is ``given``. The caller always replays ``before`` first. Only the
                recorders of tests/support read this argument and ``keeps``.
            keeps: whether the tensors that autograd saved stay allocated, so that another recording can run the backward.

        Raises:
            Refusal: the work cannot be recorded.
            torch.OutOfMemoryError: the GPU has no memory for the recording.
        """
        graph = torch.cuda.CUDAGraph()
        with self.repaired(), self.capturing(graph):
            result = work(*given)
        return graph, result

    @contextlib.contextmanager
    def recording(self, differentiable: bool) -> Iterator[None]:
        """Enter the stream and the modes in which layers are warmed up and recorded.

        Restore the state of the GPU's random generator afterwards.
        """
        state, replay_stream = self.generator.get_state(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream), modes_of_recording(differentiable):
                self.stream.wait_stream(replay_stream)
                yield
        finally:
            replay_stream.wait_stream(self.stream)
            restore(self.generator, state)

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record the GPU work of the ``with`` block on the current stream into ``graph``."""
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

    @contextlib.contextmanager
    def repaired(self) -> Iterator[None]:
        """If a capture in the ``with`` block fails, repair PyTorch's state. A RuntimeError becomes one of the errors below.

        Raises:
            Refusal: the capture failed, so the layer cannot be captured.
            torch.OutOfMemoryError: the GPU has no memory for the graphs.
        """
        try:
            yield
        except RuntimeError as error:
            self.repair()
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise Refusal(Reason.GRAPH_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]) from None
        except BaseException:
            self.repair()
            raise

    def repair(self) -> None:
        """Repair PyTorch's state after a failed capture, and mark the recorder as broken.

        After the failure, PyTorch still allocates from the pool, and PyTorch's random generator is still in capture
        mode. The repair ends these allocations and gives the generator a new state. Earlier graphs read the generator's
        old state, so the caller has to drop all graphs.
        """
        self.broken = True
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
        self.generator.graphsafe_set_state(self.generator.clone_state())

    # --- memory ---

    def make_room(self) -> None:
        """Return PyTorch's unused memory to the driver, so that graphs of a new shape can use it.

        Do nothing if the pool has graphs already and the driver has plenty of memory: eager steps, for example of other
        lengths, would have to allocate the returned memory again.
        """
        found = MemoryInfo.of(self.device)
        unused = found.reserved - memory(self.device, "allocated_bytes")
        if not self.taken or found.free < found.margin + unused + memory(self.device, "allocated_bytes", "peak"):
            give_back()

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

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return an alias of ``tensor`` that does not keep the memory allocated, so that graphs of other layers can reuse it."""
        storage = torch.as_tensor(PoolMemory(tensor), device=tensor.device).untyped_storage()
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]

    def allocated(self) -> int:
        """Return how many bytes the tensors on the GPU requested, without the allocator's rounding."""
        return memory(self.device, "requested_bytes")

    def kept(self, before: int, *results: Tensor) -> int:
        """Return how many more bytes than ``before`` are allocated now, not counting the memory of ``results``."""
        storages = {s.data_ptr(): s.nbytes() for s in (result.untyped_storage() for result in results)}
        return self.allocated() - before - sum(storages.values())

    @contextlib.contextmanager
    def leaving_enough(self, more: int = 0, held: int = 0) -> Iterator[None]:
        """Check, before and after the ``with`` block records graphs, that the GPU has enough memory for a training step.

        A step is assumed to need as much memory as PyTorch's peak so far.

        Args:
            more: bytes of tensors that eager steps move to host memory, and that graphs hold on the GPU. The check adds
                them to the peak.
            held: bytes of earlier graphs that are still allocated, and that a new peak includes. The check subtracts them
                from the new peak.

        Raises:
            torch.OutOfMemoryError: the GPU has too little memory.
        """
        self.check(more, held)  # A warm-up already takes memory that stays allocated, such as cuBLAS's workspace.
        self.begun = memory(self.device, "reserved_bytes")
        try:
            yield
        finally:
            self.taken, self.begun = self.size, None  # also after a failure, because the pool keeps its memory
        self.check(more, held)

    @property
    def size(self) -> int:
        """The bytes that PyTorch has reserved for the pool, also while graphs are recorded."""
        return self.taken + (0 if self.begun is None else memory(self.device, "reserved_bytes") - self.begun)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside the ``with`` block of ``recording``, run another block on the stream of the replays and beside the pool."""
        before, stream = memory(self.device, "reserved_bytes"), torch.cuda.default_stream(self.device)
        if self.replay_stream:  # ExternalStream(0) would be a new stream, which waits for no other
            stream = torch.cuda.ExternalStream(self.replay_stream, self.device)
        with torch.cuda.stream(stream):
            yield
        self.stream.wait_stream(stream)
        if self.begun is not None:
            self.begun += memory(self.device, "reserved_bytes") - before

    def check(self, more: int, held: int) -> None:
        peak = memory(self.device, "allocated_bytes", "peak")
        if peak > self.peak:
            self.peak, self.rest = peak, max(self.rest, min(peak - held, needed(self.device)))
        self.require(self.device, self.taken, self.rest + more)

    @staticmethod
    def require(device: int, taken: int = 0, rest: int | None = None) -> None:
        """Check that the GPU has enough memory for graphs and the rest of a training step.

        Args:
            taken: bytes that the graphs take.
            rest: bytes that a step needs besides the graphs, or None for PyTorch's peak so far.

        Raises:
            torch.OutOfMemoryError: the GPU has too little memory.
        """
        found = MemoryInfo.of(device)
        limit = found.free + found.reserved - found.margin
        rest = min(memory(device, "allocated_bytes", "peak"), needed(device)) if rest is None else rest
        if taken + rest > limit:
            gib = [f"{size / 2**30:.2f} GiB" for size in (taken, rest, limit)]
            raise torch.OutOfMemoryError("CUDA graphs take {}, the rest of a step up to {}, of {}".format(*gib))

    # --- what a graph cannot repeat ---

    @contextlib.contextmanager
    def synchronizations(self) -> Iterator[list[str]]:
        """Yield a list that collects the source lines at which this thread waits for the GPU inside the ``with`` block."""
        before, found, thread = torch.cuda.get_sync_debug_mode(), list[str](), threading.get_ident()

        def show(message: Any, category: Any, filename: str, lineno: int, *others: Any, **options: Any) -> None:
            if not str(message).startswith(SYNCHRONIZES):
                shown(message, category, filename, lineno, *others, **options)
            elif threading.get_ident() == thread:
                found.append(f"{filename}:{lineno}")

        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=SYNCHRONIZES)
            shown, warnings.showwarning = warnings.showwarning, show
            torch.cuda.set_sync_debug_mode("warn")  # "error" would also hit other threads that synchronize now
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)


def memory(device: int, kind: str, value: str = "current") -> int:
    """Return one of PyTorch's memory statistics, in bytes.

    Args:
        kind: for example "reserved_bytes".
        value: "current" or "peak".
    """
    # torch.cuda.memory_stats would sort all statistics first.
    return int(torch.cuda.memory_stats_as_nested_dict(device)[kind]["all"][value])


def needed(device: int) -> int:
    """Return the most bytes that training needed without spare memory, if this is known.

    PyTorch's peak includes spare memory, such as that of cached weights.
    """
    return sys.maxsize if spare.waits else spare.needed.get(device, sys.maxsize)


def give_back() -> None:
    """Return PyTorch's unused memory to the driver."""
    if not runtime.is_capturing():
        torch.cuda.empty_cache()


def restore(generator: Any, state: Tensor) -> None:
    """Set a random generator to an earlier state, unless it still has this state."""
    if not torch.equal(generator.get_state(), state):
        generator.set_state(state)


@contextlib.contextmanager
def modes_of_recording(differentiable: bool) -> Iterator[None]:
    """Enter the modes in which layers are warmed up and recorded.

    The backward runs in this thread too, because a recorder's pool and its capture mode apply to one thread only.
    """
    with (
        quiet_garbage(),
        spare.ignoring.entered(),  # otherwise graphs could be dropped, and the recording would overwrite kept activations
        torch.set_grad_enabled(differentiable),
        torch.autograd.set_multithreading_enabled(False),
        # detached, because a result that autograd saves as it is would keep itself alive
        saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor),
    ):
        yield


@contextlib.contextmanager
def own_casts() -> Iterator[None]:
    """Clear autocast's cache of cast weights before and after the ``with`` block.

    Autocast frees these weights at the end of its outermost context. A graph would read them even later.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


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
