"""``cache="auto"``: what the cache may take is found by watching a training.

It starts with nothing. After two steps of the optimizer at the largest batch so far, the memory that is free on the GPU,
less a margin, is its own: PyTorch has reserved by then what such steps take. Before a forward pass of more rows or longer
sequences than any so far, and where memory runs short, it gives back all of it and watches again: PyTorch uses what was
given back before it asks the driver for more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...config import size_in_words
from ..replacement import Fallbacks

STEPS = 2  # the first makes the optimizer's state
SECONDS = 0.2  # between two looks at the free memory, which takes the driver some 0.1 ms
MARGIN, MARGIN_PART = 2**29, 1 / 24  # bytes, and a part of the GPU's memory: what steps of one size differ by
CONTEXT = 2**31  # bytes that PyTorch does not know of: more is another process
SLACK = 2**28  # bytes by which they grow without one


class Auto:
    """Finds a budget. ``why`` says, for people, what was found or what it waits for."""

    def __init__(self, may_take: Callable[[int], None], taken: Mapping[int, int]):
        """
        Args:
            may_take: told the bytes of every GPU that the cache may take; 0: it drops everything.
            taken: bytes by device, as they are at any moment.
        """
        self.may_take, self.taken = may_take, taken
        self.shapes: set[tuple[int, int]] = set()  # rows and length of the forward passes so far
        self.latest: torch.Size | None = None
        self.steps = 0  # of the optimizer, since a forward pass was larger than all before
        self.next_look = 0.0
        self.alone: dict[int, int] = {}  # ``Memory.others`` by device, when something was taken
        self.why = "nothing before a training"
        self.attempt = Fallbacks("cache.auto").attempt  # an error here stops neither a forward pass nor an optimizer
        self.hook = register_optimizer_step_post_hook(lambda *_: self.after_step())

    def after_step(self) -> None:
        self.attempt(self.stepped)

    def stop(self) -> None:
        self.hook.remove()
        self.may_take = lambda budget: None  # another thread may be in ``observe``

    def observe(self, *inputs: Any) -> None:
        """As ``observed``, in the way of a forward pass."""
        self.attempt(self.observed, *inputs)

    def observed(self, *inputs: Any) -> None:
        """A forward pass is about to read weights; the first tensor of ``inputs`` is its activations, [..., length,
        features], or its tokens, [..., length]."""
        x = next((each for each in inputs if isinstance(each, torch.Tensor)), None)
        if x is None or not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return
        if x.shape != self.latest:
            self.latest = x.shape
            self.batch(*size_of(x))
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + SECONDS
            self.look()

    def batch(self, rows: int, length: int) -> None:
        """One that is larger than all before, in rows or in length, may need everything."""
        if not any(rows <= known[0] and length <= known[1] for known in self.shapes):
            self.shapes.add((rows, length))
            self.wait(f"the largest batch so far has {rows} tokens, sequences of {length}")

    def look(self) -> None:
        """Give everything back where memory runs short, or where another process came to the GPU."""
        for device, size in list(self.taken.items()):
            if not size:
                continue
            memory = Memory.of(device)
            if memory.free < memory.margin // 2:
                self.wait(f"device {device} had {size_in_words(memory.free)} left")
            elif memory.others > self.alone.get(device, 0) + SLACK:
                self.wait(f"another process came to device {device}")

    def wait(self, why: str) -> None:
        self.steps = 0
        self.why = f"nothing before {STEPS} more optimizer steps: {why}"
        self.may_take(0)

    def stepped(self) -> None:
        """A step of an optimizer is done."""
        self.steps += 1
        if self.steps != STEPS or not self.shapes or torch.cuda.is_current_stream_capturing():
            return
        devices = [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]
        found = {device: Memory.of(device) for device in devices}
        for device, memory in found.items():
            if memory.others > self.alone.setdefault(device, CONTEXT) + SLACK:
                self.why, self.steps = f"nothing, while another process uses device {device}", 0
                return
            self.alone[device] = memory.others
        budget = min(memory.free - memory.margin for memory in found.values())
        if budget <= 0:
            self.why, self.steps = "nothing: at the largest batch so far no more than the margin was free", 0
            return
        self.why = f"{size_in_words(budget)}: what was free at the largest batch so far, less a margin"
        torch.cuda.empty_cache()  # what is kept then does not lie inside a block that a step wants whole
        self.may_take(budget)


def size_of(x: torch.Tensor) -> tuple[int, int]:
    """Rows and length of activations or tokens."""
    sizes = x.shape[:-1] if x.is_floating_point() else x.shape
    return math.prod(sizes), sizes[-1] if sizes else 1


class Memory(NamedTuple):
    """Of a GPU, in bytes."""

    free: int  # what PyTorch could get more
    reserved: int  # what it has
    others: int  # what it has not: the contexts of this process and all that others take
    margin: int  # what is left alone

    @classmethod
    def of(cls, device: int) -> Memory:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        allowed = min(free, int(fraction * total) - reserved)
        return cls(allowed, reserved, total - free - reserved, MARGIN + int(MARGIN_PART * fraction * total))
