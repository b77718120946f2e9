"""Graphs for a machine without CUDA: a graph is a function that runs the layer, eagerly, with the arguments of its call."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from nf4_patch.graphs import capture, layers
from nf4_patch.graphs.capture import alias_of, swapped, trained_places
from nf4_patch.nf4 import runtime


class Pool:
    def __init__(self, device: int):
        self.device, self.replay_stream, self.broken = device, runtime.current_stream(device), False
        self.lock, self.generator, self.keeper = threading.RLock(), torch.default_generator, self
        self.leaving_enough, self.longest = contextlib.nullcontext, 0

    def reset(self) -> None:
        """Nothing is held."""


class GraphedLayer:
    """As nf4_patch.graphs.capture.GraphedLayer, but nothing is captured. It reads the parameters that it was made with."""

    def __init__(self, pool: Any, task: Any):
        self.pool, self.task, self.fingerprint, self.alive = pool, task, task.fingerprint, True
        self.is_random, self.others, self.places = True, None, trained_places(task.layer)
        state = pool.generator.get_state()
        try:
            gradients = self.gradients(task.x, task.tensors, torch.ones_like(task.x))[int(task.x.requires_grad) :]
        finally:
            pool.generator.set_state(state)
        self.places = [place for place, gradient in zip(self.places, gradients, strict=True) if gradient is not None]
        self.parameters = [parameter for *_, parameter in self.places]

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        with torch.set_grad_enabled(not self.task.is_reentrant), self.task.environment.entered():
            x = x.detach().requires_grad_(self.task.x.requires_grad)
            return self.result_of(x, tensors).detach().clone()

    def result_of(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        return self.first_of(
            self.task.function(lambda function, *arguments: function(*arguments), x, tensors), self.task
        )

    def gradients(self, x: Tensor, tensors: list[Tensor], gradient: Tensor) -> list[Any]:
        x = x.detach().requires_grad_(x.requires_grad)
        aliases = [alias_of(parameter) for *_, parameter in self.places]
        with torch.enable_grad(), self.task.environment.entered(), swapped(self.places, aliases):
            y = self.result_of(x, tensors)
        return list(torch.autograd.grad(y, [*([x] if x.requires_grad else []), *aliases], gradient, allow_unused=True))

    def backward(self, x: Tensor, tensors: list[Tensor], random_state: Tensor, gradient: Tensor) -> list[Any]:
        after = self.pool.generator.get_state()
        self.pool.generator.set_state(random_state)
        found = self.gradients(x, tensors, gradient)
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

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        with self.task.environment.entered():
            return self.first_of(self.task.function(self.static_cache(), x, tensors), self.task).clone()

    is_in_place, reset, first_of = GraphedLayer.is_in_place, GraphedLayer.reset, GraphedLayer.first_of


def install(monkeypatch: Any) -> None:
    monkeypatch.setattr(layers, "Pool", Pool)
    monkeypatch.setattr(layers, "GraphedLayer", GraphedLayer)
    monkeypatch.setattr(layers, "GraphedForward", GraphedForward)
    monkeypatch.setattr(torch.cuda, "empty_cache", contextlib.nullcontext)
