"""A cache of dequantized weights, for callers that only read them: ``enable(cache="6GiB")`` or ``cache="block"``.

Weights are frozen, so a training step decodes the same bytes two or three times. A step uses the layers 0 to L and
back: what was read last is read next, so the least recently used weight makes room, and only for one of its own size:
memory never fragments. docs/notes/weight-cache.md compares the policies.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ..nf4 import runtime
from .cache_entry import Entry, Fields, Key, ResizeWatch, allocated, either_way, fingerprint, refusal
from .reasons import Uncached

current_task: Any = torch._C._current_graph_task_id  # of the autograd engine; -1 outside a backward pass
# With "block", weights waiting for their backward. A block of Llama has 7; where the backward is compiled none is read.
WAITING = 16
engine: Any = torch.autograd.Variable._execution_engine


class StaleWeightError(RuntimeError):
    """NF4_PATCH_STRICT=1, and a cached weight differs from what its packed bytes decode to."""


class Cache:
    """One for the process. ``on`` is all that a call looks at where the cache is off."""

    def __init__(self) -> None:
        self.on = self.sized = False  # sized: on, and not "block"
        self.mode: str | int = "off"
        self.budget = 0
        self.results: dict[Key, tuple[torch.Tensor, Entry]] = {}
        self.entries: dict[Any, Entry] = {}  # by ``either_way``
        self.peers: dict[tuple[int, int], OrderedDict[Entry, None]] = defaultdict(OrderedDict)
        self.held: Counter[int] = Counter()  # bytes by device; ``+=`` has no call in it: no thread comes between
        self.tasks: set[int] = set()  # backward passes at whose end entries are dropped
        self.hits = self.misses = 0
        self.uncached: Counter[Uncached] = Counter()
        self.lock = threading.RLock()

    def configure(self, mode: str | int) -> None:
        """ "off", "block" or bytes a device. Another mode starts empty."""
        with self.lock:
            if mode != self.mode:
                self.on = self.sized = False
                self.release()
                self.mode, self.budget = mode, mode if isinstance(mode, int) else sys.maxsize
                self.on, self.sized = mode != "off", isinstance(mode, int)

    def find(
        self, packed: torch.Tensor, fields: Fields, quant_type: Any, backward: bool = False
    ) -> torch.Tensor | None:
        """The cached weight, not to be written into; or None.

        Args:
            fields: those of a Layout after ``packed``; the code is not read.
            backward: this backward pass is not expected to read the weight again.

        Raises:
            AttributeError, RuntimeError: see ``fingerprint``.
        """
        key = packed.data_ptr(), packed.shape, fields[-1]
        found = self.results.get(key) or self.other_way(key)
        if found is None:
            return None
        result, entry = found
        if not (
            packed.untyped_storage() is entry.storage()
            and fingerprint(packed, fields, quant_type) == entry.fingerprint
            and result._version == entry.written  # nobody wrote into what is handed out
        ):
            self.drop(entry)
            return None
        if entry.stream is not None:
            stream = runtime.current_stream(entry.device)
            if stream != entry.stream:
                self.uncached[Uncached.OTHER_STREAM] += 1
                return None
            if stream and torch.cuda.is_current_stream_capturing():  # the default stream cannot be captured
                self.uncached[Uncached.CUDA_GRAPH] += 1
                return None
        if entry.task == -1:
            try:
                entry.peers.move_to_end(entry)
            except KeyError:  # dropped by another thread
                return None
        elif backward:
            self.drop(entry)
        elif current_task() == -1:
            self.drop_recomputed()
        self.hits += 1
        return result

    def other_way(self, key: Key) -> tuple[torch.Tensor, Entry] | None:
        """The weight where it was cached for the packed bytes the other way round, [1, bytes] or [bytes, 1]."""
        entry = self.entries.get(either_way(key))
        if entry is None or entry.dense.dim() > 2:
            return None
        found = self.results[key] = entry.dense.t() if key[1][0] == 1 else entry.dense, entry
        entry.keys.append(key)
        return found

    def keep(
        self, packed: torch.Tensor, fields: Fields, quant_type: Any, decode: Callable[[], Any], backward: bool = False
    ) -> Any:
        """What ``decode`` gives, cached if it is a tensor; or None with nothing decoded, where it is not to be cached.

        Args and Raises: as ``find``.
        """
        self.misses += 1
        task = -1
        if self.mode == "block":
            task = current_task()
            if task == -1 and self.tasks:
                self.drop_recomputed()
            if task == -1 or backward:
                return None
        known = fingerprint(packed, fields, quant_type)
        reason = refusal(packed)
        if reason is None:
            key = packed.data_ptr(), packed.shape, fields[-1]
            device, size = packed.get_device(), allocated(2 * packed.nbytes * getattr(fields[-1], "itemsize", 0))
            with self.lock:
                other = self.entries.get(either_way(key))
                if other is not None:  # decoded on another stream
                    self.drop(other)
                while task != -1 and len(self.entries) >= WAITING:
                    self.drop(next(iter(self.entries.values())))
                if self.on and self.make_room(device, size):
                    with torch.inference_mode(False):  # training may read what generation decoded
                        result = decode()
                    if isinstance(result, torch.Tensor):
                        self.add(key, known, packed, fields, result, size, task)
                    return result
            reason = Uncached.BUDGET_SPENT
        self.uncached[reason] += 1
        return None

    def make_room(self, device: int, size: int) -> bool:
        peers = self.peers[device, size]
        while self.held[device] + size > self.budget and peers:
            self.drop(next(iter(peers)))
        return self.held[device] + size <= self.budget

    def add(
        self, key: Key, known: tuple[Any, ...], packed: torch.Tensor, fields: Fields, result: torch.Tensor, size: int, task: int
    ) -> None:  # fmt: skip
        storage, device = packed.untyped_storage(), packed.get_device()
        ResizeWatch.over(storage, self.drop_of)
        entry = Entry(
            dense=result.t() if key[1][0] == 1 else result,
            storage=weakref.ref(storage),
            fingerprint=known,
            device=device,
            stream=runtime.current_stream(device) if packed.is_cuda else None,
            size=size,
            task=task,
            either_way=either_way(key),
            peers=self.peers[device, size],
            keys=[key],
            written=result._version,
        )
        read = (packed, *(fields[i] for i in (0, 2, 3, 4) if fields[i] is not None))
        entry.watchers = [weakref.ref(tensor.untyped_storage(), lambda _: self.drop(entry)) for tensor in read]
        if task != -1 and task not in self.tasks:
            self.tasks.add(task)
            engine.queue_callback(lambda: self.drop_recomputed(task))
        entry.peers[entry] = None
        self.held[device] += size
        self.entries[entry.either_way] = entry
        self.results[key] = result, entry

    def drop(self, entry: Entry) -> None:
        """Forget it, once. Takes no lock: the death of a storage comes here, at any point of any thread."""
        if entry.peers.pop(entry, self) is self:
            return
        self.held[entry.device] -= entry.size
        self.entries.pop(entry.either_way, None)
        for key in entry.keys:
            self.results.pop(key, None)
        entry.watchers = []  # which refer to the entry

    def drop_of(self, storage: torch.UntypedStorage) -> None:
        for entry in list(self.entries.values()):
            if entry.storage() is storage:
                self.drop(entry)

    def drop_recomputed(self, task: int | None = None) -> None:
        """Drop what a backward pass (None: any) kept and nobody read. A pass that raises never calls this at its end."""
        for entry in list(self.entries.values()):
            if entry.task != -1 and task in (None, entry.task):
                self.drop(entry)
        self.tasks -= self.tasks.copy() if task is None else {task}

    def release(self) -> None:
        """Drop everything: the memory is PyTorch's again when this returns."""
        with self.lock:
            for entry in list(self.entries.values()):
                self.drop(entry)

    def compare(self, cached: torch.Tensor, decoded: torch.Tensor) -> None:
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
