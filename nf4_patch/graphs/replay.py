"""Replay the graphs of a decoder layer, in training as an autograd function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..activations.layers import activations, keeps_graph
from ..nf4 import runtime
from ..patching import context
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks
from .capture import Environment, GraphedLayer, alias_of, swapped
from .generation import GraphedForward
from .kept import KeptLayer, Token, kept_by
from .shapes import graphs


class Call:
    """One call of a layer that has graphs. It holds the data that the forward passes on to the backward."""

    waits = True  # for its backward

    def __init__(
        self, graph: GraphedLayer, environment: Environment, tensors: list[Tensor], again: Callable[[Tensor], Any],
        fallbacks: Fallbacks,
    ):  # fmt: skip
        self.graph, self.environment, self.tensors, self.again = graph, environment, tensors, again
        self.fallbacks = fallbacks
        if graph.is_reentrant:
            activations.record_of(graph.fingerprint.layer()).replay = weakref.ref(self)  # type: ignore[arg-type]
        self.versions = [parameter._version for parameter in graph.parameters] if graph.keeps else []
        self.random_state = graph.recorder.generator.get_state() if graph.is_random else None

    def gradients(self, x: Tensor, gradient: Tensor) -> list[Any]:
        """Return the gradients of x and of the graph's parameters, given the gradient of the layer's result.

        Replay the second graph (recompute and backward) if possible. Otherwise recompute the layer eagerly.
        """
        graph, recorder = self.graph, self.graph.recorder
        self.waits = False
        now = Environment.current()
        # The backward was captured without autocast.
        may_replay = not (torch.is_grad_enabled() or now.autocast) and now.modes == self.environment.modes
        if may_replay and stream_of(recorder.device) == recorder.replay_stream and not is_intercepted(gradient):
            with recorder.lock:
                # A reentrant checkpoint recomputes the layer as it is now, any other one only the tensors of the forward.
                unchanged = not graph.is_reentrant or graph.fingerprint.holds()
                if unchanged and (self.may_use_kept(graph) if isinstance(graph, KeptLayer) else graph.is_in_place()):
                    return graph.backward(x, self.tensors, self.random_state, gradient)
        self.fallbacks.count(Reason.GRAPH_BACKWARD)
        if graph.keeps:  # x is the memory of the graph, which the next forward writes
            copied = x.clone()
            x = copied if torch.is_grad_enabled() else copied.requires_grad_(x.requires_grad)
        return self.recomputed(x, gradient)

    def may_use_kept(self, graph: KeptLayer) -> bool:
        """Return whether the kept activations are still valid for the layer's current parameters.

        Raises:
            RuntimeError: the layer is not checkpointed, and its parameters were changed since its forward.
        """
        same = self.versions == [parameter._version for parameter in graph.parameters]
        layer: Any = graph.fingerprint.layer()
        if not same and layer is not None and not layer.gradient_checkpointing:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a trained "
                "parameter of a decoder layer, between its forward and its backward"
            )
        return same and graph.may_backward()

    def recomputed(self, x: Tensor, gradient: Tensor) -> list[Any]:
        """Recompute the layer eagerly. Return the gradients of x and of the graph's parameters.

        Under ``create_graph`` these gradients are differentiable.
        """
        differentiable, generator = torch.is_grad_enabled(), self.graph.recorder.generator
        # The layer reads aliases. If it read the parameters, hooks on the parameters' gradients would run twice.
        aliases = [p.view_as(p) if differentiable else alias_of(p) for p in self.graph.parameters]
        input = x if differentiable else x.detach().requires_grad_(x.requires_grad)
        after = generator.get_state()
        try:
            if self.random_state is not None:
                generator.set_state(self.random_state)
            with torch.enable_grad(), self.environment.entered(), swapped(self.graph.places, aliases):
                y = self.again(input)
        finally:
            if self.random_state is not None:
                generator.set_state(after)
        y = y[0] if isinstance(y, tuple) else y
        inputs = [*([input] if x.requires_grad else []), *aliases]
        found = torch.autograd.grad(y, inputs, gradient, allow_unused=True, create_graph=differentiable)
        return [*found] if x.requires_grad else [None, *found]


class Replay(context.PlainFunction):
    """The autograd function that replays a layer's graphs, in its forward and in its backward.

    The parameters are inputs of the function, so that autograd accumulates their gradients.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, graph = call, call.graph
        ctx.save_for_backward(x)  # hooks on saved tensors, such as activation offloading, then apply to x
        with graph.recorder.lock:
            return graph.forward(x, call.tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors  # raises PyTorch's own error in a second backward without ``retain_graph``
        call: Call = ctx.call
        found = call.gradients(x, gradient)
        previous, _ = ctx.next_functions[0]  # the autograd node that computed x: usually the previous layer's Replay
        # The step ends here. Before the next one, masks may be written without PyTorch's knowledge, for example by a broadcast.
        if type(previous) is not type(ctx):
            for slot in call.graph.slots:
                slot.forget()
        if not keeps_graph():  # Autograd frees the saved tensors now. A loss that is kept must not keep the rest.
            ctx.call = None
        return (None, *found)


def is_intercepted(gradient: Tensor) -> bool:
    """Return whether a PyTorch mode or a transform intercepts the operations of a backward, for example ``is_grads_batched``."""
    return context.watched(gradient) is not None


def stream_of(device: int) -> int:
    return int(runtime.current_stream(device))


def replay(graph: GraphedLayer, call: Call, x: Tensor) -> Any:
    with graph.recorder.lock:
        y = Replay.apply(call, x, *graph.parameters) if graph.alive else None
    return result_of(graph, y) if y is not None else call.again(x)  # another thread has just dropped all graphs


def replay_kept(graph: KeptLayer, call: Call, x: Tensor) -> Any:
    token, y = Token(), None
    with graph.recorder.lock:
        if graph.alive and graph.may_forward():
            graph.began(token)
            with kept_by(token, graph):
                y = Replay.apply(call, x, *graph.parameters)
    return result_of(graph, y) if y is not None else call.again(x)


def replay_on_host(graph: GraphedLayer, call: Call, x: Tensor) -> Any:
    """Replay a layer, and save its input in host memory until the backward, as transformers' option ``offload`` does."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return replay(graph, call, x)


def step(graph: GraphedForward, x: Tensor, tensors: list[Tensor], again: Callable[[], Any]) -> Any:
    """Replay a layer in generation. If all graphs were just dropped, return ``again()``."""
    with graph.recorder.lock:
        y = graph.forward(x, tensors) if graph.alive else None
    return result_of(graph, y) if y is not None else again()


def result_of(graph: GraphedLayer, y: Tensor) -> Any:
    graphs.replays += 1
    graph.replays += 1
    return y if graph.others is None else (y, *graph.others)
