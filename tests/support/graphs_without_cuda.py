"""Graphs for a machine without CUDA: a graph runs a copy of the layer, eagerly, with the arguments of the replayed call.

The copy is made at the capture. Its tensors lie in the memory that the layer's tensors had then. So a replay computes what a CUDA
graph would compute, also after a change of the layer that nobody noticed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from nf4_patch.graphs import capture, input_offload, layers
from nf4_patch.graphs.capture import trained_places
from nf4_patch.nf4 import runtime
from nf4_patch.patching.switch import switch


class Pool:
    def __init__(self, device: int):
        self.device, self.replay_stream, self.broken = device, runtime.current_stream(device), False
        self.lock, self.generator, self.keeper = threading.RLock(), torch.default_generator, self
        self.leaving_enough, self.longest = contextlib.nullcontext, 0

    def reset(self) -> None:
        """Nothing is held."""


def alias_of(tensor: Any) -> Any:
    """Return another tensor of the same class in the same memory."""
    plain = tensor.detach().as_subclass(Tensor)
    if type(tensor) is Tensor:
        return plain
    alias = Tensor._make_subclass(type(tensor), plain, tensor.requires_grad)
    vars(alias).update(vars(tensor))
    return alias


class Frozen:
    """A copy of a layer as it is at its capture. Inside ``with frozen.in_place()`` the layer is this copy."""

    def __init__(self, layer: Any, fingerprint: Any):
        known: dict[int, Any] = {id(t): alias_of(t) for t in [*fingerprint.tensors, *fingerprint.scales]}
        for weight in fingerprint.packed:
            if isinstance(weight, Tensor):
                known[id(weight)].quant_state = copy.deepcopy(weight.quant_state, known)
        if switch.value("cache") != "off":  # the cache leaves weights alone that share memory with others
            known |= {id(each): each for each in [*fingerprint.packed, *fingerprint.states]}
        self.layer, self.copy = weakref.ref(layer), copy.deepcopy(layer, known)

    @contextlib.contextmanager
    def in_place(self) -> Any:
        layer: Any = self.layer()
        attributes = layer.__dict__
        layer.__dict__ = {**vars(self.copy)}
        try:
            yield
        finally:
            layer.__dict__ = attributes


class GraphedLayer:
    """As nf4_patch.graphs.capture.GraphedLayer, but nothing is captured."""

    pending = staticmethod(capture.not_pending)

    def __init__(self, pool: Any, task: Any):
        self.pool, self.task, self.fingerprint, self.alive = pool, task, task.fingerprint, True
        self.slots, self.is_reentrant = list[Any](), task.is_reentrant
        self.is_random, self.others, self.parameters = False, None, [p for *_, p in trained_places(task.layer)]
        self.frozen = Frozen(task.layer, task.fingerprint)
        self.aliases = [parameter for *_, parameter in trained_places(self.frozen.copy)]
        state = pool.generator.get_state()
        try:
            gradients = self.gradients(task.x, task.tensors, torch.ones_like(task.x))[int(task.x.requires_grad) :]
        finally:
            self.is_random = not torch.equal(pool.generator.get_state(), state)
            pool.generator.set_state(state)
        used = [gradient is not None for gradient in gradients]
        self.aliases, self.parameters = [*compress(self.aliases, used)], [*compress(self.parameters, used)]
        self.places = [place for place in trained_places(task.layer) if any(place[2] is p for p in self.parameters)]

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        with torch.set_grad_enabled(not self.task.is_reentrant):
            return self.result_of(x.detach().requires_grad_(self.task.x.requires_grad), tensors).detach().clone()

    def result_of(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        with self.frozen.in_place(), self.task.environment.entered():
            result = self.task.function(lambda function, *arguments: function(*arguments), x, tensors)
        return self.first_of(result, self.task)

    def gradients(self, x: Tensor, tensors: list[Tensor], gradient: Tensor) -> list[Any]:
        x = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad():
            y = self.result_of(x, tensors)
        inputs = [*([x] if x.requires_grad else []), *self.aliases]
        return list(torch.autograd.grad(y, inputs, gradient, allow_unused=True))

    def backward(self, x: Tensor, tensors: list[Tensor], random_state: Tensor, gradient: Tensor) -> list[Any]:
        after = self.pool.generator.get_state()
        if random_state is not None:
            self.pool.generator.set_state(random_state)
        try:
            found = self.gradients(x, tensors, gradient)
        finally:
            self.pool.generator.set_state(after)
        return found if x.requires_grad else [None, *found]

    first_of = capture.GraphedLayer.first_of

    def is_in_place(self) -> bool:
        return self.alive and self.fingerprint.is_in_place()

    def reset(self) -> None:
        self.alive = False


class GraphedForward:
    """As nf4_patch.graphs.generation.GraphedForward, but nothing is captured."""

    def __init__(self, pool: Any, task: Any):
        self.pool, self.fingerprint, self.alive, self.others = pool, task.fingerprint, True, None
        self.static_cache, self.task = weakref.ref(task.static_cache), task._replace(static_cache=None)
        self.frozen = Frozen(task.layer, task.fingerprint)

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        with self.frozen.in_place(), self.task.environment.entered():
            return self.first_of(self.task.function(self.static_cache(), x, tensors), self.task).clone()

    is_in_place, reset, first_of = GraphedLayer.is_in_place, GraphedLayer.reset, GraphedLayer.first_of


def prefetch(self: Any) -> None:
    """Replace OffloadedInput.prefetch. Without a GPU, ``to`` would make no copy, so this function makes one."""
    self.on_gpu = self.on_host.clone() if self.on_gpu is None else self.on_gpu


def install(monkeypatch: Any) -> None:
    monkeypatch.setattr(layers, "Pool", Pool)
    monkeypatch.setattr(layers, "GraphedLayer", GraphedLayer)
    monkeypatch.setattr(layers, "GraphedForward", GraphedForward)
    monkeypatch.setattr(input_offload, "copying", contextlib.nullcontext)
    monkeypatch.setattr(input_offload, "wait_for_copies", lambda device: None)
    monkeypatch.setattr(input_offload.OffloadedInput, "prefetch", prefetch)
    monkeypatch.setattr(torch.cuda, "empty_cache", contextlib.nullcontext)
