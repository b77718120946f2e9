"""A dense weight in the cache: the parameter it belongs to, and what tells that the packed bytes still decode to it."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...nf4 import runtime
from ..quant_state import Fields
from ..reasons import Uncached
from .allocator import allocated

Key = tuple[int, torch.Size, torch.dtype]  # address and shape of the packed bytes, dtype of the result


def nobody() -> None:
    return None


def owner_of(packed: Tensor) -> Tensor:
    """The tensor whose memory ``packed`` is or looks at; a weight is cached only where that is a parameter.

    What Inductor computes or reinterprets has no ``_base``: addresses and version counters say nothing there.
    """
    base = packed._base
    return packed if base is None else base


def fingerprint(packed: Tensor, fields: Fields, quant_type: Any) -> tuple[Any, ...]:
    """What a result depends on beyond the Key and which tensors they are: storage, addresses, versions, plain fields.

    Raises:
        AttributeError: a field is no tensor.
        RuntimeError: an inference tensor, which has no version counter, or a tensor with no address.
    """
    absmax, _, absmax2, code2, offset, blocksize, blocksize2, shape, _ = fields
    storage = packed.untyped_storage()._cdata
    if absmax2 is None:
        return storage, packed._version, absmax.data_ptr(), absmax._version, blocksize, shape, quant_type
    return (
        storage, packed._version, absmax.data_ptr(), absmax._version, absmax2.data_ptr(), absmax2._version,
        code2.data_ptr(), code2._version, offset.data_ptr(), offset._version, blocksize, blocksize2, shape, quant_type,
    )  # fmt: skip


class Holder(Protocol):
    """Who reads a weight without asking for it, and lets go of it when the cache drops it."""

    def take(self, entry: Entry) -> None: ...

    def let_go(self) -> None: ...


SCALES = (0, 2, 3, 4)  # absmax, absmax2, code2, offset: their places in Fields


@dataclass(slots=True, eq=False)
class Entry:
    """It owns the dense weight; the parameter, its memory and the scales are held weakly."""

    sources: tuple[Tensor | None, ...]  # the parameter, absmax, absmax2, code2 and offset: until it is decoded
    fingerprint: tuple[Any, ...]
    device: int  # -1: the CPU
    size: int  # bytes in the allocator
    storage_key: tuple[Any, ...]
    keys: list[Key]
    task: int = -1  # or the backward pass that it does not outlive
    holder: Holder | None = None  # then it is never evicted
    # from here on: of what is decoded
    owner: weakref.ref[Tensor] = field(init=False)
    scales: tuple[Callable[[], Any], ...] = field(init=False)  # weak references to the rest of ``sources``
    storage: StorageWeakRef = field(init=False)  # of the packed bytes: while it is held, no other has this ``cdata``
    dense: Tensor = field(init=False)
    written: int = field(init=False)  # the version of ``dense``
    stream: int | None = field(init=False)  # on which it was decoded
    same_size: OrderedDict[Entry, None] = field(default_factory=OrderedDict)  # the least recently used first
    watchers: list[Any] = field(default_factory=list)
    dead: bool = False  # a tensor that it was decoded from was freed

    @classmethod
    def of(cls, packed: Tensor, fields: Fields, quant_type: Any, owner: Tensor, **options: Any) -> Entry:
        """That of a weight which is still to be decoded. Raises as ``fingerprint``."""
        key = packed.data_ptr(), packed.shape, fields[8]
        return cls(
            sources=(owner, *(fields[i] for i in SCALES)),
            fingerprint=fingerprint(packed, fields, quant_type),
            device=packed.get_device(),
            size=allocated(2 * packed.nbytes * getattr(fields[8], "itemsize", 0)),
            storage_key=storage_key(key, packed.nbytes),
            keys=[key],
            **options,
        )

    def complete(self, packed: Tensor, result: Tensor) -> list[Tensor]:
        """With the decoded weight. Returns ``sources``, which are held weakly from now on."""
        tensors = [source for source in self.sources if source is not None]
        self.owner = weakref.ref(tensors[0])
        self.scales = tuple(nobody if scale is None else weakref.ref(scale) for scale in self.sources[1:])
        self.sources = ()
        self.storage = StorageWeakRef(packed.untyped_storage())
        self.dense, self.written = (result.t() if packed.shape[0] == 1 else result), result._version
        self.stream = runtime.current_stream(self.device) if packed.is_cuda else None
        return tensors


def refusal(packed: Tensor, owner: Tensor) -> Uncached | None:
    """Why a weight cannot be cached at all, or not now."""
    if not isinstance(owner, torch.nn.Parameter):
        return Uncached.NOT_A_PARAMETER
    if hasattr(owner, "ds_id"):
        return Uncached.ZERO3
    if packed.is_cuda and is_captured(packed.get_device()):
        return Uncached.CUDA_GRAPH
    storage = weakref.ref(packed.untyped_storage())()
    if storage is None:
        return Uncached.NO_STORAGE_OBJECT
    watch = vars(storage).get("resize_")
    if watch is None:
        return None
    if watch.resized:
        return Uncached.REFILLED
    return Uncached.SHARED if watch.shared_with_another(owner) else None


def is_captured(device: int) -> bool:
    """Whether what is allocated now belongs to a CUDA graph, in the warm-up before torch.compile captures one as well.

    That warm-up runs on a stream of its own, and allocates from the graph's private pool.
    """
    stream = runtime.current_stream(device)
    if not stream:  # the default stream cannot be captured
        return False
    return "torch._inductor.cudagraph_trees" in sys.modules or torch.cuda.is_current_stream_capturing()


class StorageWatch:
    """Stands in for ``resize_`` of one storage: FSDP frees and refills memory so, and keeps the version counters.

    It also knows the parameter that the storage was cached for: a second one has a version counter of its own.
    """

    def __init__(self, storage: torch.UntypedStorage):
        # not a StorageWeakRef: the storage holds this, and under PyTorch 2.6 its object lives as long as such a reference
        self.cdata = storage._cdata
        self.owner: Callable[[], Tensor | None] = nobody
        self.resized = self.shared = False
        self.notify: set[Callable[[int], None]] = set()  # one, and that of an earlier import of this package

    @classmethod
    def over(cls, storage: torch.UntypedStorage, owner: Tensor, notify: Callable[[int], None]) -> None:
        watch = vars(storage).setdefault("resize_", cls(storage))
        watch.notify.add(notify)
        if watch.owner() is None:
            watch.owner = weakref.ref(owner)

    @classmethod
    def disown(cls, owner: Tensor) -> None:
        watch = vars(owner.untyped_storage()).get("resize_")
        if isinstance(watch, cls) and watch.owner() is owner:
            watch.owner = nobody

    def shared_with_another(self, owner: Tensor) -> bool:
        known = self.owner()
        if known is not None and known is not owner and not self.shared:
            self.shared = True
            self.tell()
        return self.shared

    def tell(self) -> None:
        for notify in list(self.notify):
            notify(self.cdata)

    def __call__(self, *size: int) -> Any:
        self.resized = True
        self.tell()
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self.cdata)  # alive: it is called
        return torch.UntypedStorage.resize_(storage, *size)


def storage_key(key: Key, nbytes: int) -> tuple[Any, ...]:
    """The key of a weight and of its transpose, whose packed bytes are [bytes, 1] and [1, bytes]."""
    return key[0], nbytes, key[2]
