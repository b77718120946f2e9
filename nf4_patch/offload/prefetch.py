"""Packed experts that wait in host memory: ``enable(experts="4bit", offload="6GiB")``.

A stack in host memory is still a CUDA tensor. Its memory is pinned host memory, mapped into the GPU's address space at the
same address. Every operation on a parameter therefore works on it too, only slower, because the GPU reads over the bus.
Prefetch makes it fast. While the experts of one layer compute, the experts of the next layer are copied into a buffer on the
GPU. They are decoded from that buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..cache.store import cache, is_captured
from ..nf4 import runtime
from ..nf4.weight import LIMIT, PackedWeight
from ..patching.context import modes_active, transforms_active
from ..patching.dequantizer import Dequantizer
from ..patching.locks import new_lock
from ..patching.option import ConfigError, size_in_words
from ..patching.quant_state import new, weight_of
from ..patching.reasons import Reason
from ..patching.switch import switch
from .option import OffloadStatus

SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags
ALIGNMENT, ROOM = 256, 4096  # bytes: PyTorch's allocator aligns like this; room for the alignment of 16 tensors
MORE = 'free host memory, or keep more experts on the GPU with a larger offload="...GiB"'
gate = switch.gates["offload"]


class Cuda:
    """All CUDA calls of this module. Tests replace it with a version for plain CPU tensors."""

    kind, left = "cuda", list[tuple[Tensor, torch.device]]()
    event, stream, running_on = torch.cuda.Event, torch.cuda.Stream, staticmethod(torch.cuda.stream)
    current_stream, is_captured = staticmethod(torch.cuda.current_stream), staticmethod(is_captured)
    handle = staticmethod(runtime.current_stream)

    def register(self, host: Tensor, device: torch.device) -> str:
        """Pin memory and map it into the address space of every GPU. Return the error, or "" on success."""
        cudart, same = torch.cuda.cudart(), ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(same), SAME_ADDRESS, device.index)
        if not same.value:
            return "this GPU cannot read host memory at the host's address"
        with torch.cuda.device(device):  # PyTorch takes the current device for the device of this memory
            code = cudart.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
        if not int(code):
            return ""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # clears the pending CUDA error, which the next kernel would raise
        return str(cudart.cudaGetErrorString(code))

    def unregister(self, host: Tensor, device: torch.device) -> None:
        """Unpin memory, now or at the next call outside a CUDA graph capture, which unpinning would end."""
        self.left.append((host, device))
        while self.left and not torch.cuda.is_current_stream_capturing():
            host, device = self.left.pop()
            torch.cuda.synchronize(device)  # a kernel may still read it
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())

    def mapped(self, part: Any, device: torch.device) -> Tensor:
        """Return a CUDA tensor, uint8 [bytes], in the host memory of ``part``. The tensor keeps ``part`` alive."""
        return torch.as_tensor(part, device=device)

    def copy(self, place: Tensor, host: Tensor) -> None:
        place.copy_(host, non_blocking=True)


cuda: Any = Cuda()
Fingerprint = tuple[Any, ...]


class HostBlock:
    """One block of host memory with the packed stacks of one experts module, which are fetched together.

    The block is pinned when the first tensor arrives, and lives as long as any CUDA tensor in it.
    """

    def __init__(self, capacity: int):
        self.capacity, self.size = capacity, 0  # bytes planned, and bytes in use
        self.resident = 0  # bytes of the modules that stay on the GPU; one block per GPU carries this count
        self.host: Tensor | None = None  # uint8
        self.sizes: dict[int, int] = {}  # bytes of each tensor, by address
        # of each weight at its last read, by the address of its packed bytes
        self.fingerprints: dict[int, Fingerprint] = {}
        # the next block, by the block before this one, because forward and backward run through the layers in opposite order
        self.after: weakref.WeakKeyDictionary[HostBlock, Reference] = weakref.WeakKeyDictionary()

    def pinned(self, device: torch.device) -> Tensor:
        """Allocate and pin the block's memory.

        Raises:
            MemoryError: the memory cannot be allocated or pinned.
        """
        self.device, size = device, self.capacity + ROOM
        try:
            # Shared memory, so that a fork does not copy pinned pages. PyTorch rounds its pinned memory up to a power of two.
            host = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            failure = cuda.register(host, device)
        except OSError as error:
            failure = str(error)
        if failure:
            raise MemoryError(
                f"offload: {size_in_words(size)} of host memory could not be pinned for packed experts: {failure}. "
                f"{size_in_words(sum(block.size for block in living()))} are pinned already. Raise the limit for pinned memory "
                f"(ulimit -l; docker run --ulimit memlock=-1), {MORE}"
            )
        weakref.finalize(self, forget, cuda, host, self.sizes, device, os.getpid()).atexit = False
        return host

    def placed(self, tensor: Tensor) -> Tensor:
        """Move a tensor into the block and return it as a CUDA tensor. If the plan left too little room, return it unmoved."""
        if self.host is None:
            self.host = self.pinned(tensor.device)
        place = self.host[self.size : self.size + tensor.nbytes]
        if place.nbytes < tensor.nbytes:
            return tensor
        place.copy_(tensor.reshape(-1).view(torch.uint8))
        start = place.data_ptr()
        self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.sizes[start], blocks[start] = tensor.nbytes, weakref.ref(self)
        memory = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (start, False), "version": 2}
        part = SimpleNamespace(__cuda_array_interface__=memory, block=self)
        whole: Tensor = cuda.mapped(part, self.device)
        return whole.view(tensor.dtype).view(tensor.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the block's tensors, not a part of one."""
        return self.sizes.get(tensor.data_ptr()) == tensor.nbytes and tensor.is_contiguous()


Reference = Callable[[], HostBlock | None]
blocks: dict[int, Reference] = {}  # by the address of each tensor in them; the addresses are unique while a block lives


def nobody() -> None:
    return None


def living() -> set[HostBlock]:
    return {block for reference in list(blocks.values()) if (block := reference()) is not None}


def forget(cuda: Any, host: Tensor, sizes: dict[int, int], device: torch.device, process: int) -> None:
    """Unregister a host block that died, and unpin its memory."""
    for address in sizes:
        del blocks[address]
    if os.getpid() == process:  # a forked child has no CUDA
        cuda.unregister(host, device)
        if device in prefetchers and all(block.device != device for block in living()):
            prefetchers[device].clear()


# --- fetching ---


class Buffer:
    """GPU memory, allocated on the copy stream, into which host blocks are copied."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.arrived = cuda.event()
        self.block: Reference | None = None
        self.fingerprints: dict[int, Fingerprint] = {}  # of the block's weights when it was copied
        self.streams: dict[int, Any] = {}  # that have read the buffer since
        # Views of a weight's packed, absmax and absmax2, None for a tensor outside the block. The block is part of the key,
        # because a later block may reuse an address.
        self.views: dict[tuple[Reference, Fingerprint], list[Tensor | None]] = {}

    def viewed(self, weight: PackedWeight, fingerprint: Fingerprint, block: HostBlock) -> list[Tensor | None]:
        """Make the buffer's views of a weight's packed, absmax and absmax2, and remember them."""
        assert self.memory is not None and block.host is not None
        if len(self.views) >= LIMIT:
            self.views.clear()
        views = self.views[weakref.ref(block), fingerprint] = list[Tensor | None]([None] * 3)
        for index, tensor in enumerate(weight[:3]):
            if tensor is not None and block.holds(tensor):
                start = tensor.data_ptr() - block.host.data_ptr()
                views[index] = self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return views


class Prefetcher:
    """Prefetcher of one GPU: two buffers, a copy stream, and the order in which host blocks are read."""

    def __init__(self, device: torch.device):
        self.device, self.lock = device, new_lock()  # held until the decode is launched
        self.stream = cuda.stream(device)
        self.buffers = [Buffer(), Buffer()]  # the buffer that was read last comes first
        self.before: Reference = nobody
        self.now: Reference = nobody  # all references here are weak, so that a block dies with its tensors
        self.fetches = self.late = 0

    def decode(
        self, weight: PackedWeight, fingerprint: Fingerprint, block: HostBlock, run: Callable[[PackedWeight], Any]
    ) -> Any:
        """Run ``run`` on the weight's copy in a prefetch buffer, fetched now if it is not there.

        A slice of a stack is read directly from host memory.
        """
        reference = weakref.ref(block)  # always the same object while the block lives
        with self.lock:
            if self.buffers[1].block is reference:
                self.buffers.reverse()
            buffer = self.buffers[0]
            if buffer.block is not reference or buffer.fingerprints.get(fingerprint[0]) != fingerprint:
                if not block.holds(weight[0]):
                    return run(weight)
                block.fingerprints[fingerprint[0]] = fingerprint
                if buffer.block is not reference:
                    self.buffers.reverse()
                    buffer = self.buffers[0]
                self.fetch(buffer, block, ahead=False)
            if reference is not self.now:  # prefetch before the wait below, so that the copy starts at once
                following = self.following(block)
                if following is not None and self.buffers[1].block is not weakref.ref(following):
                    self.fetch(self.buffers[1], following, ahead=True)
            handle = cuda.handle(self.device.index)
            if handle not in buffer.streams:
                stream = cuda.current_stream(self.device)
                stream.wait_event(buffer.arrived)
                buffer.streams[handle] = stream
            packed, absmax, absmax2 = buffer.views.get((reference, fingerprint)) or buffer.viewed(
                weight, fingerprint, block
            )
            absmax, absmax2 = weight[1] if absmax is None else absmax, weight[2] if absmax2 is None else absmax2
            return run(new(PackedWeight, (packed, absmax, absmax2, *weight[3:])))

    def following(self, block: HostBlock) -> HostBlock | None:
        """Record that ``block`` is read now. Return the block that followed it last time, if any."""
        before, now = self.before(), self.now()
        if before is not None and now is not None:
            now.after[before] = weakref.ref(block)
        self.before, self.now = self.now, weakref.ref(block)
        reference = None if now is None else block.after.get(now)
        return None if reference is None else reference()

    def fetch(self, buffer: Buffer, block: HostBlock, ahead: bool) -> None:
        """Start the copy of a host block into a buffer, after the last use of the buffer's contents."""
        self.empty(buffer)
        if not ahead:  # include writes to a stack on the current stream
            self.stream.wait_stream(cuda.current_stream(self.device))
        assert block.host is not None
        with cuda.running_on(self.stream):
            if buffer.memory is None or buffer.memory.nbytes < block.size:
                self.free(buffer)
                with torch.inference_mode(False):  # training may read the buffer later
                    buffer.memory = torch.empty(block.size, dtype=torch.uint8, device=self.device)
            cuda.copy(buffer.memory[: block.size], block.host[: block.size])
        buffer.arrived.record(self.stream)
        buffer.block, buffer.fingerprints = weakref.ref(block), dict(block.fingerprints)
        self.fetches += 1
        self.late += not ahead

    def empty(self, buffer: Buffer) -> None:
        """Let the copy stream wait for all reads of the buffer, so that it may be overwritten."""
        buffer.block = None
        for stream in buffer.streams.values():
            self.stream.wait_stream(stream)
        buffer.streams = {}

    def free(self, buffer: Buffer) -> None:
        self.empty(buffer)
        buffer.memory, buffer.views = None, {}

    def clear(self) -> None:
        with self.lock:
            for buffer in self.buffers:
                self.free(buffer)


prefetchers: dict[torch.device, Prefetcher] = {}


def of_state(dequantizer: Dequantizer, packed: Tensor, state: Any, only_read: bool) -> Tensor | Reason:
    """Call ``dequantizer.of_state``. Fetch a stack from host memory first, unless its dense weight is cached."""
    block = None if modes_active() else blocks.get(packed.data_ptr(), nobody)()
    weight: Any = Reason.STATE_FIELDS if block is None else weight_of(packed, state)
    fingerprint = None if type(weight) is Reason or transforms_active() is not None else fingerprint_of(weight)
    if block is None or fingerprint is None or cuda.is_captured(packed.get_device()):
        return dequantizer.of_state(packed, state, only_read=only_read)
    prefetcher = prefetchers.get(block.device) or prefetchers.setdefault(block.device, Prefetcher(block.device))

    def decode(weight: PackedWeight) -> Tensor | Reason:
        result: Tensor | Reason = prefetcher.decode(weight, fingerprint, block, dequantizer.run)
        return result

    found = cache.read(weight, decode) if only_read and cache.on else None
    return decode(weight) if found is None else found


def fingerprint_of(weight: PackedWeight) -> Fingerprint | None:
    """Return a fingerprint that changes whenever packed, absmax or absmax2 do.

    Return None if one of them has no version counter.
    """
    packed, absmax, absmax2, *_ = weight
    try:
        fingerprint: Fingerprint = (
            packed.data_ptr(), id(packed), packed._version, packed.shape,
            absmax.data_ptr(), id(absmax), absmax._version, absmax.shape,
        )  # fmt: skip
        if absmax2 is not None:
            fingerprint += absmax2.data_ptr(), id(absmax2), absmax2._version, absmax2.shape
    except RuntimeError:  # an inference tensor
        return None
    return fingerprint


# --- loading ---

# For each model being loaded: host blocks by module path, or the error message, because transformers only logs the exception
plans: weakref.WeakKeyDictionary[Any, dict[str, HostBlock] | str] = weakref.WeakKeyDictionary()


def packed_size(elements: int, nested: bool) -> int:
    """Return the bytes of a packed stack with 64 elements per block and 256 blocks per second-level block."""
    scales = -(-elements // 64)
    return -(-elements // 2) + (scales + 4 * -(-scales // 256) if nested else 4 * scales)


def free_memory() -> float:
    """Return the bytes of host memory that are available, or infinity if /proc/meminfo does not say."""
    with contextlib.suppress(OSError, KeyError), open("/proc/meminfo") as file:
        return 1024 * int(dict(line.split(":") for line in file)["MemAvailable"].split()[0])
    return float("inf")


def plan(model: Any, stacks: Iterable[tuple[str, Any, int]]) -> None:
    """Decide which experts modules of a model go to host memory. A module is never split.

    Args:
        stacks: (full name, device, packed bytes) of each stack that will be packed.

    Raises:
        ConfigError: the budget does not hold two buffers.
        MemoryError: the host has less memory than is needed.
    """
    if not gate.on:
        return
    planned: dict[torch.device, Counter[str]] = {}
    for name, place, size in stacks:
        if (device := torch.device(place)).type == cuda.kind:
            planned.setdefault(device, Counter())[name.rpartition(".")[0]] += size
    chosen: dict[str, HostBlock] = {}
    plans[model], budget, wanted = chosen, switch.value("offload"), 0
    for device, sizes in planned.items():
        total, largest = sizes.total(), max(sizes.values())
        if isinstance(budget, int) and total <= budget:
            continue
        on_gpu = budget - 2 * largest if isinstance(budget, int) else 0
        if on_gpu < 0:
            raise ConfigError(
                f"offload={size_in_words(int(budget))!r} is too small for the two prefetch buffers on {device}, which hold one "
                f'experts module each. Give "{-(-2 * largest // 2**20)}MiB" or more, or "all", which keeps only the buffers'
            )
        share, resident = 0, total
        for path, size in sizes.items():  # spread evenly over the layers, so that copies overlap with computation
            share += on_gpu * size
            if share >= total * size:
                share -= total * size
            else:
                block = chosen[path] = HostBlock(size)
                resident -= size
        block.resident, wanted = resident, wanted + total - resident
    if wanted > (free := free_memory()):  # otherwise Linux would kill this process silently
        raise MemoryError(
            f"offload: {size_in_words(wanted)} of host memory are needed, but {size_in_words(int(free))} are free. To go on, {MORE}"
        )


def blocks_of(model: Any) -> dict[str, HostBlock]:
    """Return the host blocks planned for a model that is being loaded, by module path.

    Raises:
        MemoryError: a stack of the model could not be placed.
    """
    planned = plans.get(model, {})
    if isinstance(planned, str):
        raise MemoryError(planned)
    return planned


def placed(model: Any, full_name: str, parameter: Any) -> Any:
    """Move a packed stack and its absmax tensors to host memory if the plan says so. Return the parameter."""
    block, state = blocks_of(model).get(full_name.rpartition(".")[0]), parameter.quant_state
    if block is None:
        return parameter
    for owner, name in ((parameter, "data"), (state, "absmax"), (state.state2, "absmax"))[: 3 if state.nested else 2]:
        try:
            setattr(owner, name, block.placed(getattr(owner, name)))
        except MemoryError as error:
            plans[model] = str(error)
            raise
    return parameter


# --- status ---


def snapshot() -> dict[str, OffloadStatus]:
    """Return the offload status by GPU."""
    found, held = {}, living()
    for device, prefetcher in (dict.fromkeys(block.device for block in held) | prefetchers).items():
        here = [block for block in held if block.device == device]
        resident = sum(block.resident for block in here)
        resident += sum(
            0 if each.memory is None else each.memory.nbytes for each in (prefetcher.buffers if prefetcher else ())
        )
        counts = (prefetcher.fetches, prefetcher.late) if prefetcher else ()
        found[str(device)] = OffloadStatus(resident, sum(sum(block.sizes.values()) for block in here), *counts)
    return found


def follow(_config: Any) -> None:
    if not gate.on:
        for prefetcher in prefetchers.values():
            prefetcher.clear()


switch.follow(follow)
