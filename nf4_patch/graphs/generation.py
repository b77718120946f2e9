"""Record a decoder layer as one CUDA graph, for a model that generates with transformers' StaticCache."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from operator import is_
from typing import Any

from torch import Tensor

from ..patching.reasons import Reason
from .capture import GraphedLayer, Task, Work
from .refusal import Refusal


def tensors_of(static_layer: Any) -> list[Tensor]:
    """Return the tensors that a StaticCache holds for one decoder layer.

    For attention, these are the keys, the values and, in newer releases of transformers, the number of tokens. For linear
    attention, they are the layer's states.
    """
    values = [each for v in vars(static_layer).values() for each in (v.values() if type(v) is dict else (v,))]
    return [value for value in values if isinstance(value, Tensor)]


class DecodeStep(Work):
    """The forward of one layer in generation, as the layer's graph records it."""

    def __init__(self, task: Task, x: Tensor, buffers: list[Tensor]):
        self.task, self.x, self.buffers, self.leaves = task, x, buffers, []
        self.written = set[int]()  # indices of the static cache's layers that the forward writes

    def forward(self, recompute: bool = False) -> Tensor:
        task = self.task
        with task.environment.entered():
            return self.first_of(task.function(task.static_cache, self.x, self.buffers))

    def run(self) -> list[Tensor]:
        """Run the forward once, and add the index of each cache layer that it changed to ``written``.

        Return an empty list, because no tensor gets a gradient.
        """
        with self.undone():
            self.forward()
        return []

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the static cache's number of tokens after the ``with`` block.

        The new keys and values stay, because the first replay overwrites them with equal ones.

        Raises:
            Refusal: the ``with`` block changes an attribute of the static cache.
        """
        static_layers = self.task.static_cache.layers
        attributes = [{**vars(layer)} for layer in static_layers]
        layers = [tensors_of(layer) for layer in static_layers]
        before = [[tensor._version for tensor in tensors] for tensors in layers]
        counts = [(tensor, tensor.clone()) for tensors in layers for tensor in tensors if tensor.dim() == 0]
        try:
            yield
        finally:
            after = [[tensor._version for tensor in tensors] for tensors in layers]
            self.written |= {index for index, versions in enumerate(after) if versions != before[index]}
            for tensor, count in counts:
                tensor.copy_(count)
            changed = False
            for layer, found in zip(static_layers, attributes, strict=True):
                changed |= not all(map(is_, vars(layer).values(), found.values()))
                vars(layer).update(found)
        if changed:
            raise Refusal(Reason.GRAPH_STATE, "a call changes an attribute of the static cache")


class GraphedForward(GraphedLayer):
    """The CUDA graph of a layer's forward in generation, which writes keys and values into one StaticCache.

    transformers makes a new StaticCache for each ``generate()``, which needs new graphs.
    """

    differentiable = False

    def record(self, task: Task, x: Tensor, buffers: list[Tensor]) -> None:
        self.static_cache, work = weakref.ref(task.static_cache), DecodeStep(task, x, buffers)
        self.warm_up(work)
        if len(work.written) != 1:
            raise Refusal(Reason.GRAPH_STATE, f"it writes {len(work.written)} layers of the static cache")
        (self.index,) = work.written
        self.addresses = self.found_addresses()
        self.record_forward(work)

    def found_addresses(self) -> list[int]:
        static_cache: Any = self.static_cache()
        return [tensor.data_ptr() for tensor in tensors_of(static_cache.layers[self.index])]

    def is_in_place(self) -> bool:
        return super().is_in_place() and self.found_addresses() == self.addresses
