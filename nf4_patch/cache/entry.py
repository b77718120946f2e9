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
    """Stand in for a weak reference to a freed object, and return None."""
    return None


class CacheEntry:
    """The dense copy of a packed weight.

    An entry keeps the storages of the scales alive. It keeps neither the packed parameter nor the parameter's storage
    alive.
    """

    # the dense copy [N, K] and its transpose [K, N] (the copy twice if it is not 2-D), or None if there is no copy
    views: tuple[Tensor, Tensor] | None = None
    tensors: tuple[Callable[[], Tensor | None], ...]  # weak references to the parameter, absmax, absmax2, code2, offset

    def __init__(self, weight: PackedWeight):
        """Record the weight's tensors and versions before the weight is decoded.

        A write during the decode then makes the entry invalid.

        Raises:
            AttributeError, RuntimeError, TypeError: a field is not a tensor, or a tensor has no version counter.
        """
        packed, absmax, *second = weight.tensors()
        self.location, self.fingerprint = location(weight), fingerprint(weight)
        # A storage is identified by ``_cdata``, because another storage may get the same data address later.
        self.versions = packed.untyped_storage()._cdata, packed._version, absmax._version
        self.second = tuple(tensor._version for tensor in second)
        # As long as this weak reference exists, no other storage gets the same ``_cdata``.
        self.memory = StorageWeakRef(packed.untyped_storage())
        # The storages of the scales are kept alive, so that no other scales can get the same addresses.
        self.scales = tuple(tensor.untyped_storage() for tensor in (absmax, *second))
        self.device = packed.get_device()  # -1: the CPU
        self.stream = runtime.current_stream(self.device)  # the stream on which the weight is decoded
        self.size = size_of(weight)  # bytes that the dense copy takes in PyTorch's allocator
        self.watcher: Any = None  # weak reference to the packed bytes' storage; ``Cache._add`` sets it, with a callback
        self.other_stream_reads = 0  # consecutive reads on streams other than ``stream``

    def fill(self, weight: PackedWeight, result: Tensor, died: Callable[[Any], None]) -> None:
        """Store the decoded weight. ``died`` is called when one of the weight's tensors is freed."""
        tensors = weight.owner(), *weight[1:5]
        self.tensors = tuple(nobody if tensor is None else weakref.ref(tensor, died) for tensor in tensors)
        self.dense_memory, self.written = StorageWeakRef(result.untyped_storage()), result._version
        transposed = result.t() if result.dim() == 2 else result
        self.views = (transposed, result) if weight.transposed() else (result, transposed)

    def empty(self) -> None:
        """Release everything except ``size`` and ``dense_memory``.

        The cache needs these two to count the dense copy until nothing uses it.
        """
        self.views, self.tensors, self.scales, self.watcher = None, (nobody,) * 5, (), None

    def of(self, weight: PackedWeight) -> Tensor | None:
        """Return the dense copy if it came from exactly these tensors, and if neither the tensors nor the copy changed since.

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
    """Return the weight's key: the id of its parameter, the weight's position and size in the parameter, and its dtype.

    A transposed weight has the same key. Replacing the parameter's ``.data`` does not change the key.
    """
    owner, packed = weight.owner(), weight.packed
    return id(owner), packed.data_ptr() - owner.data_ptr(), packed.nbytes, weight.dtype


def fingerprint(weight: PackedWeight) -> tuple[Any, ...]:
    """Return the addresses of the weight's tensors and its other fields. A weight and its transpose have the same fingerprint."""
    return weight._replace(packed=weight.packed.detach().view(-1).view(torch.uint8)).fingerprint()
