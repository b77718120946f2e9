"""While one layer computes, copy the packed weights of the next layer from host memory to the GPU."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..memory.spare import User, spare
from ..memory.waits import Waits
from ..nf4 import runtime
from ..nf4.identity import Identity
from ..nf4.weight import LIMIT, PackedWeight
from ..patching import dequantizer
from ..patching.context import watched
from ..patching.locks import new_lock
from ..patching.quant_state import new
from ..patching.switch import switch
from . import host_memory
from .host_memory import HostBlock, Reference, blocks, living, no_block
from .option import OffloadStatus
from .planning import spread

gate = switch.gates["offload"]
taken: Counter[int] = Counter()  # bytes of resident copies, by device


class Buffer:
    """A buffer, allocated on the copy stream."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.arrived = host_memory.cuda.event()
        self.block: Reference | None = None
        self.identities: dict[int, Identity] = {}  # the block's ``identities`` when it was copied
        self.streams: dict[int, Any] = {}  # the streams that have read this copy, by handle
        # For each weight, ``views`` has the buffer's views of the weight's packed, absmax and absmax2. A view is None
        # if the block does not hold the tensor. The key contains the block, because a later block may have the same
        # addresses.
        self.views: dict[tuple[Any, ...], list[Tensor | None]] = {}

    def copy_of(self, weight: PackedWeight, reference: Reference, block: HostBlock) -> PackedWeight:
        """Return ``weight`` with this buffer's copies of the tensors in ``block``."""
        tensors: tuple[Tensor | None, ...] = weight[:3]
        key = reference, weight[0].shape, *(None if each is None else each.data_ptr() for each in tensors)
        views = self.views.get(key)
        if views is None:
            if len(self.views) >= LIMIT:
                self.views.clear()
            views = [None] * 3
            for index, tensor in enumerate(tensors):
                part = block.part(tensor)
                if tensor is not None and part is not None and self.memory is not None:
                    views[index] = self.memory[part].view(tensor.dtype).view(tensor.shape)
            # last, because without its views a weight would be read from host memory again and again
            self.views[key] = views
        packed, absmax, absmax2 = (
            theirs if view is None else view for view, theirs in zip(views, tensors, strict=True)
        )
        copy: PackedWeight = new(PackedWeight, (packed, absmax, absmax2, *weight[3:]))
        return copy


class Prefetcher:
    """The buffers, copy stream, resident copies and reading order of one GPU."""

    def __init__(self, device: torch.device):
        self.device, self.lock = device, new_lock()  # hold the lock until the decode is launched
        self.stream = host_memory.cuda.stream(device)
        self.buffers = [Buffer(), Buffer()]  # The buffer that was read most recently comes first.
        self.index = torch.empty(0, device=device).get_device()
        # The resident copy of each block that ``allow`` chose, or None until the block is read
        self.resident: dict[Reference, Buffer | None] = {}
        # ``now`` is the block that was read most recently, and ``before`` the block that was read before ``now``. Both
        # are weak references, because a block must be freed together with its tensors.
        self.before: Reference = no_block
        self.now: Reference = no_block
        self.fetches = self.late = 0
        self.seen: dict[Reference, None] = {}  # blocks that were read since ``allow``, in order

    def read(self, weight: PackedWeight, block: HostBlock, run: Callable[[PackedWeight], Any]) -> Any:
        """Return ``run(copy)`` for the weight's copy on the GPU. If there is none, copy the weight's block now.

        Return None if the weight is a slice, which is not copied.
        """
        reference = weakref.ref(block)  # Python returns the same object each time while the block lives.
        address = weight[0].data_ptr()
        with self.lock:
            self.seen[reference] = None
            resident = self.resident.get(reference)
            if resident is None and self.buffers[1].block is reference:
                self.buffers.reverse()
            buffer = resident or self.buffers[0]
            if buffer.block is not reference:
                if block.part(weight[0]) is None:
                    return None
                self.buffers.reverse()
                buffer = self.buffers[0]
                block.identities[address] = Identity(weight)
                self.fetch(buffer, block, ahead=False)
            elif (known := buffer.identities.get(address)) is None or not known.holds(weight):
                if block.part(weight[0]) is None:
                    return None
                known = Identity(weight)
                self.refresh(buffer, weight, block)
                block.identities[address] = buffer.identities[address] = known
            # Resident blocks are not part of the order, so that the copy of the next block starts before they compute.
            if resident is None and reference is not self.now:
                # Start the prefetch before ``wait_event``, so that the copy starts at once.
                following = self.following(block)
                if following is not None and not self.holds(weakref.ref(following)):
                    self.fetch(self.buffers[1], following, ahead=True)
            handle = host_memory.cuda.handle(self.device.index)
            if handle not in buffer.streams:
                stream = host_memory.cuda.current_stream(self.device)
                stream.wait_event(buffer.arrived)
                buffer.streams[handle] = stream
            result = run(buffer.copy_of(weight, reference, block))
            if resident is None and reference in self.resident:
                self.keep(reference, block)
            return result

    def holds(self, reference: Reference) -> bool:
        """Return whether the block is resident, or in the buffer for the next block."""
        return self.buffers[1].block is reference or self.resident.get(reference) is not None

    def keep(self, reference: Reference, block: HostBlock) -> None:
        """Make a resident copy of the block."""
        buffer = Buffer()
        self.fetch(buffer, block, ahead=True)
        self.resident[reference] = buffer
        self.count()

    def count(self) -> None:
        held = [each.memory for each in list(self.resident.values()) if each is not None]
        taken[self.index] = sum(memory.nbytes for memory in held if memory is not None)

    def allow(self, budget: int) -> None:
        """Free all resident copies, and choose the blocks, ``budget`` bytes at most, that get one at their next read."""
        with self.lock:
            if runtime.is_capturing():  # The copy stream must not wait for a stream that is captured. Keep the copies.
                return
            self.free_resident()
            seen = self.read_blocks()
            stays = spread([block.size for block in seen], budget)
            self.resident = {weakref.ref(block): None for block, stay in zip(seen, stays, strict=True) if stay}
            self.seen.clear()

    def read_blocks(self) -> list[HostBlock]:
        """Return the blocks read since the last ``allow``, so that an idle model gets no memory."""
        return [block for reference in list(self.seen) if (block := reference()) is not None]

    def free_resident(self, freed: bool = False) -> None:
        """Free all resident copies, or with ``freed`` only those of freed blocks."""
        for reference, buffer in list(self.resident.items()):
            if freed and (reference() is not None or runtime.is_capturing()):
                continue
            if reference() is None:
                self.resident.pop(reference, None)
            else:
                self.resident[reference] = None
            if buffer is not None:
                self.free(buffer)
        self.count()

    def following(self, block: HostBlock) -> HostBlock | None:
        """Record the read of ``block``, and predict the next block.

        This is the block that came next when ``block`` was last read after the same predecessor.
        """
        before, now = self.before(), self.now()
        if before is not None and now is not None:
            now.after[before] = weakref.ref(block)
        self.before, self.now = self.now, weakref.ref(block)
        reference = None if now is None else block.after.get(now)
        return None if reference is None else reference()

    def fetch(self, buffer: Buffer, block: HostBlock, ahead: bool) -> None:
        """Copy a host block into a buffer, once all earlier reads of the buffer are done.

        ``ahead`` says whether the copy is made before the block is needed.
        """
        self.empty(buffer)
        # The caller's stream may have written to the block. If the caller needs the block now, the copy must wait for
        # these writes. A prefetch need not wait: after a write the identity does not hold, and ``read`` then copies
        # the weight again.
        if not ahead:
            self.stream.wait_stream(host_memory.cuda.current_stream(self.device))
        with host_memory.cuda.running_on(self.stream):
            if buffer.memory is None or buffer.memory.nbytes < block.size:
                self.free(buffer)
                with torch.inference_mode(False):  # training may read the buffer later
                    buffer.memory = torch.empty(block.size, dtype=torch.uint8, device=self.device)
            host_memory.cuda.copy(buffer.memory[: block.size], block.host[: block.size])
        buffer.arrived.record(self.stream)
        buffer.block, buffer.identities = weakref.ref(block), dict(block.identities)
        self.fetches += 1
        self.late += not ahead

    def refresh(self, buffer: Buffer, weight: PackedWeight, block: HostBlock) -> None:
        """Copy one weight into the buffer again, because it was written to, or is read for the first time."""
        buffer.identities.pop(weight[0].data_ptr(), None)
        self.wait(buffer)
        self.stream.wait_stream(host_memory.cuda.current_stream(self.device))  # which may have written the weight
        assert buffer.memory is not None
        with host_memory.cuda.running_on(self.stream):
            for tensor in weight[:3]:
                if (part := block.part(tensor)) is not None:
                    host_memory.cuda.copy(buffer.memory[part], block.host[part])
        buffer.arrived.record(self.stream)

    def empty(self, buffer: Buffer) -> None:
        """Mark the buffer as empty, and make the copy stream wait until all reads of the buffer are done."""
        buffer.block = None
        self.wait(buffer)

    def wait(self, buffer: Buffer) -> None:
        for stream in buffer.streams.values():
            self.stream.wait_stream(stream)
        buffer.streams = {}

    def free(self, buffer: Buffer) -> None:
        self.empty(buffer)
        buffer.memory, buffer.views, buffer.identities = None, {}, {}

    def clear(self) -> None:
        """Free all copies. The chosen blocks get a resident copy again at their next read."""
        with self.lock:
            self.free_resident()
            for buffer in self.buffers:
                self.free(buffer)


prefetchers: dict[torch.device, Prefetcher] = {}


class Prefetch(dequantizer.Prefetch):
    """The prefetch for all Dequantizers and fused matmuls of the process."""

    def read(self, weight: PackedWeight, run: Callable[[PackedWeight], Any]) -> Any:
        """Return ``run(copy)`` for the weight's copy on the GPU, or None if the weight has to be read without a copy."""
        block = block_of(weight[0])
        if block is None or weight[0].requires_grad or watched() is not None:
            return None
        if not counts_writes(weight) or host_memory.cuda.is_captured(weight[0].get_device()):
            return None
        prefetcher = prefetchers.get(block.device) or prefetchers.setdefault(block.device, Prefetcher(block.device))
        try:
            return prefetcher.read(weight, block, run)
        except torch.OutOfMemoryError:
            if not taken[prefetcher.index]:
                raise
        spare.give_back(Waits.OUT_OF_MEMORY)
        return prefetcher.read(weight, block, run)

    def holds(self, packed: Tensor) -> bool:
        return block_of(packed) is not None

    def forget(self, tensor: Tensor) -> None:
        buffers = [each for held in list(prefetchers.values()) for each in (*held.buffers, *held.resident.values())]
        for holder in (*living(), *buffers):
            for identity in [] if holder is None else list(holder.identities.values()):
                if identity.has(tensor):
                    identity.forget()


def block_of(packed: Tensor) -> HostBlock | None:
    """Return the block that holds the packed bytes, or None if there is none or ``packed`` has no address."""
    try:
        return blocks.get(packed.data_ptr(), no_block)()
    except (AttributeError, RuntimeError):  # the guards then name the Reason
        return None


def counts_writes(weight: PackedWeight) -> bool:
    """Return whether every write to the weight raises a version of its tensors.

    An inference tensor has no version counter, and ``parameter.data`` has a separate version counter.
    """
    is_parameter = isinstance(weight.owner(), torch.nn.Parameter)
    return is_parameter and not any(tensor.is_inference() for tensor in weight.tensors())


def snapshot() -> dict[str, OffloadStatus]:
    found, held = {}, living()
    auto = user in spare.users
    waits, numbers = (spare.why.name, spare.numbers) if auto and spare.waits else ("", ())
    for device, prefetcher in (dict.fromkeys(block.device for block in held) | prefetchers).items():
        here = [block for block in held if block.device == device]
        kept = [each for each in list(prefetcher.resident.values()) if each is not None] if prefetcher else []
        resident = sum(block.resident for block in here)
        resident += sum(
            0 if each.memory is None else each.memory.nbytes
            for each in ([*prefetcher.buffers, *kept] if prefetcher else ())
        )
        counts = (prefetcher.fetches, prefetcher.late) if prefetcher else (0, 0)
        in_host = sum(sum(block.sizes.values()) for block in here)
        layers = len(here) if auto else 0
        found[str(device)] = OffloadStatus(resident, in_host, *counts, layers, len(kept), waits, numbers)
    return found


def block_freed(device: torch.device) -> None:
    prefetcher = prefetchers.get(device)
    if prefetcher is not None:
        with prefetcher.lock:
            prefetcher.free_resident(freed=True)
            for reference in [each for each in list(prefetcher.seen) if each() is None]:
                prefetcher.seen.pop(reference, None)
        if all(block.device != device for block in living()):
            prefetcher.clear()


def release() -> None:
    """Free all copies, so that the next reads copy again."""
    for prefetcher in list(prefetchers.values()):
        prefetcher.clear()
    for block in living():  # ``swap_tensors`` refuses tensors with weak references
        block.identities.clear()


def allow(budget: int) -> None:
    for prefetcher in list(prefetchers.values()):
        prefetcher.allow(budget)


def wants(_rest: int) -> int:
    """Return the bytes read from host memory since ``allow``, on the GPU that read the most."""
    return max((sum(block.size for block in each.read_blocks()) for each in list(prefetchers.values())), default=0)


# Layers come before activations and the weight cache: docs/notes/index.md compares what a GiB of each saves.
user = User(-1, allow, taken, wants=wants)


def follow(_config: Any) -> None:
    """Apply the option ``offload``: share spare memory only with "auto", and free all copies if the option is off."""
    dequantizer.prefetch.on = gate.on
    auto = switch.value("offload") == "auto"
    if auto and user not in spare.users:
        spare.join(user)
    elif not auto and user in spare.users:
        allow(0)
        spare.leave(user)  # last, so that the next call repeats an interrupted one
    if not gate.on:
        release()


host_memory.on_block_freed.append(block_freed)
dequantizer.prefetch = Prefetch()
switch.follow(follow)
