"""The cache of dequantized weights, for callers that only read them: ``enable(cache="6GiB")`` or ``cache="auto"``.

Weights are frozen, so a training step decodes the same bytes two or three times. The weights that are read first stay as long
as they are true, and none makes room for another: docs/notes/weight-cache.md compares this with other ways to choose.

A cached weight belongs to a parameter, whose identity, version counter and memory are looked at in every read.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..nf4 import runtime
from ..nf4.weight import PackedWeight
from ..patching import dequantizer
from ..patching.locks import new_lock
from ..patching.reasons import Reason
from ..patching.switch import switch
from .auto import Auto
from .kept import CacheEntry, fingerprint, location, nobody, size_of
from .option import CacheStatus, Uncached

Decode = Callable[[PackedWeight], "Tensor | Reason"]
NOT_KNOWN = (AttributeError, RuntimeError, TypeError)  # a field is no tensor, an inference tensor, or the shape a list
OTHER_STREAM_READS = 3  # reads on other streams in a row, after which a weight is decoded again on theirs


class StaleWeightError(RuntimeError):
    """NF4_PATCH_STRICT=1, and a cached weight differs from what its packed bytes decode to."""


class Cache(dequantizer.Reader):
    """One for the process.

    Every change is made under ``lock``. The death of a tensor comes at any point of any thread, in the middle of a change too:
    it empties what was kept, and whoever makes the next change sees to the rest.
    """

    def __init__(self) -> None:
        self.on = False
        self.mode: str | int = "off"
        self.auto: Auto | None = None  # finds the budget
        self.budget = 0
        self.weights: dict[
            tuple[object, ...], CacheEntry
        ] = {}  # by ``location``; and ``WeightMemo.entry`` of what was read
        self.taken: Counter[int] = Counter()  # bytes by device, of what was dropped too while somebody still uses it
        self.leaving: list[CacheEntry] = []  # dropped, and still used by somebody
        self.death = self.settled = object()  # of a tensor or a storage: the latest, and the latest that was seen to
        self.memories: dict[int, StorageRecord] = {}  # of packed bytes and of scales, by the number of their storage
        self.generation = 0  # changes when there may be room again for what compiled layers read
        self.hits = self.misses = 0
        self.uncached: Counter[Uncached] = Counter()
        self.lock = new_lock()
        self.pinning, self.pins = (
            -1,
            list[tuple[CacheEntry, PackedWeight]](),
        )  # a stream that graphs are captured on, and what was read there

    @contextlib.contextmanager
    def pinned(self, stream: int) -> Iterator[list[tuple[CacheEntry, PackedWeight]]]:
        """Collect the cached weights that are read on this stream, where nothing is cached meanwhile: a CUDA graph is captured
        that reads them as long as ``CacheEntry.of`` returns them."""
        try:
            self.pins = []
            self.pinning = stream
            yield self.pins
        finally:
            self.pinning, self.pins = -1, []

    def died(self, kept: CacheEntry) -> None:
        """A tensor that it was decoded from was freed. Called by the garbage collector, at any point of any thread."""
        kept.views = None
        self.death = object()

    @property
    def is_unsettled(self) -> bool:
        return bool(self.leaving) or self.death is not self.settled

    def settle(self) -> None:
        """See to the deaths so far. An interrupt leaves the rest to the next call."""
        with self.lock:
            if (death := self.death) is not self.settled:
                self._drop_where(lambda kept: kept.views is None or kept.memory.expired())
                self.settled = death
            for kept in self.leaving:
                kept.empty()  # where an interrupt came before
                if kept.dense_memory.expired():
                    # in one statement, in the middle of which no interrupt comes
                    self.taken[kept.device], kept.size = self.taken[kept.device] - kept.size, 0
                    self.generation += 1
            self.leaving = [kept for kept in self.leaving if kept.size]

    # --- how much it may take ---

    def configure(self, mode: str | int) -> None:
        """ "off", "auto" or bytes a device. Another mode starts empty."""
        if mode != self.mode:
            with self.lock:
                self.on, self.mode = False, ""  # where an interrupt comes, the next call begins again
                self.release()
                self.memories.clear()
                if self.auto is not None:
                    self.auto.stop()
                self.auto = Auto(self.may_take, self.taken) if mode == "auto" else None
                self.budget = mode if isinstance(mode, int) else 0
                self.generation += 1
                self.on, self.mode = mode != "off", mode

    def may_take(self, budget: int) -> None:
        """Bytes of every device from now on; what is there stays, or goes where they are none."""
        with self.lock:
            self.budget = budget
            self.generation += 1
            if not budget:
                self.release()

    # --- reading ---

    def read(self, weight: PackedWeight, decode: Decode) -> Tensor | Reason | None:
        """The cached weight, or one that is cached from now on, not to be written into; a Reason is possible too.

        Returns:
            None where the weight has to be decoded as without the cache.

        Raises:
            StaleWeightError: NF4_PATCH_STRICT=1, and the cached bits are not those of the packed bytes.
        """
        try:  # as ``find`` begins, without its call
            kept = weight.memo().entry
            result = None if kept is None else kept.of(weight)
        except NOT_KNOWN:
            result = None
        if result is None:
            found = self.find(weight)
            if found is None:
                return self.insert(weight, decode)
            result, kept = found
        stream = runtime.current_stream(kept.device)
        if stream == self.pinning:
            self.pins.append((kept, weight))
            return result
        if stream != kept.stream:
            self.uncached[Uncached.OTHER_STREAM] += 1
            kept.other_stream_reads += 1
            if kept.other_stream_reads >= OTHER_STREAM_READS:
                self.drop(kept)
            return None
        if stream and is_captured(kept.device):
            self.uncached[Uncached.CUDA_GRAPH] += 1
            return None
        kept.other_stream_reads = 0
        self.hits += 1  # no call in it: CPython does not switch threads in the middle
        if switch.strict:
            decoded = decode(weight)
            if isinstance(decoded, Reason):
                return decoded
            self.compare(result, decoded)
        return result

    def find(self, weight: PackedWeight) -> tuple[Tensor, CacheEntry] | None:
        """What is kept of a weight and still true, or None."""
        kept: CacheEntry | None = None
        try:
            memo = weight.memo()
            result = None if memo.entry is None else memo.entry.of(weight)
            if result is not None:
                return result, memo.entry
            kept = self.weights.get(location(weight))
            if kept is None:
                return None
            if kept.fingerprint == fingerprint(weight) and (result := kept.of(weight)) is not None:
                memo.entry = kept
                return result, kept
        except NOT_KNOWN:
            pass
        self.drop(kept)
        return None

    def why_not(self, weight: PackedWeight) -> Uncached | None:
        """Return why a weight on the kernels' device cannot be cached at all, or not now."""
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
        memory = self.memories.get(weight.packed.untyped_storage()._cdata)
        why = None if memory is None else memory.why_not(owner)
        if why is Uncached.ALIASED:
            self.drop_memory(weight.packed.untyped_storage()._cdata)
        return why

    def insert(self, weight: PackedWeight, decode: Decode) -> Tensor | Reason | None:
        """What ``decode`` gives, kept if it is a tensor; or None with nothing decoded, where it is not to be kept."""
        tensors = weight[: 5 if weight.nested() else 2]
        plain = isinstance(weight.shape, tuple) and isinstance(weight.dtype, torch.dtype)
        if not plain or not all(isinstance(each, Tensor) for each in tensors) or not runtime.runs_on(weight.packed):
            return None  # the guards give the Reason
        why = self.why_not(weight)
        if why is None:
            result = self.keep(weight, decode)
            if result is not None:
                return result
            why = self.no_room()
        self.misses += 1
        self.uncached[why] += 1
        return None

    def keep(self, weight: PackedWeight, decode: Decode) -> Tensor | Reason | None:
        """What ``decode`` gives; a tensor is kept until the weight changes. None without room."""
        mode, result, device, size = self.mode, None, weight.packed.get_device(), size_of(weight)
        with self.lock:  # nothing is decoded under it
            self.settle()
            if not self.on or size > self.room(device):
                return None
        kept = CacheEntry(weight)
        self.misses += 1
        try:
            with torch.inference_mode(False):  # training may read what generation decoded
                result = decode(weight)
        except torch.OutOfMemoryError as error:
            if self.auto is None:
                raise
            self.auto.wait(f"{error}"[:80])  # the caller decodes without keeping, as it would without the cache
        if isinstance(result, Tensor):
            with self.lock:
                self._drop(self.weights.get(kept.location))  # another thread was faster
                self.settle()
                if self.mode == mode and size <= self.room(device):
                    self._add(kept, weight, result)
        return result

    def room(self, device: int) -> int:
        return self.budget - self.taken[device]

    def _add(self, kept: CacheEntry, weight: PackedWeight, result: Tensor) -> None:
        owner, storage = weight.owner(), weight.packed.untyped_storage()
        if len(self.memories) > 10 * len(self.weights) + 64:
            self.memories = {number: each for number, each in self.memories.items() if not each.reference.expired()}
        self.memories.setdefault(storage._cdata, StorageRecord(kept.memory, weakref.ref(owner)))
        for scales in kept.scales:
            self.memories.setdefault(scales._cdata, StorageRecord(StorageWeakRef(scales), nobody))
        kept.fill(weight, result, lambda _: self.died(kept))
        # Looked at later: PyTorch 2.8 lets go of a storage's Python object in every collection, while its tensors live, and
        # 2.13 before the storage has expired
        kept.watcher = weakref.ref(storage, lambda _: setattr(self, "death", object()))
        self.weights[kept.location], self.taken[kept.device] = kept, self.taken[kept.device] + kept.size

    # --- dropping ---

    def _drop(self, kept: CacheEntry | None) -> None:
        """Forget it, once; nothing for None. Its memory is charged until nobody uses it."""
        if kept is None or self.weights.get(kept.location) is not kept:
            return
        self.leaving.append(kept)  # twice after an interrupt, and charged once
        del self.weights[kept.location]
        kept.empty()

    def _drop_where(self, condition: Callable[[CacheEntry], bool]) -> None:
        for kept in list(self.weights.values()):
            if condition(kept):
                self._drop(kept)

    def drop(self, kept: CacheEntry | None) -> None:
        with self.lock:
            self._drop(kept)
            self.settle()

    def release(self, condition: Callable[[CacheEntry], bool] = lambda kept: True) -> None:
        """Drop what the condition holds for: its memory is PyTorch's again as soon as nobody uses it."""
        with self.lock:
            self._drop_where(condition)
            self.settle()

    def drop_memory(self, cdata: int, resized: bool = False) -> None:
        """Drop what was decoded from this storage; ``resized``: and cache nothing of it any more."""
        memory = self.memories.get(cdata)
        if memory is None or memory.reference.expired():
            return
        memory.resized = memory.resized or resized
        self.release(lambda kept: cdata in (kept.memory.cdata, *(each._cdata for each in kept.scales)))

    def forget(self, tensor: Tensor) -> None:
        """Drop what was decoded from this tensor, and every weak reference to it."""
        with self.lock:
            self.release(lambda kept: any(reference() is tensor for reference in kept.tensors))
            self.memories = {key: each for key, each in self.memories.items() if each.owner() is not tensor}
            if self.auto is not None and self.auto.forwarded() is tensor:
                self.auto.forwarded = nobody

    # --- what is said ---

    def no_room(self) -> Uncached:
        return Uncached.WAITING if self.auto is not None and not self.budget else Uncached.BUDGET_SPENT

    def snapshot(self) -> CacheStatus:
        """Changes nothing and does not wait for the lock: a signal handler may ask, in the middle of a change."""
        kept, taken = list(self.weights.values()), Counter[int]()
        for each in dict.fromkeys((*kept, *self.leaving)):
            taken[each.device] += 0 if each.dense_memory.expired() else each.size
        kept = [each for each in kept if each.views is not None]
        return CacheStatus(
            mode=str(self.mode or "off"),
            taken={device: size for device, size in taken.items() if size},
            weights=len(kept),
            hits=self.hits,
            misses=self.misses,
            uncached={why.name: count for why, count in list(self.uncached.items())},
            compiled=sum(each.compiled for each in kept),
            found=self.auto.why if self.auto else "",
        )

    def compare(self, cached: Tensor, decoded: Tensor) -> None:
        """
        Raises:
            StaleWeightError: the bits differ.
        """
        if not runtime.same_bits(cached, decoded):
            self.release()
            raise StaleWeightError(
                f"a cached weight {tuple(cached.shape)} differs from its packed bytes, which were changed where no version "
                "counter sees it (tensor.data, a raw pointer); call nf4_patch.release() after such a change"
            )


class StorageRecord:
    """Memory that a cached weight depends on: the parameter whose packed bytes it holds, and whether it was resized.

    FSDP frees and refills memory by ``resize_``, and keeps the version counters. A second parameter of the same memory has a
    version counter of its own.
    """

    def __init__(self, reference: StorageWeakRef, owner: Callable[[], Tensor | None]):
        self.reference, self.owner = reference, owner  # while the first is held, no other memory has this number
        self.resized = self.aliased = False

    def why_not(self, owner: Tensor) -> Uncached | None:
        known = self.owner()
        if known is None:
            self.owner = weakref.ref(owner)
        self.aliased = self.aliased or (known is not None and known is not owner)
        return Uncached.REFILLED if self.resized else Uncached.ALIASED if self.aliased else None


def is_captured(device: int) -> bool:
    """Whether what is allocated now belongs to a CUDA graph, in the warm-up before torch.compile captures one as well.

    That warm-up runs on a stream of its own, and allocates from the graph's private pool.
    """
    stream = runtime.current_stream(device)
    if not stream:  # the default stream cannot be captured
        return False
    return "torch._inductor.cudagraph_trees" in sys.modules or runtime.is_capturing()


cache = dequantizer.reader = Cache()
atexit.register(cache.configure, "off")  # before the interpreter takes modules apart, in which tensors die
switch.follow(lambda config: cache.configure(switch.value("cache")))
