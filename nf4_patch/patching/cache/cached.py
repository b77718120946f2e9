"""A dense copy of a packed weight, and what tells that the packed bytes still decode to it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...nf4 import runtime
from ...nf4.weight import Weight
from .allocator import allocated


def nobody() -> None:
    return None


class Cached:
    """It owns the dense copy and the memory of the scales, and knows the parameter and its memory by weak references."""

    def __init__(self, weight: Weight, proof: tuple[Any, ...], result: Tensor, pinned: bool):
        """Of a decoded weight; ``proof`` is from before it was decoded."""
        self.location = location(weight)
        self.proof = proof
        self.proofs = [proof]  # its keys in ``Cache.results``
        self.owner = weakref.ref(weight.owner())
        # weak references to absmax, absmax2, code2 and offset
        self.scales = tuple(nobody if tensor is None else weakref.ref(tensor) for tensor in weight[1:5])
        self.kept = tuple(tensor.untyped_storage() for tensor in weight.tensors()[1:])  # their memory: see Weight.proof
        # of the packed bytes: while this is kept, no other memory has its number
        self.memory = StorageWeakRef(weight.packed.untyped_storage())
        self.dense = result.t() if weight.transposed() else result  # [N, K], or of whatever shape
        self.dense_memory = StorageWeakRef(result.untyped_storage())
        self.written = result._version
        self.device = weight.packed.get_device()  # -1: the CPU
        self.stream = runtime.current_stream(self.device)  # on which it was decoded
        self.size = size_of(weight)  # bytes in the allocator
        self.pinned = pinned  # for layers that are compiled as a whole: never evicted
        self.same_size: OrderedDict[Cached, None] = OrderedDict()  # the least recently used first
        self.watchers: list[Any] = []
        self.strangers = 0  # reads on other streams since the latest on its own
        self.dead = False  # a tensor that it was decoded from was freed

    def is_of(self, weight: Weight) -> bool:
        """Whether it is of these very tensors: another may have come to the address of one, with its version."""
        packed, first, second, third, fourth, _, _, _, _, _ = weight
        absmax, absmax2, code2, offset = self.scales
        owner = self.owner()
        return (
            (owner is packed or (owner is not None and owner is packed._base))  # see Weight.owner
            and absmax() is first
            and absmax2() is second
            and code2() is third
            and offset() is fourth
            and self.dense._version == self.written  # nobody wrote into what is handed out
        )


def size_of(weight: Weight) -> int:
    """Bytes that the dense copy takes at most in PyTorch's allocator."""
    return allocated(2 * weight.packed.nbytes * weight.dtype.itemsize)


def location(weight: Weight) -> tuple[Any, ...]:
    """Which part of which parameter, and the dtype; wherever the parameter looks now, and for either way round."""
    owner, packed = weight.owner(), weight.packed
    return id(owner), packed.data_ptr() - owner.data_ptr(), packed.nbytes, weight.dtype
