"""A cache entry: the dense copy of a packed weight, and the checks that the copy is still valid."""

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
    """Stand in for a weak reference whose object is gone."""
    return None


class CacheEntry:
    """The dense copy of a packed weight.

    An entry owns the dense copy and the storages of the scales. It refers weakly to the packed parameter and its storage.
    """

    # the dense copy as [N, K], and transposed as [K, N]. If the weight is not 2-D, both are the copy itself. None after
    # the copy was dropped
    views: tuple[Tensor, Tensor] | None = None
    tensors: tuple[Callable[[], Tensor | None], ...]  # weak references to the parameter, absmax, absmax2, code2, offset

    def __init__(self, weight: PackedWeight):
        """Record the weight's identity before it is decoded, so that a write during decoding is noticed.

        Raises:
            AttributeError, RuntimeError, TypeError: a field is not a tensor, or a tensor has no version counter.
        """
        packed, absmax, *second = weight.tensors()
        self.location, self.fingerprint = location(weight), fingerprint(weight)
        # ``_cdata`` identifies the storage. The storage's address does not, because addresses are reused.
        self.versions = packed.untyped_storage()._cdata, packed._version, absmax._version
        self.second = tuple(tensor._version for tensor in second)
        # while this weak reference is held, no other storage gets the same ``_cdata``
        self.memory = StorageWeakRef(packed.untyped_storage())
        # held, so that no other scales can be allocated at their addresses
        self.scales = tuple(tensor.untyped_storage() for tensor in (absmax, *second))
        self.device = packed.get_device()  # -1: the CPU
        self.stream = runtime.current_stream(self.device)  # the stream on which the weight is decoded
        self.size = size_of(weight)  # bytes that the dense copy takes in PyTorch's allocator
        self.compiled = False  # whether a compiled layer has read the dense copy
        self.watcher: Any = None  # a weak reference to the storage of the packed bytes, with a callback
        self.other_stream_reads = 0  # consecutive reads on streams other than ``stream``

    def fill(self, weight: PackedWeight, result: Tensor, died: Callable[[Any], None]) -> None:
        """Store the decoded weight. ``died`` is called when one of the weight's tensors is freed."""
        tensors = weight.owner(), *weight[1:5]
        self.tensors = tuple(nobody if tensor is None else weakref.ref(tensor, died) for tensor in tensors)
        self.dense_memory, self.written = StorageWeakRef(result.untyped_storage()), result._version
        transposed = result.t() if result.dim() == 2 else result
        self.views = (transposed, result) if weight.transposed() else (result, transposed)

    def empty(self) -> None:
        """Release the tensors.

        ``size`` and ``dense_memory`` stay, because the dense copy counts against the cache's budget until nothing uses
        its memory.
        """
        self.views, self.tensors, self.scales, self.watcher = None, (nobody,) * 5, (), None

    def of(self, weight: PackedWeight) -> Tensor | None:
        """Return the dense copy if it was decoded from exactly these tensors and nothing was written since, else None.

        The caller found the entry by addresses and plain fields. That alone proves nothing, because addresses are reused.

        Raises:
            RuntimeError: a tensor of the weight is an inference tensor, which has no version counter.
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
            and views[0]._version == self.written  # no reader wrote into the dense copy
        ):
            return views[packed.shape[0] == 1]
        return None


def size_of(weight: PackedWeight) -> int:
    """Return the most bytes that the dense copy takes in PyTorch's allocator."""
    return allocated(2 * weight.packed.nbytes * weight.dtype.itemsize)


def location(weight: PackedWeight) -> tuple[Any, ...]:
    """Return the parameter that the weight belongs to, the position in the parameter, and the weight's dtype.

    A weight and its transposed weight have the same location. Replacing the parameter's ``.data`` does not change it.
    """
    owner, packed = weight.owner(), weight.packed
    return id(owner), packed.data_ptr() - owner.data_ptr(), packed.nbytes, weight.dtype


def fingerprint(weight: PackedWeight) -> tuple[Any, ...]:
    """Return the addresses of the weight's tensors and all plain fields, to compare with those of a cache entry.

    They are equal for a weight and its transposed weight.
    """
    return weight._replace(packed=weight.packed.detach().view(-1).view(torch.uint8)).fingerprint()
