"""Packed experts that wait in host memory: ``enable(experts="4bit", offload="6GiB")``.

A stack in host memory stays a CUDA tensor. Its memory is the host's, pinned and mapped, and a GPU reads it at the same address
over the bus: whatever is done to a parameter is done to this one too, only slower. What makes it fast is one thing more: while
the experts of one layer compute, those of the next are copied into a buffer on the GPU, and are decoded there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...nf4 import runtime
from ...nf4.weight import LIMIT, Weight
from ...option import ConfigError, size_in_words
from ..cache.store import cache, is_captured
from ..context import modes_active, transforms_active
from ..dequantizer import Dequantizer
from ..locks import new_lock
from ..quant_state import new, weight_of
from ..reasons import Reason
from ..switch import switch
from .option import OffloadStatus

SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags
ALIGNMENT = 256  # bytes, as of PyTorch's allocator
MORE = 'free memory of the host, or leave more on the GPU, with a larger offload="...GiB"'
gate = switch.gates["offload"]


class Cuda:
    """What is asked of CUDA. Tests put one of plain CPU tensors in its place."""

    kind, left = "cuda", list[tuple[Tensor, torch.device]]()
    event, stream, running_on = torch.cuda.Event, torch.cuda.Stream, staticmethod(torch.cuda.stream)
    current_stream, is_captured = staticmethod(torch.cuda.current_stream), staticmethod(is_captured)
    handle = staticmethod(runtime.current_stream)

    def register(self, host: Tensor, device: torch.device) -> str:
        """Pin memory and map it into the address space of every GPU. What went wrong, or ""."""
        cudart, same = torch.cuda.cudart(), ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(same), SAME_ADDRESS, device.index)
        if not same.value:
            return "this GPU does not read the host's memory at the host's address"
        with torch.cuda.device(device):  # which PyTorch then takes for the memory's
            code = cudart.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
        if not int(code):
            return ""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # or the next kernel of this process would raise what CUDA remembers
        return str(cudart.cudaGetErrorString(code))

    def unregister(self, host: Tensor, device: torch.device) -> None:
        """Now, or with the next one where a graph is being captured, which this would end."""
        self.left.append((host, device))
        while self.left and not torch.cuda.is_current_stream_capturing():
            host, device = self.left.pop()
            torch.cuda.synchronize(device)  # a kernel may still read it
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())

    def mapped(self, block: Block) -> Tensor:
        """uint8 [bytes] on the GPU, whose memory is the block's. It keeps the block alive."""
        return torch.as_tensor(block, device=block.device)

    def copy(self, place: Tensor, host: Tensor) -> None:
        place.copy_(host, non_blocking=True)


cuda: Any = Cuda()
Proof = tuple[int, int]  # which tensor, and its version


class Unit:
    """The packed stacks of one experts module that are in host memory: fetched together."""

    def __init__(self) -> None:
        self.resident = 0  # bytes of other modules that stay on the GPU, where they are counted with this one
        self.size = 0  # bytes of a buffer that it takes
        self.epoch = 0  # changes when a proof of a block does
        self.blocks: dict[int, weakref.ref[Block]] = {}  # by address
        # what followed when this one was read after another: forward and backward meet a layer from either side
        self.after: weakref.WeakKeyDictionary[Unit, weakref.ref[Unit]] = weakref.WeakKeyDictionary()


class Block:
    """Host memory that holds one tensor, as long as a CUDA tensor on it lives."""

    def __init__(self, tensor: Tensor, unit: Unit):
        """With a copy of ``tensor``.

        Raises:
            MemoryError: the memory is not there, or cannot be pinned.
        """
        self.device, self.unit, self.start = tensor.device, unit, unit.size
        self.proof: Proof | None = None  # when it was read last
        try:
            # Shared, so that a fork need not copy what is pinned. PyTorch's own pinned memory is rounded up to a power of two
            self.host = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=torch.uint8)
            failure = cuda.register(self.host, self.device)
        except OSError as error:
            failure = str(error)
        if failure:
            held = sum(block.host.nbytes for block in living())
            raise MemoryError(
                f"offload: {size_in_words(tensor.nbytes)} of host memory could not be pinned for packed experts, after "
                f"{size_in_words(held)} that are: {failure}. Raise the limit for pinned memory (ulimit -l; docker run --ulimit "
                f"memlock=-1), {MORE}"
            )
        weakref.finalize(self, forget, cuda, self.host, unit, self.device, os.getpid()).atexit = False
        self.host.copy_(tensor.reshape(-1).view(torch.uint8))
        place = {"shape": (self.host.nbytes,), "typestr": "|u1", "data": (self.host.data_ptr(), False)}
        self.__cuda_array_interface__ = place | {"version": 2}
        unit.size += -(-self.host.nbytes // ALIGNMENT) * ALIGNMENT
        blocks[self.host.data_ptr()] = unit.blocks[self.host.data_ptr()] = weakref.ref(self)


blocks: dict[int, weakref.ref[Block]] = {}  # by address, which is theirs alone


def nobody() -> None:
    return None


def living() -> list[Block]:
    return [block for reference in list(blocks.values()) if (block := reference()) is not None]


def forget(cuda: Any, host: Tensor, unit: Unit, device: torch.device, process: int) -> None:
    """A block died."""
    del blocks[host.data_ptr()], unit.blocks[host.data_ptr()]
    if os.getpid() == process:  # a forked child has no CUDA
        cuda.unregister(host, device)
        if device in lanes and all(block.device != device for block in living()):
            lanes[device].clear()


# --- fetching ---


class Buffer:
    """Memory on the GPU, of the copy stream's, into which units are copied."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.arrived = cuda.event()
        self.unit: Unit | None = None
        self.epoch = 0  # of the unit when it was copied
        self.proofs: dict[int, Proof | None] = {}  # by where a block begins
        self.streams: dict[int, Any] = {}  # on which it was read
        # what a weight's first tensors are here, by all that is known of them: the epoch, and None for one that is not here
        self.views: dict[Any, tuple[int, list[Tensor | None]]] = {}


class Lane:
    """Two buffers and the stream of copies of one GPU, and in which order units are read there."""

    def __init__(self, device: torch.device):
        self.device, self.lock = device, new_lock()  # held from the wait for a copy until the decode is launched
        self.stream = cuda.stream(device)
        self.buffers = [Buffer(), Buffer()]  # the one that was read last is the first
        self.before = self.now = Unit()
        self.fetches = self.late = 0

    def decode(self, weight: Weight, facts: Any, unit: Unit, run: Callable[[Weight], Any]) -> Any:
        """What ``run`` makes of the weight where it has arrived."""
        with self.lock:
            if self.buffers[1].unit is unit:
                self.buffers.reverse()
            buffer = self.buffers[0]
            epoch, views = buffer.views.get(facts, (-1, None))
            if views is None or buffer.unit is not unit or not epoch == buffer.epoch == unit.epoch:
                views = self.arrived(weight, facts, unit)
                if views is None:
                    return run(weight)
                buffer = self.buffers[0]
            if unit is not self.now:  # before this one is waited for: the copy begins at once
                following = self.following(unit)
                if following is not None and following.blocks and following is not self.buffers[1].unit:
                    self.fetch(self.buffers[1], following, ahead=True)
            handle = cuda.handle(self.device.index)
            if handle not in buffer.streams:
                stream = cuda.current_stream(self.device)
                stream.wait_event(buffer.arrived)
                buffer.streams[handle] = stream
            packed, absmax, absmax2 = views
            absmax, absmax2 = weight[1] if absmax is None else absmax, weight[2] if absmax2 is None else absmax2
            return run(new(Weight, (packed, absmax, absmax2, *weight[3:])))

    def arrived(self, weight: Weight, facts: Any, unit: Unit) -> list[Tensor | None] | None:
        """A weight's first tensors in the first buffer, fetched where they are not there as they are now. None where the packed
        bytes are a part of a block."""
        held = {}
        tensors = [tensor for tensor in weight[:3] if tensor is not None]
        for index, tensor in enumerate(tensors):
            block = unit.blocks.get(tensor.data_ptr(), nobody)()
            if block is not None and tensor.nbytes == block.host.nbytes and tensor.is_contiguous():
                held[index] = block, (id(tensor), tensor._version)
        if 0 not in held:
            return None
        proofs = self.buffers[0].proofs if self.buffers[0].unit is unit else {}
        if any(proofs.get(block.start) != proof for block, proof in held.values()):
            for block, proof in held.values():
                block.proof = proof
            unit.epoch += 1
            if self.buffers[0].unit is not unit:
                self.buffers.reverse()
            self.fetch(self.buffers[0], unit, ahead=False)
        buffer, views = self.buffers[0], list[Tensor | None]([None] * 3)
        assert buffer.memory is not None
        for index, (block, _) in held.items():
            place = buffer.memory[block.start : block.start + block.host.nbytes]
            views[index] = place.view(tensors[index].dtype).view(tensors[index].shape)
        if len(buffer.views) >= LIMIT:
            buffer.views.clear()
        buffer.views[facts] = unit.epoch, views
        return views

    def following(self, unit: Unit) -> Unit | None:
        """What followed the last time, if anything."""
        self.now.after[self.before] = weakref.ref(unit)
        self.before, self.now = self.now, unit
        known = unit.after.get(self.before)
        return None if known is None else known()

    def fetch(self, buffer: Buffer, unit: Unit, ahead: bool) -> None:
        """Start the copy of a unit, after the last use of what is in the buffer."""
        self.empty(buffer)
        if not ahead:  # what was written into a stack meanwhile
            self.stream.wait_stream(cuda.current_stream(self.device))
        with cuda.running_on(self.stream):
            if buffer.memory is None or buffer.memory.nbytes < unit.size:
                self.free(buffer)
                with torch.inference_mode(False):  # training reads there too
                    buffer.memory = torch.empty(unit.size, dtype=torch.uint8, device=self.device)
            for reference in list(unit.blocks.values()):
                if (block := reference()) is not None:
                    cuda.copy(buffer.memory[block.start : block.start + block.host.nbytes], block.host)
                    buffer.proofs[block.start] = block.proof
        buffer.arrived.record(self.stream)
        buffer.unit, buffer.epoch = unit, unit.epoch
        self.fetches += 1
        self.late += not ahead

    def empty(self, buffer: Buffer) -> None:
        """What is next in the copy stream may have its memory."""
        buffer.unit, buffer.proofs = None, {}
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


lanes: dict[torch.device, Lane] = {}


def of_state(dequantizer: Dequantizer, packed: Tensor, state: Any, only_read: bool) -> Tensor | Reason:
    """As ``dequantizer.of_state``. What is in host memory is fetched first, unless a cached dense stack is known."""
    block = None if modes_active() else blocks.get(packed.data_ptr(), nobody)()
    weight: Any = Reason.STATE_FIELDS if block is None else weight_of(packed, state)
    facts = None if type(weight) is Reason or transforms_active() is not None else facts_of(weight)
    if block is None or facts is None or cuda.is_captured(packed.get_device()):
        return dequantizer.of_state(packed, state, only_read=only_read)
    unit, lane = block.unit, lanes.get(block.device) or lanes.setdefault(block.device, Lane(block.device))

    def decode(weight: Weight) -> Tensor | Reason:
        result: Tensor | Reason = lane.decode(weight, facts, unit, dequantizer.run)
        return result

    found = cache.read(weight, decode) if only_read and cache.on else None
    return decode(weight) if found is None else found


def facts_of(weight: Weight) -> tuple[Any, ...] | None:
    """What changes when a weight's first tensors do; None where one counts no versions."""
    packed, absmax, absmax2, *_ = weight
    try:
        facts: tuple[Any, ...] = (
            packed.data_ptr(), id(packed), packed._version, packed.shape,
            absmax.data_ptr(), id(absmax), absmax._version, absmax.shape,
        )  # fmt: skip
        if absmax2 is not None:
            facts += absmax2.data_ptr(), id(absmax2), absmax2._version, absmax2.shape
    except RuntimeError:  # an inference tensor
        return None
    return facts


# --- loading ---

# Of models that are being loaded: the units by path, or why they cannot be placed, which transformers would only log
plans: weakref.WeakKeyDictionary[Any, dict[str, Unit] | str] = weakref.WeakKeyDictionary()


def packed_size(elements: int, nested: bool) -> int:
    """Bytes of a packed stack with blocks of 64 elements, and 256 blocks a block of the second level."""
    scales = -(-elements // 64)
    return -(-elements // 2) + (scales + 4 * -(-scales // 256) if nested else 4 * scales)


def free_memory() -> float:
    """Bytes of the host that can be had; infinite where Linux does not say."""
    with contextlib.suppress(OSError, KeyError), open("/proc/meminfo") as file:
        return 1024 * int(dict(line.split(":") for line in file)["MemAvailable"].split()[0])
    return float("inf")


def plan(model: Any, stacks: Iterable[tuple[str, Any, int]]) -> None:
    """Decide which experts modules of a model, whole, go to host memory.

    Args:
        stacks: of each stack that will be packed its full name, its device and its packed bytes.

    Raises:
        ConfigError: the budget does not hold two buffers.
        MemoryError: the host has less memory than is needed.
    """
    if not gate.on:
        return
    units: dict[torch.device, Counter[str]] = {}
    for name, place, size in stacks:
        if (device := torch.device(place)).type == cuda.kind:
            units.setdefault(device, Counter())[name.rpartition(".")[0]] += size
    chosen: dict[str, Unit] = {}
    plans[model], budget, wanted = chosen, switch.value("offload"), 0
    for device, sizes in units.items():
        total, largest = sizes.total(), max(sizes.values())
        if isinstance(budget, int) and total <= budget:
            continue
        stays = budget - 2 * largest if isinstance(budget, int) else 0
        if stays < 0:
            raise ConfigError(
                f"offload={size_in_words(int(budget))!r} does not hold the two buffers on {device}, one experts module each: "
                f'give "{-(-2 * largest // 2**20)}MiB" or more, or "all", which keeps only these'
            )
        share, resident = 0, total
        for path, size in sizes.items():  # spread evenly, so that copies overlap with what computes
            share += stays * size
            if share >= total * size:
                share -= total * size
            else:
                unit = chosen[path] = Unit()
                resident -= size
        unit.resident, wanted = resident, wanted + total - resident
    if wanted > (free := free_memory()):  # or Linux would end this process without a word
        raise MemoryError(
            f"offload: {size_in_words(wanted)} of host memory are needed, {size_in_words(int(free))} are free: {MORE}"
        )


def units_of(model: Any) -> dict[str, Unit]:
    """The plan of a model that is being loaded.

    Raises:
        MemoryError: one of its stacks could not be placed.
    """
    units = plans.get(model, {})
    if isinstance(units, str):
        raise MemoryError(units)
    return units


def placed(model: Any, full_name: str, parameter: Any) -> Any:
    """A packed stack that carries its state, where it belongs."""
    unit, state = units_of(model).get(full_name.rpartition(".")[0]), parameter.quant_state
    if unit is None:
        return parameter
    for owner, name in ((parameter, "data"), (state, "absmax"), (state.state2, "absmax"))[: 3 if state.nested else 2]:
        tensor = getattr(owner, name)
        try:
            setattr(owner, name, cuda.mapped(Block(tensor, unit)).view(tensor.dtype).view(tensor.shape))
        except MemoryError as error:
            plans[model] = str(error)
            raise
    return parameter


# --- what is said ---


def snapshot() -> dict[str, OffloadStatus]:
    """By GPU."""
    found, held = {}, living()
    for device, lane in (dict.fromkeys(block.device for block in held) | lanes).items():
        here = [block for block in held if block.device == device]
        resident = sum(unit.resident for unit in {block.unit for block in here})
        resident += sum(0 if each.memory is None else each.memory.nbytes for each in (lane.buffers if lane else ()))
        counts = (lane.fetches, lane.late) if lane else ()
        found[str(device)] = OffloadStatus(resident, sum(block.host.nbytes for block in here), *counts)
    return found


def follow(_config: Any) -> None:
    if not gate.on:
        for lane in lanes.values():
            lane.clear()


switch.follow(follow)
