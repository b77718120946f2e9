"""Packed experts that wait in host memory: ``enable(experts="4bit", offload="6GiB")``.

A stack in host memory stays a CUDA tensor. Its memory is the host's, pinned and mapped, and a GPU reads it at the same address
over the bus: whatever is done to a parameter is done to this one too, only slower. What makes it fast is one thing more: while
the experts of one layer compute, those of the next are copied into a buffer on the GPU, and are decoded there.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...config import ConfigError, size_in_words
from ...nf4.weight import Weight
from ..cache.store import cache, is_captured
from ..context import modes_active, transforms_active
from ..dequantizer import Dequantizer
from ..locks import new_lock
from ..quant_state import new, weight_of
from ..reasons import Reason
from ..status import OffloadStatus
from ..switch import switch

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags
ALIGNMENT = 256  # bytes, as of PyTorch's allocator
gate = switch.gates["offload"]


class Cuda:
    """What is asked of CUDA. Tests put one of plain CPU tensors in its place."""

    event: Callable[[], Any] = torch.cuda.Event
    stream: Callable[[torch.device], Any] = torch.cuda.Stream
    current_stream: Callable[[torch.device], Any] = staticmethod(torch.cuda.current_stream)
    running_on: Callable[[Any], AbstractContextManager[Any]] = staticmethod(torch.cuda.stream)

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def is_captured(self, device: torch.device) -> bool:
        return is_captured(device.index)

    def register(self, host: Tensor, device: torch.device) -> str:
        """Pin memory and map it into the address space of every GPU. What went wrong, or ""."""
        with torch.cuda.device(device):  # which PyTorch then takes for the memory's
            code = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
        if not int(code):
            return ""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # or the next kernel of this process would raise what CUDA remembers
        return str(torch.cuda.cudart().cudaGetErrorString(code))

    def unregister(self, host: Tensor, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # a kernel may still read it
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())

    def mapped(self, block: Block) -> Tensor:
        """uint8 [bytes] on the GPU, whose memory is the block's. It keeps the block alive."""
        return torch.as_tensor(block, device=block.device)

    def copy(self, place: Tensor, host: Tensor) -> None:
        place.copy_(host, non_blocking=True)


cuda: Any = Cuda()


class Block:
    """Host memory that holds one tensor, as long as a CUDA tensor on it lives."""

    def __init__(self, tensor: Tensor, unit: Unit):
        """With a copy of ``tensor``.

        Raises:
            MemoryError: the memory is not there, or cannot be pinned.
        """
        self.device, self.dtype, self.shape = tensor.device, tensor.dtype, tensor.shape
        self.unit, self.version = unit, 0  # the version when it was read last
        try:
            # Shared, so that a fork need not copy what is pinned. PyTorch's own pinned memory is rounded up to a power of two
            self.host = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=torch.uint8)
            failure = cuda.register(self.host, self.device)
        except OSError as error:
            failure = str(error)
        if failure:
            held = sum(block.host.nbytes for block in list(blocks.values()))
            raise MemoryError(
                f"offload: {size_in_words(tensor.nbytes)} of host memory could not be pinned for packed experts, after "
                f"{size_in_words(held)} that are: {failure}. Free memory of the host, raise its limit for pinned memory "
                '(ulimit -l; docker run --ulimit memlock=-1), or leave more on the GPU, with a larger offload="...GiB"'
            )
        weakref.finalize(self, forget, cuda, self.host, self.device, os.getpid()).atexit = False
        self.host.copy_(tensor.reshape(-1).view(torch.uint8))
        self.__cuda_array_interface__ = {
            "shape": (self.host.nbytes,), "typestr": "|u1", "data": (self.host.data_ptr(), False), "version": 2
        }  # fmt: skip

    def view(self, data: Tensor) -> Tensor:
        """Bytes as the tensor that it holds."""
        return data.view(self.dtype).view(self.shape)


blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()  # by address, which is theirs alone


def forget(cuda: Any, host: Tensor, device: torch.device, process: int) -> None:
    """A block died."""
    if os.getpid() == process:  # a forked child has no CUDA
        cuda.unregister(host, device)
        if device in lanes and all(block.device != device for block in list(blocks.values())):
            lanes.pop(device).clear()


def in_host(tensor: Tensor, unit: Unit) -> Tensor:
    """The same tensor, in host memory."""
    block = Block(tensor, unit)
    blocks[block.host.data_ptr()] = block
    unit.blocks.add(block)
    result: Tensor = cuda.mapped(block)
    assert result.data_ptr() == block.host.data_ptr(), "this GPU does not share addresses with the host"
    return block.view(result)


# --- what follows what ---


class Line:
    """The units of one model on one GPU, and in which order it reads them."""

    def __init__(self, resident: int, largest: int):
        self.resident, self.largest = resident, largest  # bytes that stay on the GPU; bytes of a buffer
        self.now: Callable[[], Unit | None] = lambda: None
        self.before = -1  # the number of the unit that was read before the one that is read now

    def following(self, unit: Unit) -> Unit | None:
        """The unit that followed when this one was read after the same one as now; None where it is not known, or asked again.

        Forward and backward meet a layer from either side, so that both know where they go.
        """
        known = self.now()
        if known is unit:
            return None
        if known is not None:
            known.after[self.before] = weakref.ref(unit)
        self.before, self.now = -1 if known is None else known.number, weakref.ref(unit)
        return unit.after.get(self.before, lambda: None)()


class Unit:
    """The packed stacks of one experts module that are in host memory: fetched together."""

    numbers = itertools.count()

    def __init__(self, line: Line):
        self.line, self.number = line, next(self.numbers)
        self.blocks: weakref.WeakSet[Block] = weakref.WeakSet()
        self.after: dict[int, Callable[[], Unit | None]] = {}  # by the number of the unit before


# --- fetching ---


class Buffer:
    """Memory on the GPU into which a unit is copied."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.unit: Callable[[], Unit | None] = lambda: None
        self.places: dict[int, Tensor] = {}  # by address in host memory
        self.versions: dict[int, int] = {}
        self.arrived = cuda.event()
        self.uses: dict[Any, Any] = {}  # the event after the latest use, by stream

    def used(self, stream: Any) -> None:
        event = self.uses.setdefault(stream, cuda.event())
        event.record(stream)


class Lane:
    """Two buffers and the stream of copies of one GPU."""

    def __init__(self, device: torch.device):
        self.device, self.lock = device, new_lock()  # held from the wait for a copy until the decode is launched
        self.stream = cuda.stream(device)
        self.buffers = [Buffer(), Buffer()]  # the one that was read last is the first

    def decode(self, weight: Weight, unit: Unit, run: Callable[[Weight], Any]) -> Any:
        """What ``run`` makes of the weight where it has arrived."""
        versions = {t.data_ptr(): t._version for t in weight.tensors() if t.data_ptr() in blocks}
        with self.lock:
            buffer = next((each for each in self.buffers if each.unit() is unit), None)
            if buffer is None or any(buffer.versions.get(place) != version for place, version in versions.items()):
                for place, version in versions.items():
                    blocks[place].version = version
                buffer = buffer or self.buffers[1]
                self.fetch(buffer, unit, ahead=False)
            if buffer is self.buffers[1]:
                self.buffers.reverse()
            stream, places = cuda.current_stream(self.device), buffer.places
            stream.wait_event(buffer.arrived)
            arrived = [places.get(t.data_ptr(), t) if isinstance(t, Tensor) else t for t in weight[:3]]
            try:
                result = run(new(Weight, (*arrived, *weight[3:])))
            finally:
                buffer.used(stream)
            following = unit.line.following(unit)
            if following is not None and following is not self.buffers[1].unit():
                self.fetch(self.buffers[1], following, ahead=True)
            return result

    def fetch(self, buffer: Buffer, unit: Unit, ahead: bool) -> None:
        """Start the copy of a unit, after the last use of what the buffer holds."""
        found = list(unit.blocks)
        ends = [*itertools.accumulate(-(-block.host.nbytes // ALIGNMENT) * ALIGNMENT for block in found)]
        buffer.unit = lambda: None  # until all is under way
        if buffer.memory.nbytes < ends[-1]:
            self.wait(buffer)
            buffer.memory = torch.empty(0)  # freed first
            size = max(ends[-1], unit.line.largest)
            buffer.memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            buffer.used(cuda.current_stream(self.device))  # where its memory may have had another use
        if not ahead:  # what was written into a stack meanwhile
            self.stream.wait_stream(cuda.current_stream(self.device))
        for use in buffer.uses.values():
            self.stream.wait_event(use)
        places = {}
        with cuda.running_on(self.stream):
            for block, start in zip(found, (0, *ends), strict=False):
                place = buffer.memory[start : start + block.host.nbytes]
                cuda.copy(place, block.host)
                places[block.host.data_ptr()] = block.view(place)
        buffer.arrived.record(self.stream)
        buffer.uses.clear()
        buffer.places, buffer.versions = places, {block.host.data_ptr(): block.version for block in found}
        buffer.unit = weakref.ref(unit)
        fetches[self.device] += 1
        late[self.device] += not ahead

    def wait(self, buffer: Buffer) -> None:
        """Until its memory may be given back."""
        self.stream.synchronize()
        for use in buffer.uses.values():
            use.synchronize()

    def clear(self) -> None:
        with self.lock:
            for buffer in self.buffers:
                self.wait(buffer)
            self.buffers = [Buffer(), Buffer()]


lanes: dict[torch.device, Lane] = {}
fetches: Counter[torch.device] = Counter()
late: Counter[torch.device] = Counter()  # fetches that were not ahead of their use


def of_state(dequantizer: Dequantizer, packed: Tensor, state: Any, only_read: bool) -> Tensor | Reason:
    """As ``dequantizer.of_state``. What is in host memory is fetched first, unless a cached dense stack is known."""
    weight = weight_of(packed, state)
    in_plain_code = gate.on and blocks and not modes_active() and transforms_active() is None
    block = blocks.get(packed.data_ptr()) if in_plain_code and type(weight) is not Reason else None
    if block is None or cuda.is_captured(block.device) or any(tensor.is_inference() for tensor in weight.tensors()):
        return dequantizer.of_state(packed, state, only_read=only_read)
    unit, device = block.unit, block.device

    def decode(weight: Weight) -> Tensor | Reason:
        lane = lanes.get(device) or lanes.setdefault(device, Lane(device))
        result: Tensor | Reason = lane.decode(weight, unit, dequantizer.run)
        return result

    found = cache.read(weight, decode) if only_read and cache.on else None
    return decode(weight) if found is None else found


# --- loading ---

# Of models that are being loaded: the units by path, or why they cannot be placed, which transformers would only log
plans: weakref.WeakKeyDictionary[Any, dict[str, Unit] | str] = weakref.WeakKeyDictionary()


def packed_size(elements: int, nested: bool) -> int:
    """Bytes of a packed stack with blocks of 64 elements, and 256 blocks a block of the second level."""
    scales = -(-elements // 64)
    return -(-elements // 2) + (scales + 4 * -(-scales // 256) if nested else 4 * scales)


def plan(model: Any, stacks: Iterable[tuple[str, Any, int]]) -> None:
    """Decide which experts modules of a model, whole, go to host memory.

    Args:
        stacks: of each stack that will be packed its full name, its device and its packed bytes.

    Raises:
        ConfigError: the budget does not hold two buffers.
    """
    units: dict[torch.device, Counter[str]] = {}
    for name, place, size in stacks:
        device = torch.device(place)
        if cuda.serves(device):
            units.setdefault(device, Counter())[name.rpartition(".")[0]] += size
    chosen: dict[str, Unit] = {}
    plans[model], budget = chosen, switch.value("offload")
    for device, sizes in units.items():
        total, largest = sizes.total(), max(sizes.values())
        stays = budget - 2 * largest if isinstance(budget, int) else 0
        if budget == "off" or (isinstance(budget, int) and total <= budget):
            continue
        if stays < 0:
            raise ConfigError(
                f"offload={size_in_words(int(budget))!r} does not hold the two buffers on {device}, one experts module each: "
                f'give {size_in_words(2 * largest)} or more, or "all", which keeps only these'
            )
        line, share, resident = Line(0, largest), 0.0, 0
        for path, size in sizes.items():  # spread evenly, so that copies overlap with what computes
            share += stays / total * size
            if share >= size:
                share, resident = share - size, resident + size
            else:
                chosen[path] = Unit(line)
        line.resident = resident


def placed(model: Any, full_name: str, parameter: Any) -> Any:
    """A packed stack that carries its state, where it belongs."""
    unit = units_of(model).get(full_name.rpartition(".")[0])
    if unit is not None:
        state = parameter.quant_state
        try:
            parameter.data = in_host(parameter.data, unit)
            for level in (state, state.state2) if state.nested else (state,):
                level.absmax = in_host(level.absmax, unit)
        except MemoryError as error:
            plans[model] = str(error)
            raise
    return parameter


def units_of(model: Any) -> dict[str, Unit]:
    """The plan of a model that is being loaded.

    Raises:
        MemoryError: one of its stacks could not be placed.
    """
    units = plans.get(model, {})
    if isinstance(units, str):
        raise MemoryError(units)
    return units


def settled(parameter: Any) -> None:
    """A packed stack is in its module, and has the version from which on it counts what is written."""
    block = blocks.get(parameter.data_ptr())
    if block is not None:
        block.version = parameter._version


# --- what is said ---


def snapshot() -> dict[str, OffloadStatus]:
    """By GPU."""
    held: Counter[torch.device] = Counter()
    resident: Counter[torch.device] = Counter()
    for block in list(blocks.values()):
        held[block.device] += block.host.nbytes
    for device, line in {(block.device, block.unit.line) for block in list(blocks.values())}:
        resident[device] += line.resident
    return {str(each): OffloadStatus(resident[each], held[each], fetches[each], late[each]) for each in held | fetches}


def follow(_config: Any) -> None:
    if not gate.on:
        while lanes:
            lanes.popitem()[1].clear()


switch.follow(follow)
