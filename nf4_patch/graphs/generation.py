"""Capture a decoder layer as one CUDA graph, for a model that generates with transformers' StaticCache."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

from torch import Tensor

from ..patching.reasons import Reason
from .capture import GraphedLayer, Task
from .pool import Pool, Refusal, unowned


def tensors_of(static_layer: Any) -> list[Tensor]:
    """Return the tensors that a StaticCache holds for one decoder layer.

    These are the keys and the values, and in newer releases of transformers also the number of tokens.
    """
    return [value for value in vars(static_layer).values() if isinstance(value, Tensor)]


class GraphedForward(GraphedLayer):
    """The CUDA graph of a decoder layer in generation.

    The graph runs the layer's forward without gradients, and writes the layer's keys and values into a StaticCache. The
    StaticCache is part of the graph's key. So a new StaticCache, which transformers makes for each ``generate``, needs
    new graphs.
    """

    differentiable = False

    def capture(self, pool: Pool, task: Task) -> None:
        self.static_cache, self.written = weakref.ref(task.static_cache), set[int]()
        x = self.warmed_up(pool, task)
        if len(self.written) != 1:
            raise Refusal(Reason.GRAPH_STATE, f"it writes {len(self.written)} layers of the static cache")
        (self.index,) = self.written
        self.addresses = self.found_addresses()
        _, y = self.captured_forward(pool, task, x)
        self.x, self.y = unowned(x), unowned(y)
        self.alive = True

    def forward_of(self, task: Task, x: Tensor, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """Run the layer. Return x and the layer's first result."""
        with task.environment.entered():
            return x, self.first_of(task.function(task.static_cache, x, [slot.buffer for slot in self.slots]), task)

    def run(self, task: Task, x: Tensor) -> list[Tensor]:
        """Run the forward once for the warm-up. Note in ``written`` which layers of the static cache the forward wrote.

        Afterwards the static cache gets its old number of tokens back. The new keys and values stay in the static
        cache, because the first replay writes the same keys and values to the same place.
        """
        attributes = [{**vars(layer)} for layer in task.static_cache.layers]
        layers = [tensors_of(layer) for layer in task.static_cache.layers]
        before = [[tensor._version for tensor in tensors] for tensors in layers]
        counts = [(tensor, tensor.clone()) for tensors in layers for tensor in tensors if tensor.dim() == 0]
        try:
            self.forward_of(task, x)
        finally:
            after = [[tensor._version for tensor in tensors] for tensors in layers]
            self.written |= {index for index, versions in enumerate(after) if versions != before[index]}
            for tensor, count in counts:
                tensor.copy_(count)
            changed = False
            for layer, found in zip(task.static_cache.layers, attributes, strict=True):
                changed |= not all(map(is_, vars(layer).values(), found.values()))
                vars(layer).update(found)
        if changed:
            raise Refusal(Reason.GRAPH_STATE, "a call changes an attribute of the static cache")
        return []

    def found_addresses(self) -> list[int]:
        static_cache: Any = self.static_cache()
        return [tensor.data_ptr() for tensor in tensors_of(static_cache.layers[self.index])]

    def is_in_place(self) -> bool:
        return super().is_in_place() and self.found_addresses() == self.addresses

    def reset(self) -> None:
        self.alive = False
        self.first.reset()
