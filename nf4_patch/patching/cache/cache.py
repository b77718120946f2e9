"""A cache of dequantized weights, for callers that only read them: ``enable(cache="6GiB")`` or ``cache="block"``.

Weights are frozen, so a training step decodes the same bytes two or three times. A step uses the layers 0 to L and
back: what was read last is read next, so the least recently used weight makes room, and only for one of its own size:
memory never fragments. docs/notes/weight-cache.md compares the policies.

A cached weight belongs to a parameter, whose identity, version counter and memory are looked at in every read.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...nf4 import runtime
from ..reasons import Reason, Uncached
from ..status import CacheStatus
from ..switch import switch
from .auto import Auto
from .entry import Entry, Fields, Holder, Key, StorageWatch, fingerprint, is_captured, owner_of, refusal, storage_key

current_task: Any = torch._C._current_graph_task_id  # of the autograd engine; -1 outside a backward pass
# With "block", weights waiting for their backward. A block of Llama has 7; where the backward is compiled none is read.
WAITING = 16
Decode = Callable[[], Tensor | Reason]
engine: Any = torch.autograd.Variable._execution_engine


class StaleWeightError(RuntimeError):
    """NF4_PATCH_STRICT=1, and a cached weight differs from what its packed bytes decode to."""


class Cache:
    """One for the process. ``on`` is all that a call looks at where the cache is off.

    Every change is made under ``lock``, which no thread takes twice. The death of a tensor comes at any point of any
    thread, in the middle of a change too: it is queued in ``dead`` and seen to by whoever lets go of the lock.
    """

    def __init__(self) -> None:
        self.on = False
        self.mode: str | int = "off"
        self.auto: Auto | None = None  # finds the budget
        self.budget = 0
        self.tight = False  # half of the budget is used: from here on it counts which weight was read last
        self.results: dict[Key, tuple[Tensor, Entry]] = {}
        self.entries: dict[Any, Entry] = {}  # by ``storage_key``
        self.same_size: dict[tuple[int, int], OrderedDict[Entry, None]] = defaultdict(OrderedDict)
        self.held: Counter[int] = Counter()  # bytes by device
        self.never_evicted: Counter[int] = Counter()  # of these, what compiled layers read
        self.generation = 0  # changes when what compiled layers read may have room again
        self.tasks: set[int] = set()  # backward passes at whose end entries are dropped
        self.hits = self.misses = 0
        self.uncached: Counter[Uncached] = Counter()
        self.lock = threading.Lock()
        self.dead: deque[Entry] = deque()

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self.lock:
            self._bury()
            yield
        self._settle()

    def _bury(self) -> None:
        while self.dead:
            entry = self.dead.popleft()
            if entry.dead or entry.storage.expired():
                self._drop(entry)

    def _settle(self) -> None:
        """Drop what died while the lock was held; whoever holds it now does it otherwise."""
        while self.dead and self.lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self.lock.release()

    def died(self, entry: Entry) -> None:
        """A tensor of the entry was freed. Called by the garbage collector, at any point of any thread."""
        entry.dead = True
        self.dead.append(entry)
        self._settle()

    def configure(self, mode: str | int) -> None:
        """ "off", "block", "auto" or bytes a device. Another mode starts empty."""
        with self.locked():
            if mode != self.mode:
                self.on = False
                self._drop_where()
                self.tight = False
                if self.auto is not None:
                    self.auto.stop()
                self.auto = Auto(self.may_take, self.held) if mode == "auto" else None
                self.mode, self.budget = mode, mode if isinstance(mode, int) else {"auto": 0}.get(mode, sys.maxsize)
                self.generation += 1
                self.on = mode != "off"

    @property
    def sized(self) -> bool:
        """Whether it is on and keeps weights from one step to the next."""
        return self.on and self.mode != "block"

    def may_take(self, budget: int) -> None:
        """Bytes of every device from now on; what is there stays, or goes where they are none."""
        with self.locked():
            self.budget, self.tight = budget, False
            self.generation += 1
            if not budget:
                self._drop_where()

    def find(self, packed: Tensor, fields: Fields, quant_type: Any, backward: bool = False) -> Tensor | None:
        """The cached weight, not to be written into; or None.

        Args:
            fields: those of a Layout after ``packed``; the code is not read.
            backward: this backward pass is not expected to read the weight again.

        Raises:
            AttributeError, RuntimeError: see ``fingerprint``.
        """
        if self.dead:
            with self.locked():  # a tensor that died may have left its address to another
                pass
        key = packed.data_ptr(), packed.shape, fields[8]
        found = self.results.get(key)
        if found is None:
            found = self.other_way(key, packed.nbytes)
            if found is None:
                return None
        result, entry = found
        base = packed._base  # see owner_of
        first, second, third, fourth = entry.scales
        if not (
            # these very tensors: another may have come to the address of one, with its version
            entry.owner() is (packed if base is None else base)
            and first() is fields[0]
            and second() is fields[2]
            and third() is fields[3]
            and fourth() is fields[4]
            and fingerprint(packed, fields, quant_type) == entry.fingerprint
            and result._version == entry.written  # nobody wrote into what is handed out
        ):
            self.drop(entry)
            return None
        if entry.stream is not None:
            stream = runtime.current_stream(entry.device)
            reason = None
            if stream != entry.stream:
                reason = Uncached.OTHER_STREAM
            elif stream and is_captured(entry.device):
                reason = Uncached.CUDA_GRAPH
            if reason is not None:
                self.refuse(reason)
                return None
        if entry.task != -1:
            if backward:
                self.drop(entry)
            elif current_task() == -1:
                self.drop_recomputed()
        self.hits += 1  # no call in it: CPython does not switch threads in the middle
        if self.tight:
            self.lock.acquire()  # and release: ``with`` takes 0.08 us more (2-core CPU machine, Python 3.11)
            try:
                entry.same_size.move_to_end(entry)
            except KeyError:  # another thread dropped it, or this was its last read
                pass
            finally:
                self.lock.release()
        return result

    def other_way(self, key: Key, nbytes: int) -> tuple[Tensor, Entry] | None:
        """The weight where it was cached for the packed bytes the other way round, [1, bytes] or [bytes, 1]."""
        if storage_key(key, nbytes) not in self.entries:
            return None
        with self.locked():
            entry = self.entries.get(storage_key(key, nbytes))
            if entry is None or entry.dense.dim() > 2:
                return None
            found = self.results[key] = entry.dense.t() if key[1][0] == 1 else entry.dense, entry
            entry.keys.append(key)
        return found

    def insert(
        self, packed: Tensor, fields: Fields, quant_type: Any, decode: Decode, backward: bool = False
    ) -> Tensor | Reason | None:
        """What ``decode`` gives, cached if it is a tensor; or None with nothing decoded, where it is not to be cached.

        Args and Raises: as ``find``.
        """
        task = -1
        if self.mode == "block":
            task = current_task()
            if task == -1 and self.tasks:
                self.drop_recomputed()
        reason = None
        if self.mode != "block" or not (task == -1 or backward):
            owner = owner_of(packed)
            entry = Entry.of(packed, fields, quant_type, owner, task=task)
            reason = refusal(packed, owner)
            if reason is None and self.budget:  # "auto" waits with none
                result = self._insert(entry, packed, decode)
                if result is not None:
                    return result
            reason = reason or Uncached.BUDGET_SPENT
        with self.locked():
            self.misses += 1
            if reason is not None:
                self.uncached[reason] += 1
        return None

    def may_hold(self, device: int, size: int) -> bool:
        """Whether so many bytes more for compiled layers are within the budget."""
        return self.never_evicted[device] + size <= self.budget

    def hold(
        self, packed: Tensor, fields: Fields, quant_type: Any, decode: Decode, holder: Holder
    ) -> Tensor | Reason | None:
        """What ``decode`` gives; a tensor is the holder's until the weight changes. None without room. Raises as ``find``."""
        return self._insert(Entry.of(packed, fields, quant_type, packed, holder=holder), packed, decode)

    def _insert(self, entry: Entry, packed: Tensor, decode: Decode) -> Tensor | Reason | None:
        mode, result = self.mode, None
        with self.locked():
            self._drop(self.entries.get(entry.storage_key))  # decoded on another stream
            while entry.task != -1 and len(self.entries) >= WAITING:
                self._drop(next(iter(self.entries.values())))
            if not (self.on and self._make_room(entry)):
                return None
            self.held[entry.device] += entry.size  # reserved: nothing is decoded under the lock
            self.misses += 1
        try:
            with torch.inference_mode(False):  # training may read what generation decoded
                result = decode()
        except torch.OutOfMemoryError as error:
            if self.auto is None:
                raise
            self.auto.wait(f"{error}"[:80])  # the caller decodes without keeping, as it would without the cache
        finally:
            with self.locked():
                self.held[entry.device] -= entry.size
                fits = self.held[entry.device] + entry.size <= self.budget
                if isinstance(result, Tensor) and self.mode == mode and fits:
                    self._add(entry, packed, result)
        return result

    def _make_room(self, wanted: Entry) -> bool:
        device, size = wanted.device, wanted.size

        def full() -> bool:
            return self.held[device] + size > self.budget

        if full():
            self._drop_where(lambda entry: entry.storage.expired())
        same_size = self.same_size[device, size]
        while full() and same_size:
            self._drop(next(iter(same_size)))
        if full() and wanted.holder is not None:
            self._drop_where(lambda entry: entry.device == device and entry.holder is None)
        return not full()

    def _add(self, entry: Entry, packed: Tensor, result: Tensor) -> None:
        storage, device = packed.untyped_storage(), entry.device
        tensors = entry.complete(packed, result)
        self._drop(self.entries.get(entry.storage_key))  # another thread was faster
        StorageWatch.over(storage, tensors[0], self.drop_storage)
        if entry.holder is None:
            entry.same_size = self.same_size[device, entry.size]
        entry.watchers = [weakref.ref(tensor, lambda _: self.died(entry)) for tensor in tensors]
        # Looked at later: PyTorch 2.8 lets go of a storage's Python object in every collection, while its tensors live, and
        # 2.13 before the storage has expired
        entry.watchers.append(weakref.ref(storage, lambda _: self.dead.append(entry)))
        task = entry.task
        if task != -1 and task not in self.tasks:
            self.tasks.add(task)
            engine.queue_callback(lambda: self.drop_recomputed(task))
        entry.same_size[entry] = None
        self.held[device] += entry.size
        self.tight = self.tight or 2 * self.held[device] > self.budget
        self.entries[entry.storage_key] = entry
        self.results[entry.keys[0]] = result, entry
        if entry.holder is not None:
            self.never_evicted[device] += entry.size
            entry.holder.take(entry)

    def _drop(self, entry: Entry | None) -> None:
        """Forget it, once; nothing for None."""
        if entry is None or entry.same_size.pop(entry, self) is self:
            return
        self.held[entry.device] -= entry.size
        self.entries.pop(entry.storage_key, None)
        for key in entry.keys:
            self.results.pop(key, None)
        entry.watchers = []  # which refer to the entry
        if entry.holder is not None:
            self.never_evicted[entry.device] -= entry.size
            self.generation += 1
            entry.holder.let_go()

    def _drop_where(self, condition: Callable[[Entry], bool] = lambda entry: True) -> None:
        for entry in list(self.entries.values()):
            if condition(entry):
                self._drop(entry)

    def drop(self, entry: Entry) -> None:
        with self.locked():
            self._drop(entry)

    def forget(self, tensor: Tensor) -> None:
        """Drop what was decoded from this tensor, and every weak reference to it."""
        with self.locked():
            self._drop_where(lambda entry: any(watcher() is tensor for watcher in entry.watchers))
        StorageWatch.disown(tensor)

    def drop_storage(self, cdata: int) -> None:
        with self.locked():
            self._drop_where(lambda entry: entry.storage.cdata == cdata)

    def drop_recomputed(self, task: int | None = None) -> None:
        """Drop what a backward pass (None: any) kept and nobody read. A pass that raises never calls this at its end."""
        with self.locked():
            self._drop_where(lambda entry: entry.task != -1 and task in (None, entry.task))
            self.tasks -= self.tasks.copy() if task is None else {task}

    def release(self) -> None:
        """Drop everything: the memory is PyTorch's again when this returns."""
        with self.locked():
            self._drop_where()

    def refuse(self, reason: Uncached) -> None:
        with self.locked():
            self.uncached[reason] += 1

    def snapshot(self) -> CacheStatus:
        with self.locked():
            return CacheStatus(
                mode=str(self.mode),
                held={device: size for device, size in self.held.items() if size},
                weights=len(self.entries),
                hits=self.hits,
                misses=self.misses,
                uncached={reason.name: count for reason, count in self.uncached.items()},
                compiled=sum(entry.holder is not None for entry in self.entries.values()),
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


cache = Cache()
switch.follow(lambda config: cache.configure("off" if config is None else config.cache))
