"""``cache="auto"``: what the cache may take is found by watching a training.

It starts with nothing. After two training steps at the largest batch so far, the memory that is free on the GPU, less a
margin, is its own: PyTorch has reserved by then what such steps take. Before a forward pass of more rows or longer
sequences than any so far, before the first step of another optimizer, and where memory runs short, it gives back all of it
and watches again.

A training step ends with the forward pass after it: one step may call several optimizers, or one for every layer in the
middle of the backward pass.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..nf4.runtime import is_capturing
from ..patching.context import backward_in_progress
from ..patching.option import size_in_words
from ..patching.replacement import Fallbacks
from .kept import nobody

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
        self.sizes: set[tuple[int, int, int]] = set()  # features, rows and length of the forward passes so far
        self.latest: tuple[torch.Size, ...] = ()
        self.optimizers = WeakIdKeyDictionary()  # that have made their state; by id: one may have no hash
        self.stepped = False  # an optimizer, since the latest forward pass
        self.steps = 0  # of the training, since the latest ``wait``
        self.waits = True
        self.next_look = 0.0
        self.forwarded: Callable[[], torch.Tensor | None] = nobody  # the latest argument of ``forward``
        self.alone: dict[int, int] = {}  # ``MemoryInfo.others`` by device, when something was taken
        self.needed: dict[int, int] = {}  # bytes by device that PyTorch had reserved without the cache, at most
        self.why = "nothing before a training"
        self.attempt = Fallbacks("cache.auto").attempt  # an error here stops neither a forward pass nor an optimizer
        self.hooks = (
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        )

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.may_take = lambda budget: None  # another thread may be in ``observe``

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.attempt(self.started, optimizer)

    def started(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = True
            self.wait("an optimizer makes its state")

    def after_step(self, *_: Any) -> None:
        self.stepped = True

    def observe(self, *inputs: Any) -> None:
        """Call ``observed`` so that its errors cannot interrupt the forward pass."""
        self.attempt(self.observed, *inputs)

    def forward(self, x: Any) -> None:
        """``observe`` the input of an autograd function. The op that it calls then skips the same tensor."""
        self.observe(x)
        self.forwarded = weakref.ref(x) if isinstance(x, torch.Tensor) else nobody

    def observed(self, *inputs: Any) -> None:
        """A forward pass is about to read weights; the tensors in ``inputs`` are its activations, [..., length, features],
        tokens, [..., length], and what else it takes."""
        found = [x for x in tensors(inputs) if x.is_cuda]
        if not found or is_capturing():
            return
        if self.stepped and backward_in_progress() == -1:  # not the recompute of a checkpointed block
            self.stepped = False
            self.steps += 1
        shapes = tuple(x.shape for x in found)
        if shapes != self.latest:
            self.latest = shapes
            features, rows, lengths = zip(*map(size_of, found), strict=True)
            self.batch(features[0], max(rows), max(lengths))
        if self.waits and self.steps >= STEPS:
            self.take()
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + SECONDS
            self.look()

    def batch(self, features: int, rows: int, length: int) -> None:
        """One that is larger than all before, in rows or in length, may need everything. Images have other features than text."""
        if not any(features == known[0] and rows <= known[1] and length <= known[2] for known in self.sizes):
            self.sizes.add((features, rows, length))
            self.wait(f"the largest batch so far has {rows} tokens, sequences of {length}")

    def look(self) -> None:
        """Give everything back where memory runs short, or where another process came to the GPU."""
        for device, size in list(self.taken.items()):
            if not size:
                continue
            memory = MemoryInfo.of(device)
            if memory.free < memory.margin // 2:
                self.wait(f"device {device} had {size_in_words(memory.free)} left")
            elif memory.others > self.alone.get(device, 0) + SLACK:
                self.wait(f"another process came to device {device}")

    def wait(self, why: str) -> None:
        """Give everything back, to PyTorch and to the driver: what PyTorch has reserved is then what the steps take."""
        self.steps, self.waits = 0, True
        self.why = f"nothing yet, waiting for {STEPS} training steps: {why}"
        held = any(self.taken.values())
        self.may_take(0)
        if held and not is_capturing():
            torch.cuda.empty_cache()

    def take(self) -> None:
        """What is free where training steps have reserved what they need."""
        devices = [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]
        found = {device: MemoryInfo.of(device) for device in devices}
        for device, memory in found.items():
            self.needed[device] = max(self.needed.get(device, 0), memory.reserved)
            if memory.others > self.alone.setdefault(device, CONTEXT) + SLACK:
                self.why, self.steps = f"nothing, while another process uses device {device}", 0
                return
            self.alone[device] = memory.others
        budget = min(m.free + m.reserved - self.needed[device] - m.margin for device, m in found.items())
        if budget <= 0:
            self.why, self.steps = "nothing: at the largest batch so far no more than the margin was free", 0
            return
        self.waits = False
        self.why = f"{size_in_words(budget)}: what was free at the largest batch so far, less a margin"
        torch.cuda.empty_cache()  # what is kept then does not lie inside a block that a step wants whole
        self.may_take(budget)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def size_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Features (0: none), rows and length of activations, a mask of three dimensions or more, or tokens."""
    if x.dim() and (x.is_floating_point() or x.dim() > 2):
        *sizes, features = x.shape
    else:
        sizes, features = list(x.shape), 0
    return features, math.prod(sizes), sizes[-1] if sizes else 1


class MemoryInfo(NamedTuple):
    """Of a GPU, in bytes."""

    free: int  # what PyTorch could get more
    reserved: int  # what it has
    others: int  # what it has not: the contexts of this process and all that others take
    margin: int  # what is left alone

    @classmethod
    def of(cls, device: int) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        allowed = min(free, int(fraction * total) - reserved)
        return cls(allowed, reserved, total - free - reserved, MARGIN + int(MARGIN_PART * fraction * total))
