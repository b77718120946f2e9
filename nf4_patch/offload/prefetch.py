"""Prefetch of packed weights: while one layer computes, the weights of the next layer are copied from host memory to the GPU.

The copies run on a separate CUDA stream, into two buffers per GPU in turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cache.store import cache
from ..nf4.weight import LIMIT, PackedWeight
from ..patching.context import watched
from ..patching.dequantizer import Dequantizer
from ..patching.locks import new_lock
from ..patching.quant_state import new, weight_of
from ..patching.reasons import Reason
from ..patching.switch import switch
from . import host_memory
from .host_memory import Fingerprint, HostBlock, Reference, blocks, living, no_block
from .option import OffloadStatus

gate = switch.gates["offload"]


class Buffer:
    """GPU memory for a copy of one host block, allocated on the copy stream."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.arrived = host_memory.cuda.event()
        self.block: Reference | None = None
        self.fingerprints: dict[int, Fingerprint] = {}  # the block's ``fingerprints`` when it was copied
        self.streams: dict[int, Any] = {}  # the streams that have read this copy, by handle
        # For each weight, ``views`` has the buffer's views of the weight's packed, absmax and absmax2. A view is None
        # if the block does not hold the tensor. The key contains the block, because a later block may have the same
        # addresses.
        self.views: dict[tuple[Reference, Fingerprint], list[Tensor | None]] = {}

    def viewed(self, weight: PackedWeight, fingerprint: Fingerprint, block: HostBlock) -> list[Tensor | None]:
        """Return this buffer's views of a weight's packed, absmax and absmax2, and store them in ``views``."""
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
    """Buffers, copy stream and reading order of one GPU."""

    def __init__(self, device: torch.device):
        self.device, self.lock = device, new_lock()  # hold the lock until the decode is launched
        self.stream = host_memory.cuda.stream(device)
        self.buffers = [Buffer(), Buffer()]  # The buffer that was read most recently comes first.
        # ``now`` is the block that was read most recently, and ``before`` the block that was read before ``now``. Both
        # are weak references, because a block must be freed together with its tensors.
        self.before: Reference = no_block
        self.now: Reference = no_block
        self.fetches = self.late = 0

    def decode(
        self, weight: PackedWeight, fingerprint: Fingerprint, block: HostBlock, run: Callable[[PackedWeight], Any]
    ) -> Any:
        """Decode from the prefetch buffer, copying the host block now if no buffer holds it. Slices are read from host memory."""
        reference = weakref.ref(block)  # Python returns the same object each time while the block lives.
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
            if reference is not self.now:  # Start the prefetch before ``wait_event``, so that the copy starts at once.
                following = self.following(block)
                if following is not None and self.buffers[1].block is not weakref.ref(following):
                    self.fetch(self.buffers[1], following, ahead=True)
            handle = host_memory.cuda.handle(self.device.index)
            if handle not in buffer.streams:
                stream = host_memory.cuda.current_stream(self.device)
                stream.wait_event(buffer.arrived)
                buffer.streams[handle] = stream
            packed, absmax, absmax2 = buffer.views.get((reference, fingerprint)) or buffer.viewed(
                weight, fingerprint, block
            )
            absmax, absmax2 = weight[1] if absmax is None else absmax, weight[2] if absmax2 is None else absmax2
            return run(new(PackedWeight, (packed, absmax, absmax2, *weight[3:])))

    def following(self, block: HostBlock) -> HostBlock | None:
        """Record the read of ``block``. Return the block that came next when it was last read after the same block, or None."""
        before, now = self.before(), self.now()
        if before is not None and now is not None:
            now.after[before] = weakref.ref(block)
        self.before, self.now = self.now, weakref.ref(block)
        reference = None if now is None else block.after.get(now)
        return None if reference is None else reference()

    def fetch(self, buffer: Buffer, block: HostBlock, ahead: bool) -> None:
        """Copy a host block into a buffer, once all earlier reads of the buffer are done. ``ahead``: nobody waits for it yet."""
        self.empty(buffer)
        # The caller's stream may have written to the block. If the caller needs the block now, the copy must wait for
        # these writes. A prefetch need not wait: a write changes a fingerprint, and ``decode`` then copies the block
        # again.
        if not ahead:
            self.stream.wait_stream(host_memory.cuda.current_stream(self.device))
        assert block.host is not None
        with host_memory.cuda.running_on(self.stream):
            if buffer.memory is None or buffer.memory.nbytes < block.size:
                self.free(buffer)
                with torch.inference_mode(False):  # training may read the buffer later
                    buffer.memory = torch.empty(block.size, dtype=torch.uint8, device=self.device)
            host_memory.cuda.copy(buffer.memory[: block.size], block.host[: block.size])
        buffer.arrived.record(self.stream)
        buffer.block, buffer.fingerprints = weakref.ref(block), dict(block.fingerprints)
        self.fetches += 1
        self.late += not ahead

    def empty(self, buffer: Buffer) -> None:
        """Mark the buffer as empty, and let the copy stream wait for its reads."""
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


class OffloadedDequantizer(Dequantizer):
    """A Dequantizer that decodes a weight in host memory from its copy in a prefetch buffer."""

    def of_state(
        self, packed: Tensor, state: Any, out: Tensor | None = None, into_buffer: bool = False, only_read: bool = False
    ) -> Tensor | Reason:
        if gate.on and out is None and not into_buffer:
            return prefetched(super().of_state, self.run, packed, state, only_read)
        return super().of_state(packed, state, out, into_buffer, only_read)


def prefetched(
    of_state: Callable[..., Tensor | Reason], run: Callable[[PackedWeight], Any],
    packed: Tensor, state: Any, only_read: bool,
) -> Tensor | Reason:  # fmt: skip
    """Decode a packed weight, as ``of_state`` does, but faster for a weight in host memory.

    If the weight cache has its dense weight, return that. Otherwise decode the weight's copy in a prefetch buffer.
    """
    block = None if watched() is not None else blocks.get(packed.data_ptr(), no_block)()
    weight: Any = Reason.STATE_FIELDS if block is None else weight_of(packed, state)
    fingerprint = None if type(weight) is Reason else fingerprint_of(weight)
    if block is None or fingerprint is None or host_memory.cuda.is_captured(packed.get_device()):
        return of_state(packed, state, only_read=only_read)
    prefetcher = prefetchers.get(block.device) or prefetchers.setdefault(block.device, Prefetcher(block.device))

    def decode(weight: PackedWeight) -> Tensor | Reason:
        result: Tensor | Reason = prefetcher.decode(weight, fingerprint, block, run)
        return result

    found = cache.read(weight, decode) if only_read and cache.on else None
    return decode(weight) if found is None else found


def fingerprint_of(weight: PackedWeight) -> Fingerprint | None:
    """Return a fingerprint that changes at every write. None: an inference tensor has no version counter."""
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


def free_buffers(device: torch.device) -> None:
    if device in prefetchers:
        prefetchers[device].clear()


def follow(_config: Any) -> None:
    """Free all prefetch buffers if ``offload`` is off. ``switch`` calls this at every change of the configuration."""
    if not gate.on:
        for prefetcher in prefetchers.values():
            prefetcher.clear()


host_memory.on_last_block_freed.append(free_buffers)
switch.follow(follow)
