"""Cached weights for layers that are compiled as a whole, where no call of ours is left to look one up.

The weight hangs on its quantization state, where Dynamo finds it and makes it an input of the graph: Inductor neither
overwrites an input nor reuses its memory. Whoever enters such a layer asks ``Layers.ready`` first, which looks at every
weight of it and decodes again what changed.

A layer is held as a whole or not at all, so that a kind of layer has two graphs at most. What is held is never evicted:
a step reads its layers in a circle, and a fixed part of a circle saves exactly its share.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...nf4 import runtime
from ..context import is_compiling
from ..dequantizer import Dequantizer, returns_tensors
from ..guards import check_quant_state
from ..quant_state import fields_of
from ..reasons import Reason, Uncached
from ..switch import switch
from ..targets import Target
from .allocator import allocated
from .cache import cache
from .entry import Entry, Fields, nobody, refusal

NAME = "_nf4_patch_held"  # the attribute of a QuantState


class Entered:
    """Whether the compiled layer that runs now was entered by way of ``ready``, and is held."""

    def __init__(self) -> None:
        self.on = False


entered = Entered()


class Held:
    """A dense weight on the QuantState that it was decoded with. A copy of the state gets an empty one."""

    def __init__(self) -> None:
        self.dense: torch.Tensor | None = None  # what compiled code reads
        self.entry: Entry | None = None
        self.state: Callable[[], Any] = nobody
        self.stamp: tuple[Any, ...] = ()
        self.layer: Layer | None = None  # the latest that has the weight

    def __reduce__(self) -> Any:
        return Held, ()

    @classmethod
    def of(cls, state: Any) -> Held:
        """The one of this state, and of no other that was copied from it."""
        held: Held | None = vars(state).get(NAME)
        if held is None or held.state() is not state:
            held = vars(state)[NAME] = cls()
            held.state = weakref.ref(state)
        return held

    def take(self, entry: Entry) -> None:
        self.dense, self.entry = entry.dense, entry

    def compare(self, decode: Callable[..., Any]) -> None:
        """
        Raises:
            StaleWeightError: see ``Cache.compare``.
        """
        entry, state = self.entry, self.state()
        if entry is not None:
            cache.compare(entry.dense, decode(entry.owner(), fields_of(state), state))

    def drop(self) -> None:
        if self.entry is not None:
            cache.drop(self.entry)

    def let_go(self) -> None:
        """Called by the cache, which dropped the entry."""
        self.dense = self.entry = None

    def is_current(self, weight: Any) -> bool:
        """Whether this parameter still decodes to it."""
        entry, state = self.entry, self.state()
        owner: Any = None if entry is None else entry.owner()
        if entry is None or owner is None or owner is not weight or owner.quant_state is not state:
            return False
        first, absmax2, code2, offset = entry.scales
        second = state.state2
        return (
            first() is state.absmax
            and (
                absmax2 is nobody
                if second is None
                else absmax2() is second.absmax and code2() is second.code and offset() is state.offset
            )
            and self.stamp == stamp(weight, state)
            and entry.dense._version == entry.written
        )


def stamp(weight: torch.Tensor, state: Any) -> tuple[Any, ...]:
    """What a dequantized weight depends on beyond which tensors they are. Other memory may come to the same address."""
    absmax, second = state.absmax, state.state2
    known = (
        weight.untyped_storage()._cdata, weight.data_ptr(), weight._version, absmax.data_ptr(), absmax._version,
        state.blocksize, state.shape, state.dtype, state.quant_type,
    )  # fmt: skip
    if second is None:
        return known
    absmax2, code2, offset = second.absmax, second.code, state.offset
    return (
        known, absmax2.data_ptr(), absmax2._version, code2.data_ptr(), code2._version, offset.data_ptr(), offset._version,
        second.blocksize,
    )  # fmt: skip


def dense_of(packed: torch.Tensor, state: Any) -> torch.Tensor | None:
    """The held weight, or None. Written to be traced: what it looks at becomes a guard."""
    if not entered.on:
        return None
    held = getattr(state, NAME, None)
    dense = None if held is None else held.dense
    return dense.t() if dense is not None and packed.shape[0] == 1 else dense


@dataclass
class Layer:
    """What is held of a layer: every weight, with the names of the modules that lead to it; or none."""

    weights: list[tuple[tuple[str, ...], Held]] = field(default_factory=list)
    devices: tuple[int, ...] = ()  # its GPUs
    refused_at: int = -1  # the generation of the cache in which it could not be held

    def find(self, module: torch.nn.Module) -> None:
        """The weights that the module has now; what is held of others is dropped."""
        before, self.weights, devices = self.weights, [], set()
        for name, each in module.named_modules():
            weight = each._parameters.get("weight")
            state = None if weight is None else getattr(weight, "quant_state", None)
            if weight is not None and check_quant_state(state) is None and returns_tensors(type(weight)):
                held = Held.of(state)
                held.layer = self
                self.weights.append((tuple(filter(None, name.split("."))), held))
                devices.add(weight.get_device())
        self.devices = tuple(devices - {-1})
        for held in {held for _, held in before} - {held for _, held in self.weights}:
            if held.layer is self:  # no other layer has it now
                held.drop()

    def freed(self) -> None:
        """The module is gone; its parameters may not be (a copy of a Params4bit refers to the module of the original)."""
        for _, held in self.weights:
            if held.entry is not None and held.layer is self:
                cache.died(held.entry)

    def outdated(self, module: torch.nn.Module) -> list[tuple[Any, Held]]:
        """The parameters of this module that do not decode to what is held of them; None for one that is gone."""
        found = []
        for path, held in self.weights:
            owner: Any = module
            for name in path:  # not a reference: it would keep alive what has been replaced
                owner = owner._modules.get(name)
                if owner is None:
                    break
            weight = None if owner is None else owner._parameters.get("weight")
            if not held.is_current(weight):
                found.append((weight, held))
        return found


def compiled_module(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``OptimizedModule.__call__``: what ``torch.compile(module)`` returns is called."""
    return Layers(target.name).entry_of(original)


class Layers:
    """The compiled layers of one target, by the module that is entered."""

    def __init__(self, target: str):
        self.dequantizer = Dequantizer(target)
        self.known: weakref.WeakKeyDictionary[torch.nn.Module, Layer] = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()
        self.entries: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # made by ``entry_of``

    def entry_of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` of a module that runs as one compiled region, entered by way of ``ready``."""
        gate, attempt = switch.gates["cache"], self.dequantizer.fallbacks.attempt

        @functools.wraps(forward)
        def entry(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not gate.on:
                return forward(module, *args, **kwargs)
            if cache.auto is not None:
                cache.auto.observe(*args, *kwargs.values())
            if not module.training:
                return forward(module, *args, **kwargs)
            before = entered.on
            entered.on = attempt(self.ready, module) is True
            try:
                return forward(module, *args, **kwargs)
            finally:
                entered.on = before

        self.entries.add(entry)
        return entry

    def ready(self, module: torch.nn.Module) -> bool | Reason:
        """Whether the weights of this module are held, and are what its packed bytes decode to now."""
        if not cache.sized or switch.defer == "always":
            return False
        layer = self.known.get(module)
        if layer is not None and layer.refused_at == cache.generation:
            return False
        # Params4bit's methods are a Tensor's in here: 1.1 us each otherwise (2-core CPU machine, Python 3.11)
        with torch._C.DisableTorchFunctionSubclass():
            if layer is None:
                layer = self.known[module] = Layer()
                layer.find(module)
                weakref.finalize(module, layer.freed).atexit = False
            for device in layer.devices:
                if runtime.current_stream(device):  # a graph captured there would go on reading what the cache may free
                    cache.refuse(Uncached.OTHER_STREAM)
                    return False
            if layer.weights and not layer.outdated(module):
                if switch.strict:
                    for _, held in layer.weights:
                        held.compare(self.decode)
                return True
            with self.lock:
                layer.find(module)
                reason = self.hold(module, layer)
        if reason is None and layer.weights:
            return True
        layer.refused_at = cache.generation
        if isinstance(reason, Uncached):
            cache.refuse(reason)
        return reason if isinstance(reason, Reason) else False

    def hold(self, module: torch.nn.Module, layer: Layer) -> Reason | Uncached | None:
        """Decode what is not held as it is now; where a weight cannot be held, let go of all of them and say why."""
        reason = self.decode_outdated(layer.outdated(module))
        if reason is not None:
            for _, held in layer.weights:
                held.drop()
        return reason

    def decode_outdated(self, outdated: list[tuple[Any, Held]]) -> Reason | Uncached | None:
        sizes: Counter[int] = Counter()
        for weight, held in outdated:
            held.drop()
            fields = fields_of(held.state())
            if isinstance(fields, Reason):
                return fields
            if weight.shape[1:] != (1,):
                return Reason.SIZE_MISMATCH
            reason = refusal(weight, weight)
            if reason is not None:
                return reason
            sizes[weight.get_device()] += allocated(2 * weight.nbytes * fields[-1].itemsize)
        if not all(cache.may_hold(device, size) for device, size in sizes.items()):
            return Uncached.BUDGET_SPENT
        for weight, held in outdated:
            state = held.state()
            fields = fields_of(state)
            held.stamp = stamp(weight, state)
            decode = functools.partial(self.decode, weight, fields, state)
            result = cache.hold(weight, fields, state.quant_type, decode, held)
            if isinstance(result, Reason):
                return result
            if held.dense is None:  # another thread was faster
                return Uncached.BUDGET_SPENT
            torch._dynamo.mark_static_address(held.dense, guard=False)  # a CUDA graph reads it where it is
            torch._dynamo.mark_static(held.dense)
        return None

    def decode(self, weight: torch.Tensor, fields: Fields, state: Any) -> Any:
        return self.dequantizer.run_fields(weight, fields, state.quant_type, state)
