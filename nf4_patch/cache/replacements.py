"""Replacements of library functions, which tell cache and prefetcher about swaps, and the cache about resized storages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..patching import dequantizer
from ..patching.replacement import Fallbacks, Function, replacement_of
from ..patching.target import Target
from .store import cache


def getweakrefs(target: Target, original: Function) -> Function:
    """Replace ``weakref.getweakrefs``, so that cache and prefetcher first drop their weak references to the tensor.

    ``torch.utils.swap_tensors`` refuses tensors with weak references. Other modules might have imported ``swap_tensors``
    already, so ``getweakrefs``, which it calls, is replaced instead.
    """

    def attempt(object: Any, /) -> Any:
        if isinstance(object, Tensor):
            cache.forget(object)
            dequantizer.prefetch.forget(object)
        return original, object

    return replacement_of(target, original, Fallbacks(target.name), attempt)


def resize(target: Target, original: Function) -> Function:
    """Replace ``UntypedStorage.resize_``, so that the cache first drops the weights decoded from the storage.

    FSDP frees and refills storages with ``resize_``, which does not raise a version counter.
    """

    def attempt(self: torch.UntypedStorage, *size: int) -> Any:
        if self._cdata in cache.storages:
            cache.drop_storage(self._cdata, resized=True)
        return original, self, *size

    return replacement_of(target, original, Fallbacks(target.name), attempt)
