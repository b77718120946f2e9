"""A stand-in for the CUDA calls of offload, with plain CPU tensors. Its copy stream runs only when it is waited for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy
import torch


class Event:
    def __init__(self) -> None:
        self.after: list[Any] = []  # what has to run before it: (stream, how many of its operations)

    def record(self, stream: Stream) -> None:
        self.after = [(stream, len(stream.queue) + stream.done)]

    def synchronize(self) -> None:
        for stream, count in self.after:
            stream.run(count)


class Stream:
    """A stream of operations. The computing stream runs each operation at once, and a copy stream as late as possible."""

    def __init__(self, device: Any = None, computes: bool = False):
        self.queue: list[Any] = []
        self.done, self.computes = 0, computes
        self.waited_for: list[Any] = []  # streams and events

    def add(self, operation: Any) -> None:
        self.queue.append(operation)
        if self.computes:
            self.run(self.done + len(self.queue))

    def run(self, count: int) -> None:
        while self.done < count:
            operation = self.queue.pop(0)
            self.done += 1
            operation()

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)
        waited = SimpleNamespace(after=list(event.after))
        self.add(lambda: Event.synchronize(waited))

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream)
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.run(self.done + len(self.queue))


class Cuda:
    """Stand-in for ``host_memory.Cuda``. ``limit`` is how many bytes can be pinned."""

    kind, event = "cpu", Event

    def __init__(self, limit: float = float("inf")):
        self.compute, self.limit = Stream(computes=True), limit
        self.pinned: dict[int, int] = {}
        self.running: list[Stream] = []
        self.copies: list[int] = []  # addresses in host memory, in the order in which copies are started
        self.captured = False

    stream = Stream

    def handle(self, device: int) -> int:
        return id(self.compute)

    def current_stream(self, device: torch.device) -> Stream:
        return self.compute

    @contextlib.contextmanager
    def running_on(self, stream: Stream):
        self.running.append(stream)
        yield
        self.running.pop()

    def is_captured(self, device: int) -> bool:
        return self.captured

    def register(self, host: torch.Tensor, device: torch.device) -> str:
        if sum(self.pinned.values()) + host.nbytes > self.limit:
            return "cudaErrorMemoryAllocation"
        self.pinned[host.data_ptr()] = host.nbytes
        return ""

    def unregister(self, host: torch.Tensor, device: torch.device) -> None:
        del self.pinned[host.data_ptr()]

    def mapped(self, part: Any, device: torch.device) -> torch.Tensor:
        owner = SimpleNamespace(__array_interface__=part.__cuda_array_interface__ | {"version": 3}, part=part)
        return torch.as_tensor(numpy.asarray(owner))

    def copy(self, place: torch.Tensor, host: torch.Tensor) -> None:
        self.copies.append(host.data_ptr())
        place.fill_(0xFF)  # what is read before it arrives is wrong
        self.running[-1].add(lambda: place.copy_(host))
