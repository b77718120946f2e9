"""A dense copy of a packed weight, and what tells that the packed bytes still decode to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..nf4 import runtime
from ..nf4.weight import PackedWeight
from .allocator import allocated


def nobody() -> None:
    return None


class CacheEntry:
    """It owns the dense copy and the memory of the scales, and knows the parameter and its memory by weak references."""

    views: tuple[Tensor, Tensor] | None = None  # [N, K] and [K, N], or twice that of another rank; None: dropped
    tensors: tuple[Callable[[], Tensor | None], ...]  # weak references to the parameter, absmax, absmax2, code2, offset

    def __init__(self, weight: PackedWeight):
        """Of a weight before it is decoded: a write in the meantime is noticed.

        Raises:
            AttributeError, RuntimeError, TypeError: a field is no tensor, or one without versions, or nothing to be known by.
        """
        packed, absmax, *second = weight.tensors()
        self.location, self.fingerprint = location(weight), fingerprint(weight)
        # the number of the storage: one that was freed leaves its address to others
        self.versions = packed.untyped_storage()._cdata, packed._version, absmax._version
        self.second = tuple(tensor._version for tensor in second)
        self.memory = StorageWeakRef(packed.untyped_storage())  # while this is kept, no other memory has its number
        # memory of the scales, so that no other numbers come to their addresses
        self.scales = tuple(tensor.untyped_storage() for tensor in (absmax, *second))
        self.device = packed.get_device()  # -1: the CPU
        self.stream = runtime.current_stream(self.device)  # on which it is decoded
        self.size = size_of(weight)  # bytes in the allocator
        self.compiled = False  # layers that are compiled as a whole read it
        self.watcher: Any = None  # of the storage of the packed bytes
        self.other_stream_reads = 0  # reads on other streams since the latest on its own

    def fill(self, weight: PackedWeight, result: Tensor, died: Callable[[Any], None]) -> None:
        """Hold what was decoded; ``died`` is called when a tensor that it was decoded from is freed."""
        tensors = weight.owner(), *weight[1:5]
        self.tensors = tuple(nobody if tensor is None else weakref.ref(tensor, died) for tensor in tensors)
        self.dense_memory, self.written = StorageWeakRef(result.untyped_storage()), result._version
        turned = result.t() if result.dim() == 2 else result
        self.views = (turned, result) if weight.transposed() else (result, turned)

    def empty(self) -> None:
        """Let go of everything but what its memory is charged by."""
        self.views, self.tensors, self.scales, self.watcher = None, (nobody,) * 5, (), None

    def of(self, weight: PackedWeight) -> Tensor | None:
        """The dense copy, if it is of these very tensors and none was written: another may have come to the address of one.
        The plain fields and the addresses are compared before.

        Raises:
            RuntimeError: an inference tensor, which has no version counter.
        """
        packed, absmax, absmax2, code2, offset, _, _, _, _, _ = weight
        views = self.views
        if views is None:
            return None
        owner, first, second, third, fourth = self.tensors
        parameter = owner()
        if (
            (parameter is packed or (parameter is not None and parameter is packed._base))  # see PackedWeight.owner
            and first() is absmax
            and second() is absmax2
            and third() is code2
            and fourth() is offset
            and self.versions == (packed.untyped_storage()._cdata, packed._version, absmax._version)
            and (absmax2 is None or self.second == (absmax2._version, code2._version, offset._version))  # type: ignore
            and views[0]._version == self.written  # nobody wrote into what is handed out
        ):
            return views[packed.shape[0] == 1]
        return None


def size_of(weight: PackedWeight) -> int:
    """Bytes that the dense copy takes at most in PyTorch's allocator."""
    return allocated(2 * weight.packed.nbytes * weight.dtype.itemsize)


def location(weight: PackedWeight) -> tuple[Any, ...]:
    """Which part of which parameter, and the dtype; wherever the parameter looks now, and for either way round."""
    owner, packed = weight.owner(), weight.packed
    return id(owner), packed.data_ptr() - owner.data_ptr(), packed.nbytes, weight.dtype


def fingerprint(weight: PackedWeight) -> tuple[Any, ...]:
    """Its plain fields and addresses, for either way round."""
    return weight._replace(packed=weight.packed.detach().view(-1).view(torch.uint8)).fingerprint()
