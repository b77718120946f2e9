"""``cache="auto"``: find the cache's budget by observing the training.

The budget starts at 0. After two training steps at the largest batch so far, PyTorch has reserved the memory that such
steps need. The budget is then the memory that is still free on the GPU, less a margin.

In four cases the cache gives all of its memory back and waits for two more training steps:

* before a forward pass with a larger batch (more rows or longer sequences),
* before the first step of another optimizer,
* when the free memory runs short,
* when another process starts to use the GPU.

A training step is counted when the next forward pass begins. Calls of ``optimizer.step`` are not counted, because one
training step may have several of them, for example if every layer has an optimizer that runs during the backward pass.
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
from ..patching.replacement import Fallbacks
from .entry import nobody
from .option import Waits

STEPS = 2  # number of training steps to wait for; the first of them creates the optimizer's state
SECONDS = 0.2  # seconds between two queries of the free memory; a query takes about 0.1 ms
# The cache leaves a margin of MARGIN bytes plus the fraction MARGIN_PART of the GPU's memory free.
# Training needs the margin, because equal training steps do not always take equal memory.
MARGIN, MARGIN_PART = 2**29, 1 / 24
CONTEXT = 2**31  # most bytes that this process's CUDA context takes; if more are in use, another process has them
SLACK = 2**28  # if the memory outside PyTorch grows by more bytes than this, another process has started to use the GPU


class Auto:
    """Find the budget of the cache. ``why`` and ``numbers`` say in ``status()`` why there is none.

    Args:
        set_budget: a function that sets the budget in bytes per GPU. A budget of 0 drops every cached weight.
        taken: the bytes that the cache uses now, by device.
    """

    def __init__(self, set_budget: Callable[[int], None], taken: Mapping[int, int]):
        self.set_budget, self.taken = set_budget, taken
        self.sizes: set[tuple[int, int, int]] = set()  # (features, rows, length) of the forward passes so far
        self.latest: tuple[torch.Size, ...] = ()  # shapes of the latest observed tensors
        self.optimizers = WeakIdKeyDictionary()  # optimizers that made a step, by id, because some are not hashable
        self.stepped = False  # whether an optimizer stepped since the latest forward pass
        self.steps = 0  # training steps since the latest ``wait``
        self.numbers: tuple[int, ...]
        self.waits = True
        self.next_look = 0.0
        # weak reference to the tensor that the method ``forward`` got last
        self.forwarded: Callable[[], torch.Tensor | None] = nobody
        self.alone: dict[int, int] = {}  # bytes in use outside PyTorch when the budget was found, by device
        self.needed: dict[int, int] = {}  # the most bytes that PyTorch reserved without the cache, by device
        self.why, self.numbers = Waits.TRAINING, ()
        # ``attempt`` calls a function and logs its errors, so that they do not interrupt the training
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
            self.wait(Waits.OPTIMIZER)

    def after_step(self, *_: Any) -> None:
        self.stepped = True

    def observe(self, *inputs: Any) -> None:
        """Call ``observed``. Errors are logged, and do not interrupt the forward pass."""
        self.attempt(self.observed, *inputs)

    def forward(self, x: Any) -> None:
        """Observe the input ``x`` of an autograd function.

        The autograd function passes ``x`` on to an op whose replacement also observes its input. The attribute
        ``forwarded`` tells this replacement that ``x`` was already observed.
        """
        self.observe(x)
        self.forwarded = weakref.ref(x) if isinstance(x, torch.Tensor) else nobody

    def observed(self, *inputs: Any) -> None:
        """Update the budget at the start of a layer's forward, given the layer's arguments.

        The size of the batch is read from the activations of shape [..., length, features] among these arguments.
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
        """Drop the cache if this batch is larger than the earlier ones, because it may need more memory.

        It is not larger if one earlier batch had at least as many rows and at least as long sequences. Only batches
        with the same number of features are compared, because this number differs between images and text.
        """
        if not any(features == known[0] and rows <= known[1] and length <= known[2] for known in self.sizes):
            self.sizes.add((features, rows, length))
            self.wait(Waits.BATCH, rows, length)

    def look(self) -> None:
        """Drop the cache if the free memory runs short, or if another process has started to use the GPU."""
        for device, size in list(self.taken.items()):
            if not size:
                continue
            memory = MemoryInfo.of(device)
            if memory.free < memory.margin // 2:
                self.wait(Waits.MEMORY, memory.free // 2**20, device)
            elif memory.others > self.alone.get(device, 0) + SLACK:
                self.wait(Waits.OTHER_PROCESS, device)

    def wait(self, why: Waits, *numbers: int) -> None:
        """Drop the cache and wait for two training steps.

        The memory of the cache goes back to the driver. Then PyTorch's reserved memory is only what training needs.
        """
        self.steps, self.waits = 0, True
        self.why, self.numbers = why, numbers
        held = any(self.taken.values())
        self.set_budget(0)
        if held and not is_capturing():
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Set the budget to the memory that training leaves free, less the margin.

        After the training steps so far, PyTorch has reserved all the memory that a training step needs.
        """
        devices = [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]
        found = {device: MemoryInfo.of(device) for device in devices}
        for device, memory in found.items():
            self.needed[device] = max(self.needed.get(device, 0), memory.reserved)
            if memory.others > self.alone.setdefault(device, CONTEXT) + SLACK:
                self.why, self.numbers, self.steps = Waits.OTHER_PROCESS, (device,), 0
                return
            self.alone[device] = memory.others
        budget = min(m.free + m.reserved - self.needed[device] - m.margin for device, m in found.items())
        if budget <= 0:
            self.why, self.numbers, self.steps = Waits.MARGIN, (), 0
            return
        self.waits = False
        # PyTorch's unused blocks are freed first. A cached weight could take part of a block that training needs whole.
        torch.cuda.empty_cache()
        self.set_budget(budget)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def size_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the number of features, the number of rows and the length of activations [..., length, features]."""
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
