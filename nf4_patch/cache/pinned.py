"""Cached weights for layers that are compiled as a whole.

Inside such a layer no Python code runs, so nothing can look up a weight in the cache. Therefore a wrapper around the
layer looks up all weights of the layer first. While the layer runs, the dense copy of each weight is attached
("pinned") to the weight's quantization state. Dynamo finds the copy there and makes it an input of the graph. The copy
stays intact, because Inductor neither overwrites an input nor reuses its memory. When the layer returns, the copies are
detached.

A layer reads all of its weights from the cache, or none. So each class of layers has at most two graphs, one with
cached weights and one without.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from ..nf4 import runtime
from ..patching.context import (
    function_mode_active,
    is_compiling,
    modes_active,
    plain_methods,
    returns_tensors,
    saved_tensors_hooks,
    transforms_active,
)
from ..patching.dequantizer import Dequantizer
from ..patching.locks import new_lock
from ..patching.quant_state import weight_of
from ..patching.reasons import Reason
from ..patching.switch import switch
from .entry import CacheEntry, location, size_of
from .option import Uncached
from .store import cache

NAME = "_nf4_patch_dense"  # the attribute of a QuantState that holds the dense copy while its layer runs
gate = switch.gates["cache"]
# A list with one dense weight. All copies of a quantization state share this list, so clearing it frees the weight.
Attached = list[torch.Tensor]


class Running:
    """The compiled layers that are running now and read weights from the cache.

    While there is no such layer, ``dense_of`` reads only the attribute ``any``, so Dynamo compiles the same graph as
    without a cache.
    """

    def __init__(self) -> None:
        self.layers: set[Layer] = set()
        self.any = False  # whether ``layers`` has an element


running = Running()


def dense_of(packed: torch.Tensor, state: Any) -> torch.Tensor | None:
    """Return the dense copy attached to a quantization state, or None.

    Dynamo traces this function, and adds a guard for every value that the function reads.
    """
    if not running.any or not hasattr(state, "quant_type"):
        return None
    # ``getattr`` would make Dynamo trace QuantState.__getattr__ and add guards for everything that it reads.
    attached: Attached | None = state.__dict__.get(NAME)
    if not attached:
        return None
    return attached[0].t() if packed.shape[0] == 1 else attached[0]


class Layer:
    """A compiled layer: where its 4-bit weights are, and the dense copies that are attached while it runs."""

    def __init__(self, module: torch.nn.Module):
        self.lock = new_lock()  # lets one thread at a time run the layer, because threads share its quantization states
        self.refused_at = -1  # value of ``cache.generation`` when the cache last had no room for the layer
        self.entries: set[CacheEntry] = set()  # the cached weights that the layer reads
        self.attached: list[tuple[Any, Attached]] = []  # (state, dense copy) of each weight, while the layer runs
        self.find(module)

    def find(self, module: torch.nn.Module) -> None:
        """Find the layer's 4-bit weights: parameters named ``weight`` with a quantization state of bitsandbytes."""
        self.paths: list[list[str]] = []  # the names that lead to each module
        self.devices: set[int] = set()
        for name, each in module.named_modules():
            weight = each._parameters.get("weight")
            state = getattr(weight, "quant_state", None)
            if weight is not None and hasattr(state, "quant_type") and returns_tensors(type(weight)):
                self.paths.append([part for part in name.split(".") if part])
                if runtime.runs_on(weight):
                    self.devices.add(weight.get_device())

    def weights(self, module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
        """Yield each weight's quantization state, and its PackedWeight or the Reason why it cannot be decoded."""
        for path in self.paths:
            owner: Any = module
            for name in path:  # modules are looked up by name, because the user may have replaced one
                owner = None if owner is None else owner._modules.get(name)
            packed: Any = None if owner is None else owner._parameters.get("weight")
            state = getattr(packed, "quant_state", None)
            yield state, weight_of(packed, state)

    def attach(self, attached: list[tuple[Any, Attached]]) -> None:
        """Attach each dense copy to its quantization state."""
        self.attached = attached
        running.layers.add(self)
        running.any = True
        for state, dense in attached:
            state.__dict__[NAME] = dense

    def detach(self) -> None:
        """Undo ``attach``, even if an interrupt (Ctrl-C) stopped ``attach`` or an earlier ``detach``."""
        for state, dense in self.attached:
            dense.clear()
            state.__dict__.pop(NAME, None)
        self.attached = []
        running.layers.discard(self)
        running.any = bool(running.layers)

    def drop(self, keep: Container[CacheEntry] = ()) -> None:
        """Drop the layer's cached weights, except those in ``keep``.

        This method also runs when the layer is freed. The cache drops the weights of freed parameters, but the layer's
        parameters may live longer than the layer. For example, a copy of a bitsandbytes parameter refers to the
        original parameter's module, and so keeps the original parameter alive.
        """
        for entry in self.entries:
            if entry not in keep:
                cache.invalidate(entry)
        self.entries = set()


class Layers:
    """The compiled layers of one target.

    Args:
        target: the target's name.
        only_read: a function that is called before a layer runs. It returns False if another library wraps the
            dequantization that the layer calls, because such a wrapper could write into cached weights.
    """

    def __init__(self, target: str, only_read: Callable[[], bool] = lambda: True):
        self.dequantizer, self.only_read = Dequantizer(target), only_read
        self.decode: Any = self.dequantizer.run
        self.layers: weakref.WeakKeyDictionary[torch.nn.Module, Layer] = weakref.WeakKeyDictionary()

    def entered(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiled ``forward``, so that the layer's cached weights are attached while ``forward`` runs."""
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
            layer = self.layers.get(module)
            if layer is None:
                layer = self.layers[module] = Layer(module)
                weakref.finalize(module, layer.drop).atexit = False
            with layer.lock:
                layer.detach()  # an interrupt may have stopped the ``detach`` of an earlier call
                found = attempt(self.read, module, layer)
                if not found or isinstance(found, Reason):
                    return forward(module, *args, **kwargs)
                try:
                    layer.attach(found)
                    return forward(module, *args, **kwargs)
                finally:
                    layer.detach()

        return entry

    def read(self, module: torch.nn.Module, layer: Layer) -> list[tuple[Any, Attached]] | Reason:
        """Return each weight's quantization state and dense copy. Missing weights are decoded and cached first.

        The result is an empty list if the cache cannot serve all weights of the layer. If a weight cannot be decoded,
        the result is the Reason.
        """
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
            # A CUDA graph may be captured on a side stream. Its replays would read memory that the cache may free.
            why = Uncached.OTHER_STREAM
        else:
            with plain_methods():
                states = self.find(module, layer)
                if states is not None:
                    count = len(states)
                    cache.hits += count
                    return states
                why = self.fill(module, layer)
                states = self.find(module, layer) if why is None else None
                if states is not None:
                    return states
            if why is None:
                why = Uncached.BUDGET_SPENT  # another thread took the room meanwhile
            else:
                layer.drop()
                cache.settle()
                layer.refused_at = cache.generation if why is cache.no_room() else -1
        if isinstance(why, Reason):
            return why
        cache.uncached[why] += 1
        return []

    def find(self, module: torch.nn.Module, layer: Layer) -> list[tuple[Any, Attached]] | None:
        """Return each weight's quantization state and cached dense copy, or None if a weight has no valid copy."""
        states, entries = [], []
        for state, weight in layer.weights(module):
            found = None if type(weight) is Reason else cache.find(weight)
            views = None if found is None or found[1].stream else found[1].views
            if found is None or views is None:
                return None
            if switch.strict:
                cache.compare(found[0], self.decode(weight))
            states.append((state, [views[0]]))
            entries.append(found[1])
        for (_, (dense,)), entry in zip(states, entries, strict=True):
            if not entry.compiled:
                # The address of the dense copy never changes, so a CUDA graph need not copy this input.
                torch._dynamo.mark_static_address(dense, guard=False)
                torch._dynamo.mark_static(dense)
                entry.compiled = True
        layer.entries.update(entries)
        return states

    def fill(self, module: torch.nn.Module, layer: Layer) -> Reason | Uncached | None:
        """Decode and cache the weights that are not cached yet.

        Return None if all weights of the layer are cached now, else the reason why one of them is not.
        """
        layer.find(module)
        missing, cached, sizes = {}, set(), Counter[int]()
        for _, weight in layer.weights(module):
            why: Reason | Uncached | None = weight if type(weight) is Reason else self.dequantizer.why_not(weight)
            why = why or cache.why_not(weight)
            if why is not None:
                return why
            found = cache.find(weight)
            if found is None or found[1].stream:
                missing[location(weight)] = weight
            else:
                cached.add(found[1])
        layer.drop(keep=cached)
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
    """Return whether the layer runs in a non-reentrant checkpoint. There it must not read from the cache.

    The recompute of such a checkpoint must save the same tensors as the forward. It would save others if the cache
    dropped a weight between the forward and the recompute.
    """
    hooks = saved_tensors_hooks(True)
    return hooks is not None and (hooks is True or hooks[0].__module__ == "torch.utils.checkpoint")
