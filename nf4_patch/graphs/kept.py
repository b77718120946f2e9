"""Record a decoder layer without a recompute: the forward's graph keeps what the backward's graph reads.

All kept layers of a GPU share one memory pool. Their activations lie side by side in it, in the order in which the layers were
recorded. What a graph uses for a while may lie where the activations of *later* layers lie. So a layer may run only while no
later layer's activations wait for their backward. Layers run in this order in ordinary training. In any other order, and while
activations of another shape wait, a layer recomputes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..activations import layers as keeping
from ..activations.layers import activations
from ..memory.spare import spare
from ..memory.waits import Waits
from ..patching.reasons import Reason
from .calls import LayerCall
from .capture import GraphedLayer, Task, Work, swapped
from .recorder import Recorder
from .refusal import Refusal


class Token:
    """Stands for the layer's input among the saved tensors of a call. Autograd frees the token together with them."""


class Generation:
    """Kept layers that were recorded one after another in one forward pass."""

    def __init__(self) -> None:
        self.size = self.nbytes = 0
        # What keeps the activations allocated while further layers are recorded: each layer's input and autograd graph
        self.held: list[Any] = []


class Keeper:
    """The memory of all kept layers of a GPU. Kept activations of different shapes share it."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.generation = Generation()
        # layers whose activations may wait for their backward, the latest last. Their calls hold them, this list does not.
        self.waiting: list[weakref.ref[KeptLayer]] = []
        self.counted = 0  # bytes that ``activations`` counts for this memory

    def top(self) -> KeptLayer | None:
        """Return the last layer whose activations wait for their backward."""
        while self.waiting:
            layer = self.waiting[-1]()
            if layer is not None and layer.token() is not None:
                return layer
            self.waiting.pop()
        return None

    def is_open(self) -> bool:
        """Return whether a layer can be recorded now, without writing over activations that wait for their backward."""
        top = self.top()
        return top is None or (top.generation is self.generation and top.index == self.generation.size - 1)

    def continues(self, key: Any) -> bool:
        """Return whether the layer before was recorded just now, for the same kind of call."""
        top = self.top()
        return top is not None and top.key == key and self.is_open()

    def begin(self) -> Generation:
        """Return the generation that the next recorded layer joins.

        Raises:
            Refusal: activations wait in memory that the recording would write.
        """
        if not self.is_open():
            raise Refusal(Reason.GRAPH_REUSED, "activations of another forward wait for their backward")
        if self.top() is None:
            self.generation.held.clear()
            self.generation = Generation()
        return self.generation

    def has_room(self, held: int) -> bool:
        """Return whether a layer that holds so many bytes fits into the budget. Its backward takes about as much for a while."""
        used = 0 if self.top() is None else self.generation.nbytes
        grows = max(used + 2 * held - self.counted, 0)
        return activations.taken.get(self.recorder.device, 0) + grows <= activations.budget

    def count(self, size: int) -> None:
        activations.add(self.recorder.device, size - self.counted)
        self.counted = size

    def close(self) -> None:
        self.generation.held.clear()
        self.count(0)
        self.recorder.close()


class KeptWork(Work):
    """What the graphs of a kept layer record: the forward with gradients, and the backward."""

    keeps = True

    def forward(self, recompute: bool = False) -> Tensor:
        def plain(function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments)

        with self.task.environment.entered(), swapped(self.trained, self.aliases):
            result = self.first_of(self.task.function(plain, self.leaf, self.buffers))
        if not result.requires_grad:
            raise Refusal(Reason.GRAPH_ARGUMENTS, "nothing in it requires a gradient")
        return result

    def recompute_and_backward(self, y: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        return self.backward(y, gradient)


class KeptLayer(GraphedLayer):
    """The two CUDA graphs of a layer that keeps its activations: one for the forward, one for the backward."""

    keeps = True
    work_of: Any = KeptWork
    token: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference to the Token of the latest call

    def __init__(self, keeper: Keeper, task: Task, key: Any):
        self.keeper, self.generation, self.key = keeper, keeper.begin(), key
        super().__init__(keeper.recorder, task)
        self.index, self.generation.size = self.generation.size, self.generation.size + 1
        self.generation.nbytes += self.nbytes
        keeper.count(keeper.recorder.taken)

    def hold(self, work: Work, y: Tensor) -> None:
        self.generation.held.append((work.x, y.grad_fn))

    def may_forward(self) -> bool:
        """Return whether a replay of the forward would write over no activations that wait for their backward."""
        top = self.keeper.top()
        return top is None or (top.generation is self.generation and top.index < self.index)

    def began(self, token: Token) -> None:
        """Note that a forward is about to write the layer's activations."""
        self.token = weakref.ref(token)
        self.keeper.waiting.append(weakref.ref(self))

    def may_backward(self) -> bool:
        """Return whether a replay of the backward would write over no activations that wait for their backward."""
        return self.keeper.top() is self and self.fingerprint.is_in_place() and self.reads_valid_pins()

    def reset(self) -> None:
        """Free the graphs. If a call still waits for its backward, its graphs are freed together with the call."""
        self.alive = False
        if self.token() is None:
            super().reset()


def kept_by(token: Token, graph: KeptLayer) -> Any:
    """Return the context in which a call of the layer saves its input: as the token, because the graph has a copy of it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: token, lambda _: graph.x)


# --- which calls keep their activations ---


def why_not_kept(call: LayerCall) -> Reason | None:
    """Return the Reason why the layer has to recompute in this call, or None if its activations may be kept."""
    if not call.trains or activations.mode == "off":
        return Reason.ACTIVATIONS_BUDGET
    if activations.mode == "auto" and spare.waits:
        return Reason.ACTIVATIONS_WAITING
    if not call.layer.gradient_checkpointing:
        return None
    record = activations.record_of(call.layer)
    why = keeping.why_not_unwatched(call.x, call.args, call.kwargs, call.checkpoint, record)
    return Reason.ACTIVATIONS_WAITING if why is None and estimate_of(call) is None else why


def estimate_of(call: LayerCall) -> int | None:
    """Return how many bytes the layer's activations take at most. None: that is not known yet. Eager calls measure it."""
    return activations.record_of(call.layer).estimate(keeping.InputSize.of(call.x))


def is_measured(call: LayerCall) -> bool:
    """Return whether it is known how much memory the layer's activations take, or nothing will be kept."""
    return not call.layer.gradient_checkpointing or spare.why is Waits.MARGIN or estimate_of(call) is not None


def may_record(keeper: Keeper | None, key: Any, was_recorded: bool) -> bool:
    """Return whether a layer can be recorded now as one that keeps its activations.

    Args:
        was_recorded: whether it has such a recording already, which cannot be replayed now. The layer was recorded together
            with others, so it is recorded again only if this call follows one of a layer that was recorded just now.
    """
    if keeper is None:
        return not was_recorded
    return keeper.continues(key) if was_recorded else keeper.is_open()


def has_room_to_keep(call: LayerCall, keeper: Keeper | None) -> bool:
    if not call.layer.gradient_checkpointing:
        return True  # training needs the memory without graphs, too
    held = estimate_of(call) or 0
    if keeper is None:
        return activations.taken.get(call.x.get_device(), 0) + 2 * held <= activations.budget
    return keeper.has_room(held)
