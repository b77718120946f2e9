"""The cache of dequantized weights, for callers that only read them: ``enable(cache="6GiB")`` or ``cache="auto"``.

Weights are frozen, so a training step decodes the same bytes two or three times. A step uses the layers 0 to L and
back: what was read last is read next, so the least recently used weight makes room, and only for one of its own size:
memory never fragments. docs/notes/weight-cache.md compares the policies.

A cached weight belongs to a parameter, whose identity, version counter and memory are looked at in every read.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...nf4 import runtime
from ...nf4.weight import Weight
from .. import dequantizer
from ..reasons import Reason
from ..switch import switch
from .auto import Auto
from .cached import Cached, location, nobody, size_of
from .option import CacheStatus, Uncached

Decode = Callable[[Weight], "Tensor | Reason"]
NOT_KNOWN = (AttributeError, RuntimeError, TypeError)  # a field is no tensor, an inference tensor, or the shape a list
STRANGERS = 3  # reads on other streams in a row, after which a weight is decoded again on theirs


class StaleWeightError(RuntimeError):
    """NF4_PATCH_STRICT=1, and a cached weight differs from what its packed bytes decode to."""


class Cache(dequantizer.Reader):
    """One for the process.

    Every change is made under ``lock``, which no thread takes twice. The death of a tensor comes at any point of any
    thread, in the middle of a change too: it is queued, and seen to by whoever takes the lock next.
    """

    def __init__(self) -> None:
        self.on = False
        self.mode: str | int = "off"
        self.auto: Auto | None = None  # finds the budget
        self.budget = 0
        self.tight = False  # half of the budget is used: from here on it counts which weight was read last
        self.results: dict[tuple[Any, ...], tuple[Tensor, Cached]] = {}  # by ``Weight.proof``
        self.weights: dict[tuple[Any, ...], Cached] = {}  # by ``location``
        self.same_size: dict[tuple[int, int], OrderedDict[Cached, None]] = defaultdict(OrderedDict)
        self.taken: Counter[int] = Counter()  # bytes by device, of what was dropped too while somebody still uses it
        # what is being decoded: device and size, charged for as long as the call of ``keep`` lasts, however that ends
        self.decoding: dict[weakref.ref[Decoding], tuple[int, int]] = {}
        self.leaving: list[tuple[StorageWeakRef, int, int]] = []  # dropped, and still used by somebody: device and size
        self.memories: dict[int, Memory] = {}  # of packed bytes and of scales, by the number of their storage
        self.generation = 0  # changes when there may be room again for what compiled layers read
        self.hits = self.misses = 0
        self.uncached: Counter[Uncached] = Counter()
        self.lock = threading.RLock()  # whose owner is known: an interrupt in ``settle`` leaves it free
        self.dead: deque[Cached] = deque()

    # --- deaths ---

    def _bury(self) -> None:
        """See to the deaths so far. Under the lock."""
        while self.dead:
            cached = self.dead.popleft()
            if cached.dead or cached.memory.expired():
                self._drop(cached)
            del cached  # or its dense copy would live on
        for leaving in self.leaving[:]:
            dense, device, size = leaving
            if dense.expired():
                self.leaving.remove(leaving)
                self.taken[device] -= size
                self.generation += 1

    def settle(self) -> None:
        """See to the deaths so far, unless somebody holds the lock, who does it when the next change is made."""
        owned: Any = self.lock._is_owned  # type: ignore[attr-defined]
        pending = bool(self.dead or self.leaving) and not owned()  # not in the middle of a change of this thread
        while pending:
            try:
                if self.lock.acquire(blocking=False):
                    self._bury()
                pending = bool(self.dead) and owned()
            finally:
                if owned():
                    self.lock.release()

    def died(self, cached: Cached) -> None:
        """A tensor that it was decoded from was freed. Called by the garbage collector, at any point of any thread."""
        cached.dead = True
        self.dead.append(cached)
        self.settle()

    # --- how much it may take ---

    def configure(self, mode: str | int) -> None:
        """ "off", "auto" or bytes a device. Another mode starts empty."""
        if mode != self.mode:
            with self.lock:
                self.on = False
                self._drop_where()
                self.memories.clear()
                self.tight = False
                if self.auto is not None:
                    self.auto.stop()
                self.auto = Auto(self.may_take, self.taken) if mode == "auto" else None
                self.mode, self.budget = mode, mode if isinstance(mode, int) else 0
                self.generation += 1
                self.on = mode != "off"
            self.settle()

    def may_take(self, budget: int) -> None:
        """Bytes of every device from now on; what is there stays, or goes where they are none."""
        with self.lock:
            self.budget, self.tight = budget, False
            self.generation += 1
            if not budget:
                self._drop_where()
        self.settle()

    # --- reading ---

    def read(self, weight: Weight, decode: Decode) -> Tensor | Reason | None:
        """The cached weight, or one that is cached from now on, not to be written into; a Reason is possible too.

        Returns:
            None where the weight has to be decoded as without the cache.

        Raises:
            StaleWeightError: NF4_PATCH_STRICT=1, and the cached bits are not those of the packed bytes.
        """
        try:  # as ``find`` begins, without its call: 6.6 us a read, not 7.5 (a slow H200 machine)
            found = self.results.get(weight.proof())
            if found is None or not found[1].is_of(weight):
                found = self.find(weight)
        except NOT_KNOWN:
            found = self.find(weight)
        if found is None:
            return self.insert(weight, decode)
        result, cached = found
        stream = runtime.current_stream(cached.device)
        if stream != cached.stream:
            self.uncached[Uncached.OTHER_STREAM] += 1
            cached.strangers += 1
            if cached.strangers >= STRANGERS:
                self.drop(cached)
            return None
        if stream and is_captured(cached.device):
            self.uncached[Uncached.CUDA_GRAPH] += 1
            return None
        cached.strangers = 0
        self.hits += 1  # no call in it: CPython does not switch threads in the middle
        if self.tight:
            with self.lock:
                if cached in cached.same_size:  # another thread may have dropped it
                    cached.same_size.move_to_end(cached)
        if switch.strict:
            decoded = decode(weight)
            if isinstance(decoded, Reason):
                return decoded
            self.compare(result, decoded)
        return result

    def find(self, weight: Weight) -> tuple[Tensor, Cached] | None:
        """What is cached of a weight and still true, or None."""
        try:
            proof = weight.proof()
            found = self.results.get(proof)
            if found is not None and found[1].is_of(weight):
                return found
        except NOT_KNOWN:
            proof = ()
        if self.dead:
            self.settle()  # a tensor that died may have left its address to another
        cached = self.weights.get(location(weight))
        if cached is None:
            return None
        if proof[1:] == cached.proof[1:] and cached.is_of(weight):
            return self.other_way(proof, cached)
        self.drop(cached)
        return None

    def other_way(self, proof: tuple[Any, ...], cached: Cached) -> tuple[Tensor, Cached] | None:
        """The weight where it was cached for the packed bytes the other way round, [1, bytes] or [bytes, 1]."""
        if cached.dense.dim() > 2:
            return None
        with self.lock:
            found = cached.dense.t() if proof[0][0] == 1 else cached.dense, cached
            if self.weights.get(cached.location) is cached:
                self.results[proof] = found
                cached.proofs.append(proof)
        return found

    def why_not(self, weight: Weight) -> Uncached | None:
        """Why a weight cannot be cached at all, or not now."""
        owner = weight.owner()
        if any(tensor.is_inference() for tensor in weight.tensors()):
            return Uncached.INFERENCE_TENSOR
        if not isinstance(owner, torch.nn.Parameter):
            return Uncached.NOT_A_PARAMETER
        if hasattr(owner, "ds_id"):
            return Uncached.ZERO3
        if runtime.runs_on(weight.packed) and is_captured(weight.packed.get_device()):
            return Uncached.CUDA_GRAPH
        memory = self.memories.get(weight.packed.untyped_storage()._cdata)
        why = None if memory is None else memory.why_not(owner)
        if why is Uncached.ALIASED:
            self.drop_memory(weight.packed.untyped_storage()._cdata)
        return why

    def insert(self, weight: Weight, decode: Decode) -> Tensor | Reason | None:
        """What ``decode`` gives, cached if it is a tensor; or None with nothing decoded, where it is not to be cached."""
        tensors = weight[: 5 if weight.nested() else 2]
        plain = isinstance(weight.shape, tuple) and isinstance(weight.dtype, torch.dtype)
        if not plain or not all(isinstance(each, Tensor) for each in tensors):
            return None  # the guards say what it is
        why = self.why_not(weight)
        if why is None:
            result = self.keep(weight, decode)
            if result is not None:
                return result
            why = self.no_room()
        self.misses += 1
        self.uncached[why] += 1
        return None

    def keep(self, weight: Weight, decode: Decode, pin: bool = False) -> Tensor | Reason | None:
        """What ``decode`` gives; a tensor is kept until the weight changes, pinned or as long as there is room. None without
        room."""
        mode, result, charged = self.mode, None, Decoding()
        device, size, proof = weight.packed.get_device(), size_of(weight), weight.proof()
        with self.lock:
            self._bury()
            if not (self.on and self._make_room(device, size, pin)):
                return None
            self.decoding[weakref.ref(charged, self.decoding.pop)] = device, size  # nothing is decoded under the lock
        self.misses += 1
        try:
            with torch.inference_mode(False):  # training may read what generation decoded
                result = decode(weight)
        except torch.OutOfMemoryError as error:
            if self.auto is None:
                raise
            self.auto.wait(f"{error}"[:80])  # the caller decodes without keeping, as it would without the cache
        finally:
            with self.lock:
                del charged
                fits = self._charged(device) + size <= self.budget
                if isinstance(result, Tensor) and self.mode == mode and fits:
                    self._add(Cached(weight, proof, result, pin), weight, result)
            self.settle()
        return result

    def _charged(self, device: int) -> int:
        """Bytes that are taken, and that weights will take which are being decoded."""
        charged = self.taken[device]
        for where, size in list(self.decoding.values()):
            charged += size if where == device else 0
        return charged

    def _make_room(self, device: int, size: int, pin: bool) -> bool:
        def full() -> bool:
            self._bury()
            return self._charged(device) + size > self.budget

        if size > self.budget:
            return False
        same_size = self.same_size[device, size]
        while full() and same_size:
            self._drop(next(iter(same_size)))
        if full():
            self._drop_where(lambda cached: cached.memory.expired())
        if pin and full():
            self._drop_where(lambda cached: cached.device == device and not cached.pinned)
        return not full()

    def _add(self, cached: Cached, weight: Weight, result: Tensor) -> None:
        self._drop(self.weights.get(cached.location))  # another thread was faster
        owner, storage = weight.owner(), weight.packed.untyped_storage()
        if len(self.memories) > 10 * len(self.weights) + 64:
            self.memories = {number: each for number, each in self.memories.items() if not each.reference.expired()}
        self.memories.setdefault(storage._cdata, Memory(cached.memory, weakref.ref(owner)))
        for scales in cached.kept:
            self.memories.setdefault(scales._cdata, Memory(StorageWeakRef(scales), nobody))
        cached.watchers = [weakref.ref(t, lambda _: self.died(cached)) for t in (owner, *weight.tensors()[1:])]
        # Looked at later: PyTorch 2.8 lets go of a storage's Python object in every collection, while its tensors live, and
        # 2.13 before the storage has expired
        cached.watchers.append(weakref.ref(storage, lambda _: self.dead.append(cached)))
        self.taken[cached.device] += cached.size
        self.tight = self.tight or 2 * self.taken[cached.device] > self.budget
        if not cached.pinned:
            cached.same_size = self.same_size[cached.device, cached.size]
        cached.same_size[cached] = None
        self.weights[cached.location] = cached
        self.results[cached.proof] = result, cached

    # --- dropping ---

    def _drop(self, cached: Cached | None) -> None:
        """Forget it, once; nothing for None. Its memory is charged until nobody uses it."""
        if cached is None or cached.same_size.pop(cached, self) is self:
            return
        self.weights.pop(cached.location, None)
        for proof in cached.proofs:
            self.results.pop(proof, None)
        self.leaving.append((cached.dense_memory, cached.device, cached.size))
        cached.watchers = []  # which refer to it
        self.generation += cached.pinned

    def _drop_where(self, condition: Callable[[Cached], bool] = lambda cached: True) -> None:
        for cached in list(self.weights.values()):
            if condition(cached):
                self._drop(cached)

    def drop(self, cached: Cached) -> None:
        with self.lock:
            self._drop(cached)
        self.settle()

    def drop_memory(self, cdata: int, resized: bool = False) -> None:
        """Drop what was decoded from this storage; ``resized``: and cache nothing of it any more."""
        memory = self.memories.get(cdata)
        if memory is None or memory.reference.expired():
            return
        memory.resized = memory.resized or resized
        self.release(lambda cached: cdata in (cached.memory.cdata, *(each._cdata for each in cached.kept)))

    def forget(self, tensor: Tensor) -> None:
        """Drop what was decoded from this tensor, and every weak reference to it."""
        with self.lock:
            self._drop_where(lambda cached: any(watcher() is tensor for watcher in cached.watchers))
            self.memories = {key: each for key, each in self.memories.items() if each.owner() is not tensor}
        self.settle()

    def release(self, condition: Callable[[Cached], bool] = lambda cached: True) -> None:
        """Drop what the condition holds for: its memory is PyTorch's again as soon as nobody uses it."""
        with self.lock:
            self._drop_where(condition)
        self.settle()

    # --- what is said ---

    def pinned(self, device: int) -> int:
        """Bytes that compiled layers read."""
        return sum(cached.size for cached in list(self.weights.values()) if cached.pinned and cached.device == device)

    def no_room(self) -> Uncached:
        return Uncached.WAITING if self.auto is not None and not self.budget else Uncached.BUDGET_SPENT

    def snapshot(self) -> CacheStatus:
        """Without waiting for the lock: a signal handler may ask, in the middle of a change."""
        self.settle()
        weights = list(self.weights.values())
        return CacheStatus(
            mode=str(self.mode),
            taken={device: size for device, size in list(self.taken.items()) if size},
            weights=len(weights),
            hits=self.hits,
            misses=self.misses,
            uncached={why.name: count for why, count in list(self.uncached.items())},
            compiled=sum(cached.pinned for cached in weights),
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


class Decoding:
    """Lives as long as the decode of one weight that is to be kept."""

    __slots__ = ("__weakref__",)


class Memory:
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
if hasattr(os, "register_at_fork"):  # a child has no half of another thread's change, and the lock is free there
    os.register_at_fork(
        before=cache.lock.acquire, after_in_parent=cache.lock.release, after_in_child=cache.lock.release
    )
atexit.register(cache.configure, "off")  # before the interpreter takes modules apart, in which tensors die
switch.follow(lambda config: cache.configure(switch.value("cache")))
