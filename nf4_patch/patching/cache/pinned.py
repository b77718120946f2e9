"""Cached weights for layers that are compiled as a whole, where no call of ours is left to look one up.

Whoever enters such a layer asks for all of its weights first. While the layer runs, each weight's dense copy hangs on its
quantization state, where Dynamo finds it and makes it an input of the graph: Inductor neither overwrites an input nor reuses
its memory. When the layer returns, the states are again as bitsandbytes made them.

A layer is pinned as a whole or not at all, so that a kind of layer has two graphs at most.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from ...nf4 import runtime
from ..context import (
    function_mode_active,
    is_compiling,
    modes_active,
    plain_methods,
    returns_tensors,
    saved_tensors_hooks,
    transforms_active,
)
from ..dequantizer import Dequantizer
from ..locks import new_lock
from ..quant_state import weight_of
from ..reasons import Reason
from ..switch import switch
from .kept import Kept, location, size_of
from .option import Uncached
from .store import cache

NAME = "_nf4_patch_dense"  # the attribute of a QuantState while its layer runs
gate = switch.gates["cache"]
Pinned = list[torch.Tensor]  # the dense copy; emptied when the layer returns, for who copied the state in between


class Running:
    """The pinned layers that run now. Where none does, compiled code looks at nothing else: its graph is that of no cache."""

    def __init__(self) -> None:
        self.layers: set[Layer] = set()
        self.any = False


running = Running()


def dense_of(packed: torch.Tensor, state: Any) -> torch.Tensor | None:
    """What hangs on the state, or None. Written to be traced: what it looks at becomes a guard."""
    if not running.any or not hasattr(state, "quant_type"):
        return None
    # not getattr: where it is missing, Dynamo traces QuantState.__getattr__ and guards on what that reads
    pinned: Pinned | None = state.__dict__.get(NAME)
    if not pinned:
        return None
    return pinned[0].t() if packed.shape[0] == 1 else pinned[0]


class Layer:
    """Where the weights of a module are: its parameters called ``weight`` with a state of bitsandbytes'."""

    def __init__(self, module: torch.nn.Module):
        self.lock = new_lock()  # one thread at a time in a pinned layer: its states are the process'
        self.refused_at = -1  # the generation of the cache in which there was no room for it
        self.pinned: set[Kept] = set()  # for it
        self.hung: list[tuple[Any, Pinned]] = []  # each state, while the layer runs, and what hangs on it
        self.find(module)

    def find(self, module: torch.nn.Module) -> None:
        self.paths: list[list[str]] = []  # names of modules
        self.devices: set[int] = set()
        for name, each in module.named_modules():
            weight = each._parameters.get("weight")
            state = getattr(weight, "quant_state", None)
            if weight is not None and hasattr(state, "quant_type") and returns_tensors(type(weight)):
                self.paths.append([part for part in name.split(".") if part])
                if runtime.runs_on(weight):
                    self.devices.add(weight.get_device())

    def weights(self, module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
        """The state and the Weight, or the Reason why there is none, of every parameter as it is now."""
        for path in self.paths:
            owner: Any = module
            for name in path:  # no reference to what is found: it would keep alive what has been replaced
                owner = None if owner is None else owner._modules.get(name)
            packed: Any = None if owner is None else owner._parameters.get("weight")
            state = getattr(packed, "quant_state", None)
            yield state, weight_of(packed, state)

    def hang(self, pinned: list[tuple[Any, Pinned]]) -> None:
        """Hang each dense copy on its state."""
        self.hung = pinned
        running.layers.add(self)
        running.any = True
        for state, dense in pinned:
            state.__dict__[NAME] = dense

    def take_off(self) -> None:
        """Undo ``hang``, also where an interrupt came in the middle of either."""
        for state, dense in self.hung:
            dense.clear()
            state.__dict__.pop(NAME, None)
        self.hung = []
        running.layers.discard(self)
        running.any = bool(running.layers)

    def unpin(self, keep: Container[Kept] = ()) -> None:
        """Let go of what is pinned for it. Called by the garbage collector too, at any point of any thread."""
        for kept in self.pinned:
            if kept not in keep:
                cache.died(kept)
        self.pinned = set()


class Layers:
    """The compiled layers of one target, by the module that is entered.

    Args:
        target: its name.
        only_read: whether nobody but the library gets a weight while its layers are traced.
    """

    def __init__(self, target: str, only_read: Callable[[], bool] = lambda: True):
        self.dequantizer, self.only_read = Dequantizer(target), only_read
        self.decode: Any = self.dequantizer.run
        self.known: weakref.WeakKeyDictionary[torch.nn.Module, Layer] = weakref.WeakKeyDictionary()

    def entered(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` of a module that runs as one compiled region, with its weights pinned where they can be."""
        attempt = self.dequantizer.fallbacks.attempt

        @functools.wraps(forward)
        def entry(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if (
                is_compiling()
                or not gate.on
                or modes_active()
                or transforms_active() is not None
                or function_mode_active()
            ):
                return forward(module, *args, **kwargs)
            if cache.auto is not None:
                cache.auto.observe(*args, *kwargs.values())
            if not module.training:
                return forward(module, *args, **kwargs)
            layer = self.known.get(module)
            if layer is None:
                layer = self.known[module] = Layer(module)
                weakref.finalize(module, layer.unpin).atexit = False
            with layer.lock:
                layer.take_off()  # of a call that was interrupted as it ended
                pinned = attempt(self.pinned, module, layer)
                if not pinned or isinstance(pinned, Reason):
                    return forward(module, *args, **kwargs)
                try:
                    layer.hang(pinned)
                    return forward(module, *args, **kwargs)
                finally:
                    layer.take_off()

        return entry

    def pinned(self, module: torch.nn.Module, layer: Layer) -> list[tuple[Any, Pinned]] | Reason:
        """Every state of the layer with the dense copy of its weight; nothing where not all of them can be pinned."""
        if cache.is_unsettled:
            cache.settle()
        if layer.refused_at == cache.generation:
            return []
        why: Reason | Uncached | None
        if is_checkpointed():
            why = Uncached.CHECKPOINT
        elif not self.only_read():
            why = Uncached.WRAPPED
        elif any(map(runtime.current_stream, layer.devices)):
            why = Uncached.OTHER_STREAM  # a graph captured there would read what the cache may free
        else:
            with plain_methods():
                states = self.look(module, layer)
                if states is not None:
                    count = len(states)
                    cache.hits += count
                    return states
                why = self.pin(module, layer)
                states = self.look(module, layer) if why is None else None
                if states is not None:
                    return states
            if why is None:
                why = Uncached.BUDGET_SPENT  # another thread was faster
            else:
                layer.unpin()
                cache.settle()
                layer.refused_at = cache.generation if why is cache.no_room() else -1
        if isinstance(why, Reason):
            return why
        cache.uncached[why] += 1
        return []

    def look(self, module: torch.nn.Module, layer: Layer) -> list[tuple[Any, Pinned]] | None:
        """Every state with its dense copy; None where one is missing or no longer true."""
        states, read = [], []
        for state, weight in layer.weights(module):
            kept = None if type(weight) is Reason else cache.find(weight)
            views = None if kept is None or kept[1].stream else kept[1].views
            if kept is None or views is None:
                return None
            if switch.strict:
                cache.compare(kept[0], self.decode(weight))
            states.append((state, [views[0]]))
            read.append(kept[1])
        for (_, (dense,)), each in zip(states, read, strict=True):
            if not each.compiled:
                torch._dynamo.mark_static_address(dense, guard=False)  # a CUDA graph reads it where it is
                torch._dynamo.mark_static(dense)
                each.compiled = True
        layer.pinned.update(read)
        return states

    def pin(self, module: torch.nn.Module, layer: Layer) -> Reason | Uncached | None:
        """Decode and keep what is not pinned yet, or say why a weight cannot be kept: then none is to be."""
        layer.find(module)
        missing, pinned, sizes = {}, set(), Counter[int]()
        for _, weight in layer.weights(module):
            why: Reason | Uncached | None = weight if type(weight) is Reason else self.dequantizer.why_not(weight)
            why = why or cache.why_not(weight)
            if why is not None:
                return why
            found = cache.find(weight)
            if found is None or found[1].stream:
                missing[location(weight)] = weight
            else:
                pinned.add(found[1])
        layer.unpin(keep=pinned)
        cache.settle()
        for weight in missing.values():
            sizes[weight.packed.get_device()] += size_of(weight)
        if any(size > cache.room(device) for device, size in sizes.items()):
            return cache.no_room()
        for weight in missing.values():
            result = cache.keep(weight, self.decode)
            if not isinstance(result, torch.Tensor):
                return cache.no_room() if result is None else result
        return None


def is_checkpointed() -> bool:
    """Whether non-reentrant checkpointing decides what is saved: the recompute must save the tensors that the forward did,
    also if the weights can no longer be pinned then.
    """
    hooks = saved_tensors_hooks(True)
    return hooks is not None and (hooks is True or hooks[0].__module__ == "torch.utils.checkpoint")
