"""The arguments of a layer that runs as a CUDA graph: their part of the key, and the static buffers that they are copied to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nf4.runtime import runs_on

PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
TENSORS = frozenset({Tensor, torch.nn.Parameter})
DROPPED = "num_items_in_batch"  # Trainer passes it to every layer, with a new value at each step; a layer that reads it is refused


class Unsupported(Exception):
    """Raised if a call has an argument that a graph cannot replay."""


def signature(value: Any, tensors: list[Tensor]) -> Any:
    """Return a hashable description of a layer's arguments, and append each distinct tensor to ``tensors``.

    The description has the layouts of tensors, not their contents.

    Raises:
        Unsupported: a graph cannot replay an argument. Graphs support plain values, tensors on the GPU, and tuples, lists
            and dicts of these. They support no inference tensors. Only the first tensor may require a gradient.
    """
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in (tuple, list):
        return (kind, *[signature(item, tensors) for item in value])
    if kind is dict:
        return (dict, *[(name, signature(item, tensors)) for name, item in value.items() if name != DROPPED])
    if kind not in TENSORS:
        raise Unsupported(kind.__name__)
    for index, other in enumerate(tensors):
        if other is value:
            # A repeated tensor is described by the index of its first occurrence, because both share one buffer.
            return index
    if tensors and value.requires_grad:
        raise Unsupported("a second argument that requires a gradient")
    if not runs_on(value) or value.is_inference():
        raise Unsupported("an inference tensor" if value.is_inference() else f"a tensor on {value.device}")
    tensors.append(value)
    return layout_of(value)


def replaced(value: Any, replacements: Callable[[Tensor], Any]) -> Any:
    """Return a copy of the arguments in ``value``, with ``replacements(tensor)`` in place of each tensor.

    The copy omits ``num_items_in_batch``, whose value changes at every step.
    """
    if isinstance(value, Tensor):
        return replacements(value)
    if type(value) in (tuple, list):
        return type(value)(replaced(item, replacements) for item in value)
    if type(value) is dict:
        return {name: replaced(item, replacements) for name, item in value.items() if name != DROPPED}
    return value


def flattened(value: Any) -> Any:
    """Return nested lists with the id of each item in ``value``, so that a comparison finds replaced or added items."""
    if type(value) in (tuple, list):
        return [flattened(item) for item in value]
    if type(value) is dict:
        return [(name, flattened(item)) for name, item in value.items()]
    return id(value)


class Slot:
    """A static buffer that graphs read, and a weak reference to the tensor that was last copied into the buffer."""

    def __init__(self, tensor: Tensor):
        self.layout = layout_of(tensor)
        sizes = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.expanded = sizes != tuple(tensor.shape)
        self.base = torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self.buffer = self.base.expand(tensor.shape) if self.expanded else self.base  # the layer reads this tensor
        self.source: Callable[[], Tensor | None] = lambda: None
        self.version = 0

    def load(self, tensor: Tensor) -> None:
        """Copy the tensor into the buffer, unless the buffer already holds its contents.

        All layers of a step get the same masks and position embeddings, so only the first layer copies them.
        """
        if self.source() is tensor and self.version == tensor._version:
            return
        source = tensor.as_strided(self.base.shape, self.base.stride()) if self.expanded else tensor
        self.forget()  # an interrupt after the copy must not leave the old source in place
        self.base.copy_(source)
        self.source, self.version = weakref.ref(tensor), tensor._version

    def forget(self) -> None:
        """Make the next ``load`` copy its tensor, even if the buffer already holds its contents."""
        self.source = lambda: None


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def slots_for(tensors: list[Tensor], slots: weakref.WeakSet[Slot]) -> list[Slot]:
    """Return one slot per tensor, loaded with it, and add new slots to ``slots``.

    A slot that holds the tensor is preferred, then one of the same layout whose last tensor was freed.
    """
    taken: list[Slot] = []
    for tensor in tensors:
        free = [slot for slot in slots if slot.layout == layout_of(tensor) and slot not in taken]
        holding = [slot for slot in free if slot.source() is tensor] or [slot for slot in free if slot.source() is None]
        slot = holding[0] if holding else Slot(tensor)
        slots.add(slot)
        slot.load(tensor)
        taken.append(slot)
    return taken
