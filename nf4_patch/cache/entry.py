"""A cache entry: the dense copy of a packed weight, and the checks that the copy is still valid."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..nf4 import runtime
from ..nf4.identity import Identity
from ..nf4.weight import PackedWeight
from .allocator import allocated


class CacheEntry:
    """The dense copy of a packed weight.

    An entry keeps the storages of the scales alive, but neither the packed parameter nor its storage.
    """

    # the dense copy [N, K] and its transpose [K, N] (the copy twice if it is not 2-D), or None if there is no copy
    views: tuple[Tensor, Tensor] | None = None
    # weak references with callbacks, to the weight's tensors and to the packed bytes' storage
    watchers: tuple[Any, ...] = ()

    def __init__(self, weight: PackedWeight):
        """Record the weight before it is decoded.

        Raises:
            AttributeError, RuntimeError, TypeError: a field is not a tensor, or a tensor has no version counter.
        """
        packed, *scales = weight.tensors()
        self.location, self.fingerprint, self.identity = location(weight), fingerprint(weight), Identity(weight)
        # The storages of the scales are kept alive, so that no other scales can get the same addresses.
        self.scales = tuple(tensor.untyped_storage() for tensor in scales)
        self.device = packed.get_device()  # -1: the CPU
        self.stream = runtime.current_stream(self.device)  # the stream on which the weight is decoded
        self.size = size_of(weight)  # bytes that the dense copy takes in PyTorch's allocator
        self.other_stream_reads = 0  # consecutive reads on streams other than ``stream``

    def fill(self, weight: PackedWeight, result: Tensor, died: Callable[[Any], None]) -> None:
        """Store the decoded weight. ``died`` is called when one of the weight's tensors is freed."""
        self.watchers = tuple(weakref.ref(each, died) for each in (weight.owner(), *weight.tensors()[1:]))
        self.dense_memory, self.written = StorageWeakRef(result.untyped_storage()), result._version
        transposed = result.t() if result.dim() == 2 else result
        self.views = (transposed, result) if weight.transposed() else (result, transposed)

    def empty(self) -> None:
        """Release everything except ``size`` and ``dense_memory``, which count the dense copy until nothing uses it."""
        self.views, self.scales, self.watchers = None, (), ()
        self.identity.forget()

    def of(self, weight: PackedWeight) -> Tensor | None:
        """Return the dense copy if it came from exactly these tensors, and neither they nor the copy changed since.

        Raises:
            RuntimeError: a tensor of the weight is an inference tensor, which has no version counter.
        """
        views = self.views
        # The last comparison finds out whether a reader wrote into the dense copy.
        if views is not None and self.identity.holds(weight, True) and views[0]._version == self.written:
            return views[weight[0].shape[0] == 1]
        return None


def size_of(weight: PackedWeight) -> int:
    """Return the most bytes that the dense copy takes in PyTorch's allocator."""
    return allocated(2 * weight.packed.nbytes * weight.dtype.itemsize)


def location(weight: PackedWeight) -> tuple[Any, ...]:
    """Return the weight's key. A transposed weight has the same key, and a new ``.data`` does not change the key."""
    owner, packed = weight.owner(), weight.packed
    return id(owner), packed.data_ptr() - owner.data_ptr(), packed.nbytes, weight.dtype


def fingerprint(weight: PackedWeight) -> tuple[Any, ...]:
    """Return ``PackedWeight.fingerprint`` of the flat packed bytes, which is the same for a weight and its transpose."""
    return weight._replace(packed=weight.packed.detach().view(-1).view(torch.uint8)).fingerprint()
