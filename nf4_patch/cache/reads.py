"""What surrounds a read of the cache: library functions that only read what they dequantize, and changes of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..patching.dequantizer import inside
from ..patching.replacement import Fallbacks, Function, instead, replacement_of
from ..patching.target import Target
from .store import cache


def reading(target: Target, original: Function) -> Function:
    """For the ``forward`` or ``backward`` of an autograd function, which reaches for the library's public dequantization."""
    library, is_forward = target.library, target.name.endswith("forward")

    def read(*args: Any, **kwargs: Any) -> Any:
        if cache.auto is not None and is_forward and len(args) > 1:
            cache.auto.observe(args[1])  # A, of (ctx, A, B, ...)
        before = getattr(inside, library)
        setattr(inside, library, True)
        try:
            return original(*args, **kwargs)
        finally:
            setattr(inside, library, before)

    return replacement_of(target, original, Fallbacks(target.name), instead(read))


def swap_tensors(target: Target, original: Function) -> Function:
    """For ``torch.utils.swap_tensors``, which refuses a tensor with weak references: the cache lets go of both first."""

    def attempt(t1: Tensor, t2: Tensor) -> Any:
        cache.forget(t1)
        cache.forget(t2)
        return original, t1, t2

    return replacement_of(target, original, Fallbacks(target.name), attempt)


def resize(target: Target, original: Function) -> Function:
    """For ``UntypedStorage.resize_``: FSDP frees and refills memory so, and keeps the version counters."""

    def attempt(self: torch.UntypedStorage, *size: int) -> Any:
        if self._cdata in cache.memories:
            cache.drop_memory(self._cdata, resized=True)
        return original, self, *size

    return replacement_of(target, original, Fallbacks(target.name), attempt)
