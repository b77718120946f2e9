"""The cache of dequantized weights: ``enable(cache="6GiB")`` or ``enable(cache="auto")`` (docs/notes/weight-cache.md)."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..memory.spare import Spare, User, spare
from ..memory.waits import Waits
from ..nf4 import runtime
from ..nf4.identity import nobody
from ..nf4.weight import PackedWeight
from ..patching import dequantizer
from ..patching.context import plain_methods
from ..patching.locks import new_lock
from ..patching.reasons import Reason
from ..patching.switch import switch
from .entry import CacheEntry, fingerprint, location, size_of
from .option import CacheStatus, Uncached

Decode = Callable[[PackedWeight], "Tensor | Reason"]
# The errors that are raised if a field of a weight is not a tensor, or is a tensor without a version counter.
FIELD_ERRORS = (AttributeError, RuntimeError, TypeError)
# A cache entry is dropped after this many consecutive reads on streams other than the one that decoded the weight.
# The next read then decodes the weight again, on the reader's stream.
OTHER_STREAM_READS = 3


class StaleWeightError(RuntimeError):
    """Raised with NF4_PATCH_STRICT=1 if a cached weight differs from what its packed bytes decode to now."""


class Cache(dequantizer.Reader):
    """The cache of the process.

    Changes are made under ``lock``. A callback runs when a tensor of a cached weight is freed, possibly in the middle of
    a change. So the callback only frees the dense copy, and the next change removes the entry.
    """

    def __init__(self) -> None:
        self.on = False
        self.mode: str | int = "off"
        self.auto: Spare | None = None  # finds the budget for "auto"
        self.budget = 0  # bytes per device
        self.weights: dict[tuple[object, ...], CacheEntry] = {}  # entries by ``location``
        self.taken: Counter[int] = Counter()  # bytes of dense copies by device, also of dropped ones that are in use
        self.dropped: list[CacheEntry] = []  # dropped entries whose dense copy is still in use
        self.death = object()  # a new object whenever a tensor or storage of a cached weight was freed
        self.settled_death = self.death  # the value of ``death`` when ``settle`` last removed entries
        self.storages: dict[int, StorageRecord] = {}  # records by the ``_cdata`` of the storage
        self.hits = self.misses = 0
        self.uncached: Counter[Uncached] = Counter()
        self.lock = new_lock()
        self.user = User(1, self.set_budget, self.taken)
        self.pinning = -1  # the stream on which ``pinned`` collects weights, or -1
        self.pins: list[tuple[CacheEntry, PackedWeight]] = []  # the weights that ``pinned`` collected
        self.missed: dict[Any, tuple[PackedWeight, Decode]] = {}  # weights that ``fill`` may cache, by ``location``

    @contextlib.contextmanager
    def pinned(self, stream: int) -> Iterator[list[tuple[CacheEntry, PackedWeight]]]:
        """Yield a list, to which ``read`` adds each weight that a capture on this stream pins.

        In the ``with`` block, only ``fill`` caches new weights that are read on this stream.
        """
        try:
            self.pins, self.missed = [], {}
            self.pinning = stream
            yield self.pins
        finally:
            self.pinning, self.pins, self.missed = -1, [], {}

    def fill(self, less: int) -> bool:
        """Cache the weights that were read inside ``pinned`` but not during a capture, and return whether any was cached.

        Otherwise graphs would find no cached weights if the cache gets its budget after the layers ran eagerly. ``less``
        bytes of the budget stay free for the memory of graphs.
        """
        pinning, missed, misses = self.pinning, self.missed, self.misses
        self.pinning, self.missed = -1, {}
        try:
            with plain_methods():
                for weight, decode in missed.values():
                    fits = size_of(weight) + less <= self.room(weight.packed.get_device())
                    if (why := self.why_not(weight) or (None if fits else self.no_room())) is None:
                        self.decoded(weight, decode)
                    else:
                        self.uncached[why] += 1
        except torch.OutOfMemoryError:
            pass  # the recording needs its memory; the next forward pass notices the failed allocation, and gives memory back
        finally:
            self.pinning = pinning
        return self.misses > misses

    def invalidate(self, entry: CacheEntry) -> None:
        """Free an entry's dense copy and scales. This may run at any time, in any thread."""
        entry.views, entry.scales = None, ()  # scales may lie in pinned host memory, with the whole layer
        self.death = object()

    @property
    def is_unsettled(self) -> bool:
        return bool(self.dropped) or self.death is not self.settled_death

    def settle(self) -> None:
        """Remove the entries of freed weights. Subtract dropped dense copies from ``taken`` once nothing uses them."""
        with self.lock:
            if (death := self.death) is not self.settled_death:
                self._drop_where(lambda entry: entry.views is None or entry.identity.storages[0].expired())
                self.settled_death = death
            for entry in self.dropped:
                if entry.dense_memory.expired():
                    # In one line that calls nothing, so that no interrupt makes the next call subtract the size again.
                    self.taken[entry.device], entry.size = self.taken[entry.device] - entry.size, 0
            self.dropped = [entry for entry in self.dropped if entry.size]

    # --- the budget ---

    def configure(self, mode: str | int) -> None:
        """Set the mode: "off", "auto" or bytes per device. A new mode starts with an empty cache."""
        if mode != self.mode:
            with self.lock:
                self.on, self.mode = False, ""  # if an interrupt stops this call, the next call starts over
                self.release()
                self.storages.clear()
                spare.leave(self.user)
                self.budget = mode if isinstance(mode, int) else 0
                self.auto = spare if mode == "auto" else None
                if self.auto is not None:
                    spare.join(self.user)
                self.on, self.mode = mode != "off", mode

    def set_budget(self, budget: int) -> None:
        """Set the budget in bytes per device. 0 drops every cached weight."""
        with self.lock:
            self.budget = budget
            if not budget:
                self.release()

    # --- reading ---

    def read(self, weight: PackedWeight, decode: Decode) -> Tensor | Reason | None:
        """Return the dense weight, read-only, and cache it if there is room.

        Return None if the caller has to decode the weight, or the Reason that ``decode`` returned.

        Raises:
            StaleWeightError: in strict mode, if the cached bits differ from the decoded packed bytes.
        """
        try:  # these lines repeat the beginning of ``find``, which saves the cost of a call
            entry = weight.memo().entry
            result = None if entry is None else entry.of(weight)
        except FIELD_ERRORS:
            result = None
        if result is None:
            found = self.find(weight)
            if found is None:
                return self.insert(weight, decode)
            result, entry = found
        stream = runtime.current_stream(entry.device)
        if stream == self.pinning:
            self.pins.append((entry, weight))
            return result
        if stream != entry.stream:
            self.uncached[Uncached.OTHER_STREAM] += 1
            entry.other_stream_reads += 1
            if entry.other_stream_reads >= OTHER_STREAM_READS:
                self.drop(entry)
            return None
        if stream and is_captured(entry.device):
            self.uncached[Uncached.CUDA_GRAPH] += 1
            return None
        entry.other_stream_reads = 0
        self.hits += 1  # needs no lock, because CPython does not switch threads within a line that calls nothing
        if switch.strict:
            decoded = decode(weight)
            if isinstance(decoded, Reason):
                return decoded
            self.compare(result, decoded)
        return result

    def find(self, weight: PackedWeight) -> tuple[Tensor, CacheEntry] | None:
        """Return a weight's dense copy and its entry, or None. Drop an invalid entry."""
        entry: CacheEntry | None = None
        try:
            memo = weight.memo()
            result = None if memo.entry is None else memo.entry.of(weight)
            if result is not None:
                return result, memo.entry
            entry = self.weights.get(location(weight))
            if entry is None:
                return None
            if entry.fingerprint == fingerprint(weight) and (result := entry.of(weight)) is not None:
                memo.entry = entry
                return result, entry
        except FIELD_ERRORS:
            pass
        self.drop(entry)
        return None

    def why_not(self, weight: PackedWeight) -> Uncached | None:
        """Return why a weight must not be cached, or None. The budget is not checked."""
        owner = weight.owner()
        if any(tensor.is_inference() for tensor in weight.tensors()):
            return Uncached.INFERENCE_TENSOR
        if not isinstance(owner, torch.nn.Parameter):
            return Uncached.NOT_A_PARAMETER
        if hasattr(owner, "ds_id"):
            return Uncached.ZERO3
        device = weight.packed.get_device()
        if is_captured(device) or runtime.current_stream(device) == self.pinning:
            return Uncached.CUDA_GRAPH
        number = weight.packed.untyped_storage()._cdata
        record = self.storages.get(number)
        why = None if record is None else record.why_not(owner)
        if why is Uncached.ALIASED:
            self.drop_storage(number)
        return why

    def insert(self, weight: PackedWeight, decode: Decode) -> Tensor | Reason | None:
        """Decode and cache a weight, or return None without decoding it."""
        tensors = weight[: 5 if weight.nested() else 2]
        plain = isinstance(weight.shape, tuple) and isinstance(weight.dtype, torch.dtype)
        if not plain or not all(isinstance(each, Tensor) for each in tensors) or not runtime.runs_on(weight.packed):
            return None  # the caller then checks its guards, which name the Reason
        why = self.why_not(weight)
        if why is None:
            result = self.keep(weight, decode)
            if result is not None:
                return result
            why = self.no_room()
        self.misses += 1
        if why is Uncached.CUDA_GRAPH and self.auto is not None and self.warms_up(weight):
            self.missed[location(weight)] = weight, decode
        else:
            self.uncached[why] += 1
        return None

    def warms_up(self, weight: PackedWeight) -> bool:
        """Return whether a layer is being warmed up inside ``pinned``, on the capture's stream."""
        return runtime.current_stream(weight.packed.get_device()) == self.pinning and not runtime.is_capturing()

    def keep(self, weight: PackedWeight, decode: Decode) -> Tensor | Reason | None:
        """Decode and cache a weight.

        Return None if the budget has no room, or if ``"auto"`` ran out of memory and emptied the cache.

        Raises:
            OutOfMemoryError: the decode ran out of memory, and the budget is a fixed size.
        """
        try:
            return self.decoded(weight, decode)
        except torch.OutOfMemoryError:
            if self.auto is None:
                raise
            self.auto.give_back(Waits.OUT_OF_MEMORY)  # drops every cached weight; the caller decodes this one
            return None

    def decoded(self, weight: PackedWeight, decode: Decode) -> Tensor | Reason | None:
        """Decode and cache a weight, or return None if the budget has no room.

        Raises:
            OutOfMemoryError: the decode ran out of memory.
        """
        mode, device, size = self.mode, weight.packed.get_device(), size_of(weight)
        with self.lock:  # the lock is not held during the decode below, because the decode is slow
            self.settle()
            if not self.on or size > self.room(device):
                return None
        entry = CacheEntry(weight)
        self.misses += 1
        with torch.inference_mode(False):  # training may read this dense copy after generation decoded it
            result = decode(weight)
        if isinstance(result, Tensor):
            with self.lock:
                self._drop(self.weights.get(entry.location))  # another thread may have cached the weight meanwhile
                self.settle()
                if self.mode == mode and size <= self.room(device):
                    self._add(entry, weight, result)
        return result

    def room(self, device: int) -> int:
        return self.budget - self.taken[device]

    def _add(self, entry: CacheEntry, weight: PackedWeight, result: Tensor) -> None:
        owner, storage = weight.owner(), weight.packed.untyped_storage()
        if len(self.storages) > 10 * len(self.weights) + 64:
            self.storages = {
                number: record for number, record in self.storages.items() if not record.reference.expired()
            }
        for number, reference in enumerate(entry.identity.storages):
            known = nobody if number else weakref.ref(owner)
            self.storages.setdefault(reference.cdata, StorageRecord(reference, known))
        entry.fill(weight, result, lambda _: self.invalidate(entry))
        # This callback runs when the storage's Python object is freed. The storage may still be alive then, because
        # PyTorch 2.8 frees the Python object at every garbage collection, and PyTorch 2.13 before the storage expires.
        # So the callback drops nothing, and only makes ``settle`` check the storage.
        entry.watchers += (weakref.ref(storage, lambda _: setattr(self, "death", object())),)
        self.weights[entry.location] = entry
        self.taken[entry.device] += entry.size

    # --- dropping ---

    def _drop(self, entry: CacheEntry | None) -> None:
        """Remove an entry. ``taken`` counts its dense copy until nothing uses the copy."""
        if entry is None or self.weights.get(entry.location) is not entry:
            return
        self.dropped.append(entry)
        del self.weights[entry.location]
        entry.empty()

    def _drop_where(self, condition: Callable[[CacheEntry], bool]) -> None:
        for entry in list(self.weights.values()):
            if condition(entry):
                self._drop(entry)

    def drop(self, entry: CacheEntry | None) -> None:
        with self.lock:
            self._drop(entry)
            self.settle()

    def release(self, condition: Callable[[CacheEntry], bool] = lambda entry: True) -> None:
        """Drop the entries that meet the condition."""
        with self.lock:
            self._drop_where(condition)
            self.settle()

    def drop_storage(self, number: int, resized: bool = False) -> None:
        """Drop the weights decoded from this storage. If it was ``resized``, they are never cached again."""
        record = self.storages.get(number)
        if record is None or record.reference.expired():
            return
        record.resized = record.resized or resized
        self.release(lambda entry: any(reference.cdata == number for reference in entry.identity.storages))

    def forget(self, tensor: Tensor) -> None:
        """Drop the weights decoded from this tensor, and every weak reference to it."""
        with self.lock:
            self.release(lambda entry: entry.identity.has(tensor))
            self.storages = {number: each for number, each in self.storages.items() if each.owner() is not tensor}

    # --- status ---

    def no_room(self) -> Uncached:
        return Uncached.WAITING if self.auto is not None and not self.budget else Uncached.BUDGET_SPENT

    def snapshot(self) -> CacheStatus:
        """Return the status, without the lock, because a signal handler might call this method during a change."""
        entries, taken = list(self.weights.values()), Counter[int]()
        for entry in dict.fromkeys((*entries, *self.dropped)):
            taken[entry.device] += 0 if entry.dense_memory.expired() else entry.size
        entries = [entry for entry in entries if entry.views is not None]
        return CacheStatus(
            mode=str(self.mode or "off"),
            taken={device: size for device, size in taken.items() if size},
            weights=len(entries),
            hits=self.hits,
            misses=self.misses,
            uncached={why.name: count for why, count in list(self.uncached.items())},
            budget=self.budget if self.auto else None,
            waits=self.auto.why.name if self.auto and self.auto.waits else "",
            numbers=self.auto.numbers if self.auto else (),
        )

    def compare(self, cached: Tensor, decoded: Tensor) -> None:
        """If the bits differ, empty the cache and raise StaleWeightError."""
        if not runtime.same_bits(cached, decoded):
            self.release()
            raise StaleWeightError(
                f"a cached weight of shape {tuple(cached.shape)} differs from its packed bytes. They were changed without a "
                "change of their version counter (through tensor.data or a raw pointer); call nf4_patch.release() after that"
            )


class StorageRecord:
    """A record of a storage with packed bytes or scales of cached weights.

    Weights are not cached if the storage was resized with ``resize_`` (FSDP) or two parameters share it, because version
    counters then miss some writes.
    """

    def __init__(self, reference: StorageWeakRef, owner: Callable[[], Tensor | None]):
        self.reference = reference  # as long as this weak reference exists, no other storage gets the same ``_cdata``
        self.owner = owner  # weak reference to the parameter in this storage, or a function that returns None
        self.resized = self.aliased = False

    def why_not(self, owner: Tensor) -> Uncached | None:
        known = self.owner()
        if known is None:
            self.owner = weakref.ref(owner)
        self.aliased = self.aliased or (known is not None and known is not owner)
        return Uncached.REFILLED if self.resized else Uncached.ALIASED if self.aliased else None


def is_captured(device: int) -> bool:
    """Return whether memory allocated now would belong to a CUDA graph.

    Once Inductor's CUDA graphs are imported, return True on every side stream, because they are warmed up there with
    memory from their pool.
    """
    stream = runtime.current_stream(device)
    if not stream:  # the default stream cannot be captured
        return False
    return "torch._inductor.cudagraph_trees" in sys.modules or runtime.is_capturing()


cache = dequantizer.reader = Cache()
# At exit, the cache is emptied before the interpreter clears the modules. Clearing the modules frees tensors.
# If the cache still had entries then, their callbacks would run in the middle of this.
atexit.register(cache.configure, "off")
switch.follow(lambda config: cache.configure(switch.value("cache")))
