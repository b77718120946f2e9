"""Library functions that the cache has to know of: they read weights, or change what a weight is known by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..patching.replacement import Fallbacks, Function, instead, replacement_of
from ..patching.target import Target
from .store import cache


def observed(target: Target, original: Function) -> Function:
    """For the ``forward`` of an autograd function with the arguments (ctx, A, ...): ``cache="auto"`` looks at A."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if cache.auto is not None and len(args) > 1:
            cache.auto.forward(args[1])
        return original(*args, **kwargs)

    return replacement_of(target, original, Fallbacks(target.name), instead(forward))


def getweakrefs(target: Target, original: Function) -> Function:
    """For ``weakref.getweakrefs``, by which ``torch.utils.swap_tensors`` refuses a tensor with weak references.

    The cache lets go of the tensor first. ``swap_tensors`` itself may be held under any name, and is not replaced.
    """

    def attempt(object: Any, /) -> Any:
        if isinstance(object, Tensor):
            cache.forget(object)
        return original, object

    return replacement_of(target, original, Fallbacks(target.name), attempt)


def resize(target: Target, original: Function) -> Function:
    """For ``UntypedStorage.resize_``: FSDP frees and refills memory so, and keeps the version counters."""

    def attempt(self: torch.UntypedStorage, *size: int) -> Any:
        if self._cdata in cache.memories:
            cache.drop_memory(self._cdata, resized=True)
        return original, self, *size

    return replacement_of(target, original, Fallbacks(target.name), attempt)
