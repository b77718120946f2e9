"""A dense weight in the cache, and the fingerprint that tells whether the packed bytes still decode to it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .reasons import Uncached

Key = tuple[int, torch.Size, torch.dtype]  # address and shape of the packed bytes, dtype of the result
Fields = tuple[Any, ...]  # of a Layout after ``packed``


def fingerprint(packed: torch.Tensor, fields: Fields, quant_type: Any) -> tuple[Any, ...]:
    """What a result depends on beyond the Key: addresses and version counters of what is decoded, and the plain fields.

    Raises:
        AttributeError: a field is no tensor.
        RuntimeError: an inference tensor, which has no version counter, or a tensor with no address.
    """
    absmax, _, absmax2, code2, offset, blocksize, blocksize2, shape, _ = fields
    if absmax2 is None:
        return packed._version, absmax.data_ptr(), absmax._version, blocksize, shape, quant_type
    return (
        packed._version, absmax.data_ptr(), absmax._version, absmax2.data_ptr(), absmax2._version,
        code2.data_ptr(), code2._version, offset.data_ptr(), offset._version, blocksize, blocksize2, shape, quant_type,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class Entry:
    """It owns the dense weight and holds the storages of the packed bytes and of the scales weakly."""

    dense: torch.Tensor
    storage: weakref.ref[torch.UntypedStorage]  # of the packed bytes
    fingerprint: tuple[Any, ...]
    device: int  # -1: the CPU
    stream: int | None  # on which it was decoded
    size: int  # bytes in the allocator
    task: int  # -1, or the backward pass that it does not outlive
    either_way: tuple[int, torch.dtype]
    peers: OrderedDict[Entry, None]  # of the same size, oldest first
    keys: list[Key]
    watchers: list[Any] = field(default_factory=list)
    written: int = 0  # the version of ``dense``


def refusal(packed: torch.Tensor) -> Uncached | None:
    """Why a weight cannot be cached at all, or not now."""
    if hasattr(packed, "ds_id") or hasattr(packed._base, "ds_id"):
        return Uncached.ZERO3
    if packed.is_cuda and torch.cuda.is_current_stream_capturing():
        return Uncached.CUDA_GRAPH
    storage = weakref.ref(packed.untyped_storage())()
    if storage is None:
        return Uncached.NO_STORAGE_OBJECT
    watch = vars(storage).get("resize_")
    return Uncached.REFILLED if watch is not None and watch.resized else None


class ResizeWatch:
    """Stands in for ``resize_`` of one storage: FSDP frees and refills memory so, and keeps the version counters."""

    def __init__(self, storage: torch.UntypedStorage, notify: Callable[[torch.UntypedStorage], None]):
        self.storage, self.notify, self.resized = weakref.ref(storage), notify, False

    @classmethod
    def over(cls, storage: torch.UntypedStorage, notify: Callable[[torch.UntypedStorage], None]) -> None:
        vars(storage).setdefault("resize_", cls(storage, notify))

    def __call__(self, *size: int) -> Any:
        self.resized = True
        storage: Any = self.storage()
        self.notify(storage)
        return torch.UntypedStorage.resize_(storage, *size)


def either_way(key: Key) -> tuple[int, torch.dtype]:
    """The key of a weight and of its transpose, whose packed bytes are [bytes, 1] and [1, bytes]."""
    return key[0], key[2]


def allocated(nbytes: int) -> int:
    """What the CUDA allocator takes for a tensor, at most: whole 512 bytes, and beyond 1 MiB a rest of up to 1 MiB."""
    rounded = -(-nbytes // 512) * 512
    return rounded if rounded <= 2**20 else rounded + 2**20
