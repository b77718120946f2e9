"""A dense copy of a packed weight, and what tells that the packed bytes still decode to it."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from ...nf4 import runtime
from ...nf4.weight import Weight
from .allocator import allocated


def nobody() -> None:
    return None


@dataclass(slots=True, eq=False)
class Cached:
    """It owns the dense copy and the memory of the scales, and knows the parameter and its memory by weak references."""

    location: tuple[Any, ...]  # of the Weight when it was decoded, as all down to ``memory``
    proof: tuple[Any, ...]
    owner: weakref.ref[Tensor]
    scales: tuple[Callable[[], Any], ...]  # weak references to absmax, absmax2, code2 and offset
    kept: tuple[UntypedStorage, ...]  # their memory: see Weight.proof
    memory: StorageWeakRef  # of the packed bytes: while this is kept, no other memory has its number
    dense: Tensor  # [N, K], or of whatever shape
    dense_memory: StorageWeakRef
    written: int  # the version of ``dense``
    stream: int | None  # on which it was decoded
    device: int  # -1: the CPU
    size: int  # bytes in the allocator
    pinned: bool  # for layers that are compiled as a whole: never evicted
    proofs: list[tuple[Any, ...]] = field(default_factory=list)  # its keys in ``Cache.results``
    same_size: OrderedDict[Cached, None] = field(default_factory=OrderedDict)  # the least recently used first
    watchers: list[Any] = field(default_factory=list)
    number: int = field(default_factory=itertools.count().__next__)  # of no other
    strangers: int = 0  # reads on other streams since the latest on its own
    dead: bool = False  # a tensor that it was decoded from was freed

    @classmethod
    def of(cls, weight: Weight, proof: tuple[Any, ...], result: Tensor, pinned: bool) -> Cached:
        """Of a decoded weight; ``proof`` is from before it was decoded."""
        scales = [nobody if tensor is None else weakref.ref(tensor) for tensor in weight[1:5]]
        return cls(
            location=location(weight),
            proof=proof,
            owner=weakref.ref(weight.owner()),
            scales=tuple(scales),
            kept=tuple(tensor.untyped_storage() for tensor in weight.tensors()[1:]),
            memory=StorageWeakRef(weight.packed.untyped_storage()),
            dense=result.t() if weight.transposed() else result,
            dense_memory=StorageWeakRef(result.untyped_storage()),
            written=result._version,
            stream=runtime.current_stream(weight.packed.get_device()) if weight.packed.is_cuda else None,
            device=weight.packed.get_device(),
            size=size_of(weight),
            pinned=pinned,
        )

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
    """The same for a weight and its transpose, whose packed bytes are [bytes, 1] and [1, bytes]."""
    return weight.packed.data_ptr(), weight.packed.nbytes, weight.dtype
