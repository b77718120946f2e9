"""Find the memory that training leaves free, by observing the training, and share it among its users.

After two training steps at the largest batch so far, PyTorch has reserved as much memory as such steps need. The budget is
then the memory that is still free, less a margin. Users get it in the order of their rank.

All users give their memory back before a larger batch (more rows or longer sequences), and before the first step of another
optimizer. They also give it back when free memory runs short, when another process starts to use the GPU, and when
transformers loads a model. Then they wait for two more steps.

A training step is counted when the next forward pass begins, because it can have several optimizer steps (one per layer).
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import le
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..nf4 import runtime
from ..nf4.identity import nobody
from ..patching.context import backward_in_progress
from ..patching.locks import Block, new_lock
from ..patching.replacement import Fallbacks
from .waits import Waits

STEPS = 2  # number of training steps to wait for; the first of them creates the optimizer's state
SECONDS = 0.2  # seconds between two queries of the free memory; a query takes about 0.1 ms
# Spare memory leaves a margin of MARGIN bytes plus the fraction MARGIN_PART of the GPU's memory free.
# Training needs the margin, because equal training steps do not always take equal memory.
MARGIN, MARGIN_PART = 2**29, 1 / 24
CONTEXT = 2**31  # most bytes that this process's CUDA context takes; if more are in use, another process has them
SLACK = 2**28  # if the memory outside PyTorch grows by more bytes than this, another process has started to use the GPU


Size = tuple[int, bool, int, int]  # of a batch: (features, whether autograd records it, rows, length)


def everything(_rest: int) -> int:
    return sys.maxsize


@dataclass(eq=False)
class User:
    """A part of nf4_patch that uses spare memory.

    Attributes:
        rank: users with a lower rank get memory first.
        allow: sets the budget in bytes per GPU. With 0, gives back all memory that can be freed now.
        taken: bytes held now, by device.
        most: the most bytes held since ``give_back``, by device. If None, ``taken`` is used instead.
        wants: returns how many bytes per GPU the user can use, given how many bytes are left.
    """

    rank: int
    allow: Callable[[int], None]
    taken: Mapping[int, int]
    most: Mapping[int, int] | None = None
    wants: Callable[[int], int] = everything
    share: int = 0  # the budget that the user got last


class Spare:
    """Shares the spare memory of the process among its users. Observes the training while there are users."""

    def __init__(self) -> None:
        self.users: list[User] = []
        self.lock = new_lock()
        self.ignoring = Block()  # in which the forward passes of a thread give no memory back
        self.hooks: tuple[Any, ...] = ()
        # ``attempt`` calls a function and logs its errors, so that they do not interrupt the training
        self.attempt = Fallbacks("memory.spare").attempt
        self.forget()

    def forget(self) -> None:
        """Discard all observations of the training."""
        self.sizes: set[Size] = set()  # of the forward passes so far, except those in ``pending``
        self.pending: set[Size] = set()  # of recorded forward passes since the latest step; some might get no backward
        self.measured: set[Size] = set()  # of these, the sizes whose memory is in ``needed``
        self.stateless: set[Size] = set()  # of the forward passes before the latest optimizer had its state
        self.latest: tuple[Any, ...] = ()  # of the latest observed tensors: shape, and whether autograd records it
        self.optimizers = WeakIdKeyDictionary()  # optimizers that made a step, by id, because some are not hashable
        self.trains = False  # whether ``optimizers`` ever had an element
        self.stepped = False  # whether an optimizer stepped since the latest forward pass
        self.steps = 0  # training steps since the latest ``give_back``
        self.why: Waits  # why there is no budget, while ``waits`` is True
        self.numbers: tuple[int, ...]  # for the sentence of ``why``
        self.waits = True
        self.next_look = 0.0
        self.unsettled = False  # whether memory of the users was in use when they gave it back
        self.latest_input: Callable[[], torch.Tensor | None] = nobody  # weak reference to ``observe``'s latest ``x``
        self.alone: dict[int, int] = {}  # bytes in use outside PyTorch when the budget was found, by device
        self.needed: dict[int, int] = {}  # the most bytes that PyTorch reserved without the users, by device
        self.retries: dict[int, int] = {}  # allocations that had to free unused memory first, by device
        self.why, self.numbers = Waits.TRAINING, ()

    def join(self, user: User) -> None:
        """Share spare memory with this user, after two more training steps have shown how much memory training needs."""
        with self.lock:
            if not self.users:
                self.forget()
                self.hooks = (
                    register_optimizer_step_pre_hook(self.before_step),
                    register_optimizer_step_post_hook(self.after_step),
                )
            self.users = sorted([*self.users, user], key=lambda each: each.rank)
            if self.steps or not self.waits:
                self.give_back(Waits.OTHER_OPTION)

    def leave(self, user: User) -> None:
        """Stop sharing spare memory with this user. Its budget is not changed any more."""
        with self.lock:
            if user not in self.users:
                return
            self.users = [each for each in self.users if each is not user]
            user.share = 0
            if not self.users:
                for hook in self.hooks:
                    hook.remove()
                self.forget()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.attempt(self.started, optimizer)

    def started(self, optimizer: torch.optim.Optimizer) -> None:
        """Give memory back before an optimizer's first step, which allocates the optimizer's state.

        Before each optimizer step, note how much memory PyTorch has reserved. Later, it may return memory to the driver: a
        script may call ``empty_cache`` after each step, and so does the recording of CUDA graphs.
        """
        if self.waits and not (self.stepped or self.unsettled):
            for device in runtime.devices_in_use():
                self.needed[device] = max(self.needed.get(device, 0), MemoryInfo.of(device).reserved)
        if optimizer not in self.optimizers:
            self.give_back(Waits.OPTIMIZER)
            self.stateless |= self.sizes | self.pending
            self.sizes, self.measured, self.pending = set(), set(), set()
            self.optimizers[optimizer] = self.trains = True  # last, so that the next call repeats an interrupted one

    def after_step(self, *_: Any) -> None:
        self.stepped = True

    def observe(self, x: Any) -> None:
        """Update the budget at the beginning of a forward pass. Errors are logged and do not interrupt the forward pass.

        Replaced functions that call each other report the same ``x``. Such repetitions are ignored until the next optimizer
        step.
        """
        if self.stepped or self.latest_input() is not x:
            self.attempt(self.observed, x)
            self.latest_input = weakref.ref(x) if isinstance(x, torch.Tensor) else nobody

    def observed(self, x: Any) -> None:
        """Update the budget. The batch size is read from ``x``, which is or contains activations [..., length, features]."""
        found = [x for x in tensors(x) if x.is_cuda or runtime.runs_on(x)]
        if not self.users or not found or self.ignoring.on or runtime.is_capturing():
            return
        if self.trains and not self.optimizers:  # the training is over, and another one may have begun
            self.forget()
            self.give_back(Waits.TRAINING)
        if self.stepped and backward_in_progress() == -1:  # not in the recompute of a checkpoint
            self.stepped, self.pending = False, set()
            self.steps += 1
            if self.waits and self.unsettled:
                self.settle()
                if not self.unsettled:  # memory of earlier steps was returned, so their sizes have to be measured again
                    self.steps, self.sizes = 1, {*self.measured}
        shapes = tuple((x.shape, is_recorded(x)) for x in found)
        if shapes != self.latest or self.pending or not self.sizes:
            sizes = [size_of(x) for x in found if x.is_floating_point() and x.dim()]
            if sizes:
                features, rows, lengths = zip(*sizes, strict=True)
                recorded = next(filter(is_recorded, found), None)
                self.before_batch((features[0], recorded is not None, max(rows), max(lengths)), recorded)
            self.latest = shapes
        if self.waits and self.steps >= STEPS:
            self.take()
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + SECONDS
            self.look()

    def before_batch(self, size: Size, recorded: torch.Tensor | None) -> None:
        """Give memory back, unless an earlier batch was at least as large, both in rows and in sequence length.

        Only batches with the same number of features are compared, because images and text differ in this number. Neither an
        evaluation nor a forward pass without a backward shows how much memory a training step needs.

        Args:
            recorded: an input that autograd records, or None.
        """
        if is_covered(size, self.sizes):
            return
        # A size in ``stateless`` needs no second step, because the optimizer has its state.
        needs_step = self.unsettled or self.steps >= STEPS or not is_covered(size, self.stateless)
        if needs_step and not is_covered(size, self.pending):
            self.give_back(Waits.BATCH, *size[2:])
        if recorded is None:
            self.sizes.add(size)  # last, so that the next call repeats an interrupted one
        else:
            # not a hook on the tensor, of which ``torch.save`` would warn
            recorded.grad_fn.register_prehook(lambda _gradients: self.trained(size))  # type: ignore[union-attr]
            self.pending.add(size)

    def trained(self, size: Size) -> None:
        """Note that the backward of a forward pass of this size runs."""
        if size in self.pending:
            self.sizes.add(size)

    def look(self) -> None:
        """Give memory back if free memory runs short, or if another process has started to use the GPU."""
        for device in {device for user in self.users for device, size in list(user.taken.items()) if size}:
            memory = MemoryInfo.of(device)
            retries = runtime.allocation_retries(device)
            if memory.free < memory.margin // 2 or retries > self.retries.get(device, retries):
                # Fragmentation counts as needed, so that the next budget is smaller.
                fragmented = memory.reserved - sum((user.most or user.taken).get(device, 0) for user in self.users)
                self.needed[device] = max(self.needed.get(device, 0), fragmented)
                self.give_back(Waits.MEMORY, memory.free // 2**20, device)
            elif memory.others > self.alone.get(device, 0) + SLACK:
                self.give_back(Waits.OTHER_PROCESS, device)

    def give_back(self, why: Waits, *numbers: int) -> None:
        """Return all users' memory to the driver, and wait for two training steps."""
        held = any(any((user.most or user.taken).values()) for user in self.users)
        self.unsettled |= held  # until ``settle`` ends, so that the next step repeats an interrupted one
        self.steps, self.waits = 0, True
        self.why, self.numbers = why, numbers
        for user in self.users:
            user.allow(0)
            user.share = 0
        if held and not runtime.is_capturing():
            self.settle()

    def before_model(self) -> None:
        """Give memory back before a model is loaded. Loading needs memory, and the next budget counts the new model."""
        if self.steps or not self.waits:
            self.give_back(Waits.MODEL)

    def settle(self) -> None:
        """Return PyTorch's unused blocks to the driver. If activations still wait for their backward, repeat this one step later."""
        for user in self.users:
            if user.share:  # an interrupt stopped ``give_back``
                user.allow(0)
                user.share = 0
        self.unsettled = any(any(user.taken.values()) for user in self.users)
        runtime.empty_cache()

    def take(self) -> None:
        """Share the memory that training leaves free, less the margin, among the users.

        The caller has waited until PyTorch has reserved all memory that a training step needs.
        """
        found = {device: MemoryInfo.of(device) for device in runtime.devices_in_use()}
        for device, memory in found.items():
            self.needed[device] = max(self.needed.get(device, 0), memory.reserved)
            if memory.others > self.alone.setdefault(device, CONTEXT) + SLACK:
                self.why, self.numbers, self.steps = Waits.OTHER_PROCESS, (device,), 0
                return
            self.alone[device] = memory.others
            self.retries[device] = runtime.allocation_retries(device)
        self.measured = {*self.sizes}
        rest = min((m.free + m.reserved - self.needed[device] - m.margin for device, m in found.items()), default=0)
        if rest <= 0:
            self.why, self.numbers, self.steps = Waits.MARGIN, (), 0
            return
        for user in self.users:
            user.share = min(rest, user.wants(rest))
            rest -= user.share
        next((user for user in reversed(self.users) if user.share), self.users[0]).share += rest
        # PyTorch's unused blocks are freed first. A cached weight could take part of a block that training needs whole.
        runtime.empty_cache()
        for user in self.users:
            user.allow(user.share)
        self.waits = False  # last, so that the next forward pass repeats an interrupted call


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def is_recorded(x: torch.Tensor) -> bool:
    """Return whether x was computed with gradients."""
    # ``requires_grad`` does not tell, because peft sets it on the embedding's result in evaluations too.
    return x.grad_fn is not None


def is_covered(size: Size, sizes: set[Size]) -> bool:
    return any(size[0] == known[0] and all(map(le, size[1:], known[1:])) for known in sizes)


def size_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Return (features, rows, length) of activations [..., length, features]."""
    *sizes, features = x.shape
    return features, math.prod(sizes), sizes[-1] if sizes else 1


class MemoryInfo(NamedTuple):
    """The memory of a GPU, in bytes."""

    free: int  # memory that PyTorch can still allocate from the driver
    reserved: int  # memory that PyTorch holds
    others: int  # memory in use outside PyTorch, by this process's CUDA context and by other processes
    margin: int  # memory that the users leave free

    @classmethod
    def of(cls, device: int) -> MemoryInfo:
        free, total = runtime.mem_get_info(device)
        reserved = runtime.memory_reserved(device)
        allowed = int(runtime.memory_fraction(device) * total)
        others = total - free - reserved
        return cls(min(free, allowed - reserved), reserved, others, MARGIN + int(MARGIN_PART * allowed))


spare = Spare()
