"""What surrounds a read of the cache: library functions that only read what they dequantize, and changes of memory."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from ..context import is_compiling
from ..replacement import Fallbacks, Function
from ..targets import Target
from .store import cache


class Inside(threading.local):
    """By library: whether the thread is inside such a function."""

    bitsandbytes = unsloth = False


inside = Inside()


def reading(target: Target, original: Function) -> Function:
    """For the ``forward`` or ``backward`` of an autograd function, which reaches for the library's public dequantization."""
    library, is_forward = target.library, target.name.endswith("forward")

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        # no gate in the closure: PyTorch 2.8's Dynamo breaks the graph at a function whose closure holds an object
        if is_compiling() or not cache.on:
            return original(*args, **kwargs)
        if cache.auto is not None and is_forward and len(args) > 1:
            cache.auto.observe(args[1])  # A, of (ctx, A, B, ...)
        before = getattr(inside, library)
        setattr(inside, library, True)
        try:
            return original(*args, **kwargs)
        finally:
            setattr(inside, library, before)

    return read


def swap_tensors(target: Target, original: Function) -> Function:
    """For ``torch.utils.swap_tensors``, which refuses a tensor with weak references: the cache lets go of both first."""
    fallbacks = Fallbacks(target.name)

    @functools.wraps(original)
    def replacement(t1: Tensor, t2: Tensor) -> None:
        if cache.on:
            for tensor in (t1, t2):
                fallbacks.attempt(cache.forget, tensor)
        original(t1, t2)

    return replacement


def resize(target: Target, original: Function) -> Function:
    """For ``UntypedStorage.resize_``: FSDP frees and refills memory so, and keeps the version counters."""

    @functools.wraps(original)
    def resize_(self: torch.UntypedStorage, *size: int) -> Any:
        if cache.on and self._cdata in cache.memories:
            cache.drop_memory(self._cdata, resized=True)
        return original(self, *size)

    return resize_
