"""``cache="auto"``: find the cache's budget by observing the training.

The budget starts at 0. After two training steps at the largest batch so far, PyTorch has reserved the memory that such steps
need. The budget is then the memory that is still free on the GPU, less a margin.

In four cases the cache gives all of its memory back and waits for two more steps:

* before a forward pass with more rows or longer sequences than any earlier forward pass,
* before the first step of another optimizer,
* when memory runs short,
* when another process starts to use the GPU.

A training step ends with the next forward pass. A call of ``optimizer.step`` does not end it, because there may be
several such calls in a step: of several optimizers, or of one optimizer per layer that runs during the backward pass.
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
from .entry import nobody

STEPS = 2  # training steps to wait for; the first one creates the optimizer's state
SECONDS = 0.2  # seconds between two queries of the free memory; a query takes about 0.1 ms
# The margin is MARGIN bytes plus the fraction MARGIN_PART of the GPU's memory, because the memory of equal steps varies.
MARGIN, MARGIN_PART = 2**29, 1 / 24
CONTEXT = 2**31  # bytes outside PyTorch that the CUDA context may take; more belong to another process
SLACK = 2**28  # if the memory outside PyTorch grows by more bytes than this, another process has started to use the GPU


class Auto:
    """Find the budget of the cache. ``why`` explains the budget, or the wait for one, in ``status()``.

    Args:
        set_budget: sets the bytes per GPU; 0 drops every cached weight.
        taken: the bytes that the cache takes now, by device.
    """

    def __init__(self, set_budget: Callable[[int], None], taken: Mapping[int, int]):
        self.set_budget, self.taken = set_budget, taken
        self.sizes: set[tuple[int, int, int]] = set()  # (features, rows, length) of the forward passes so far
        self.latest: tuple[torch.Size, ...] = ()  # shapes of the latest observed tensors
        self.optimizers = WeakIdKeyDictionary()  # those that have stepped; by id, as an optimizer may not be hashable
        self.stepped = False  # whether an optimizer stepped since the latest forward pass
        self.steps = 0  # training steps since the latest ``wait``
        self.waits = True
        self.next_look = 0.0
        # weak reference to the latest argument of ``forward``
        self.forwarded: Callable[[], torch.Tensor | None] = nobody
        self.alone: dict[int, int] = {}  # MemoryInfo.others by device, at the time when the budget was found
        self.needed: dict[int, int] = {}  # for each device, the most bytes that PyTorch had reserved without the cache
        self.why = "nothing before a training"
        # logs errors, so that they interrupt no forward pass and no optimizer
        self.attempt = Fallbacks("cache.auto").attempt
        self.hooks = (
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        )

    def stop(self) -> None:
        """Remove the optimizer hooks, and stop changing the budget."""
        for hook in self.hooks:
            hook.remove()
        self.set_budget = lambda budget: None  # another thread may still be in ``observe``

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.attempt(self.started, optimizer)

    def started(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the cache before the first step of an optimizer, because this step allocates the optimizer's state."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = True
            self.wait("an optimizer creates its state")

    def after_step(self, *_: Any) -> None:
        self.stepped = True

    def observe(self, *inputs: Any) -> None:
        """Call ``observed`` so that its errors cannot interrupt the forward pass."""
        self.attempt(self.observed, *inputs)

    def forward(self, x: Any) -> None:
        """Observe the input of an autograd function.

        ``forwarded`` remembers the input, so that the op that the function calls does not observe it a second time.
        """
        self.observe(x)
        self.forwarded = weakref.ref(x) if isinstance(x, torch.Tensor) else nobody

    def observed(self, *inputs: Any) -> None:
        """Update the budget at the start of a layer's forward, given the layer's arguments.

        The size of the batch comes from the largest activations [..., length, features] among these arguments.
        """
        found = [x for x in tensors(inputs) if x.is_cuda]
        if not found or is_capturing():
            return
        if self.stepped and backward_in_progress() == -1:  # not in the recompute of a checkpoint
            self.stepped = False
            self.steps += 1
        shapes = tuple(x.shape for x in found)
        if shapes != self.latest:
            self.latest = shapes
            sizes = [size_of(x) for x in found if x.is_floating_point() and x.dim()]
            if sizes:
                features, rows, lengths = zip(*sizes, strict=True)
                self.batch(features[0], max(rows), max(lengths))
        if self.waits and self.steps >= STEPS:
            self.take()
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + SECONDS
            self.look()

    def batch(self, features: int, rows: int, length: int) -> None:
        """Drop the cache unless an earlier forward pass had at least as many rows and as long sequences.

        Batches are compared with earlier ones of the same feature count, because images and text have different ones.
        """
        if not any(features == known[0] and rows <= known[1] and length <= known[2] for known in self.sizes):
            self.sizes.add((features, rows, length))
            self.wait(f"the largest batch so far has {rows} tokens, sequences of {length}")

    def look(self) -> None:
        """Drop the cache if memory runs short, or if another process has started to use the GPU."""
        for device, size in list(self.taken.items()):
            if not size:
                continue
            memory = MemoryInfo.of(device)
            if memory.free < memory.margin // 2:
                self.wait(f"only {size_in_words(memory.free)} were free on device {device}")
            elif memory.others > self.alone.get(device, 0) + SLACK:
                self.wait(f"another process started to use device {device}")

    def wait(self, why: str) -> None:
        """Drop the cache and wait for two training steps.

        The memory goes back to the driver, so that PyTorch's reserved memory is again what the training needs.
        """
        self.steps, self.waits = 0, True
        self.why = f"nothing yet, waiting for {STEPS} training steps: {why}"
        held = any(self.taken.values())
        self.set_budget(0)
        if held and not is_capturing():
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Set the budget to the memory that is free now, less the margin.

        The training steps so far have made PyTorch reserve all the memory that a step needs.
        """
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
            self.why, self.steps = "nothing: no more than the margin was free at the largest batch so far", 0
            return
        self.waits = False
        self.why = f"{size_in_words(budget)}: what was free at the largest batch so far, less a margin"
        torch.cuda.empty_cache()  # so that no cached weight is placed inside a block that a training step needs whole
        self.set_budget(budget)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def size_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the features, the rows and the sequence length of activations [..., length, features]."""
    *sizes, features = x.shape
    return features, math.prod(sizes), sizes[-1] if sizes else 1


class MemoryInfo(NamedTuple):
    """The memory of a GPU, in bytes."""

    free: int  # memory that PyTorch can still allocate from the driver
    reserved: int  # memory that PyTorch holds
    others: int  # memory in use outside PyTorch, by this process's CUDA context and by other processes
    margin: int  # memory that the cache leaves free

    @classmethod
    def of(cls, device: int) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        allowed = min(free, int(fraction * total) - reserved)
        return cls(allowed, reserved, total - free - reserved, MARGIN + int(MARGIN_PART * fraction * total))
