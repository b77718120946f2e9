"""Record a decoder layer without a recompute: the forward graph's activations stay in memory for the backward graph.

All layers of a GPU that keep their activations share one memory pool. The activations lie side by side in the pool, in the
order in which the layers were recorded. A graph's temporary tensors may overlap the activations of *later* layers. So a layer
may run only while no later layer's activations wait for their backward, as in ordinary training. In any other order, and
while activations of another shape wait, a layer recomputes.
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
    """Stands in for the layer's input among the tensors that autograd saves for a call.

    Once autograd has freed the token, the call's activations are no longer needed.
    """


class Generation:
    """A group of layers with kept activations that were recorded one after another in one forward pass."""

    def __init__(self) -> None:
        self.size = self.nbytes = 0
        # each layer's input and autograd graph, which keep the activations allocated while further layers are recorded
        self.held: list[Any] = []


class Keeper:
    """The memory pool of one GPU for kept activations. Activations of different shapes share the pool."""

    counted = 0  # bytes that ``activations`` counts for this memory

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.generation = Generation()
        # layers whose activations might wait for their backward, in call order; weak, because the calls keep the layers alive
        self.waiting: list[weakref.ref[KeptLayer]] = []
        self.add = activations.add  # ``__del__`` may run at exit, when this module's names are gone

    def top(self) -> KeptLayer | None:
        """Return the latest layer whose activations wait for their backward, or None."""
        while self.waiting:
            layer = self.waiting[-1]()
            if layer is not None and layer.token() is not None:
                return layer
            self.waiting.pop()
        return None

    def is_open(self) -> bool:
        """Return whether a layer can be recorded now without overwriting activations that wait for their backward."""
        top = self.top()
        return top is None or (top.generation is self.generation and top.index == self.generation.size - 1)

    def continues(self, key: Any) -> bool:
        """Return whether the latest layer that waits for its backward has this key, and no layer was recorded after it."""
        top = self.top()
        return top is not None and top.key == key and self.is_open()

    def begin(self) -> Generation:
        """Return the generation that the next recorded layer joins.

        Raises:
            Refusal: the recording would overwrite activations that wait for their backward.
        """
        if not self.is_open():
            raise Refusal(Reason.GRAPH_REUSED, "activations of another forward wait for their backward")
        if self.top() is None:
            self.generation.held.clear()
            self.generation = Generation()
        return self.generation

    def has_room(self, held: int) -> bool:
        """Return whether a layer with ``held`` bytes of activations fits into the budget.

        The layer's backward is assumed to need as many bytes again.
        """
        used = 0 if self.top() is None else self.generation.nbytes
        grows = max(used + 2 * held - self.counted, 0)
        return not grows or activations.taken.get(self.recorder.device, 0) + grows <= activations.budget

    def count(self, size: int) -> None:
        self.add(self.recorder.device, size - self.counted)
        self.counted = size

    def __del__(self) -> None:
        """Count no more bytes, because the layers that held graphs have changed or were freed."""
        if self.counted:  # an interrupted ``__init__`` has counted none, and may have set no other attribute
            self.count(0)

    def close(self) -> None:
        """Free the pool. Memory of calls that wait for their backward stays allocated, and is counted until ``__del__``."""
        self.generation.held.clear()
        self.count(0 if self.top() is None else self.recorder.taken)  # includes a layer whose recording failed
        self.recorder.close()


class KeptWork(Work):
    """The forward and the backward of a layer that keeps its activations, as its two graphs record them."""

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
        """Return whether the forward can be replayed without overwriting activations that wait for their backward."""
        top = self.keeper.top()
        return top is None or (top.generation is self.generation and top.index < self.index)

    def began(self, token: Token) -> None:
        """Note that a forward is about to write the layer's activations. They are needed until ``token`` is freed."""
        self.token = weakref.ref(token)
        self.keeper.waiting.append(weakref.ref(self))

    def may_backward(self) -> bool:
        """Return whether this layer is the latest one that waits for its backward, and the memory that the backward reads is valid."""
        return self.keeper.top() is self and self.fingerprint.is_in_place() and self.reads_valid_pins()

    def reset(self) -> None:
        """Free the graphs. If a call still waits for its backward, the graphs are freed together with this call."""
        self.alive = False
        if self.token() is None:
            super().reset()


def kept_by(token: Token, graph: KeptLayer) -> Any:
    """Return a context in which autograd saves ``token`` instead of the layer's input.

    The backward reads the graph's copy of this input.
    """
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
    """Return an upper estimate of the bytes of the layer's activations, or None until eager calls have measured them."""
    return activations.record_of(call.layer).estimate(keeping.InputSize.of(call.x))


def is_measured(call: LayerCall) -> bool:
    """Return whether the size of the layer's activations is known, or not needed."""
    return (spare.waits and spare.why is Waits.MARGIN) or estimate_of(call) is not None


def may_record(keeper: Keeper | None, key: Any, was_recorded: bool) -> bool:
    """Return whether a layer can be recorded now as one that keeps its activations.

    Args:
        was_recorded: whether the layer already has such a recording, which cannot be replayed now. The layer is then
            recorded again only right after another layer with the same key.
    """
    if keeper is None:
        return not was_recorded
    return keeper.continues(key) if was_recorded else keeper.is_open()


def has_room_to_keep(call: LayerCall, keeper: Keeper | None) -> bool:
    if not call.layer.gradient_checkpointing:
        return True  # training without graphs needs the same memory
    held = estimate_of(call) or 0
    if keeper is None:
        return activations.taken.get(call.x.get_device(), 0) + 2 * held <= activations.budget
    return keeper.has_room(held)
