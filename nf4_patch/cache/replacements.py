"""Replacements for library functions whose calls the cache must know: a forward pass, a swap of tensors, a resized storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..patching.replacement import Fallbacks, Function, instead, replacement_of
from ..patching.target import Target
from .store import cache


def observed(target: Target, original: Function) -> Function:
    """Replace the ``forward(ctx, A, ...)`` of an autograd function: ``cache="auto"`` observes A, then the original runs."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if cache.auto is not None and len(args) > 1:
            cache.auto.forward(args[1])
        return original(*args, **kwargs)

    return replacement_of(target, original, Fallbacks(target.name), instead(forward))


def getweakrefs(target: Target, original: Function) -> Function:
    """Replace ``weakref.getweakrefs``, with which ``torch.utils.swap_tensors`` refuses tensors that have weak references.

    The cache drops its weak references to the tensor first. ``swap_tensors`` cannot be replaced itself, because callers may
    hold it under any name.
    """

    def attempt(object: Any, /) -> Any:
        if isinstance(object, Tensor):
            cache.forget(object)
        return original, object

    return replacement_of(target, original, Fallbacks(target.name), attempt)


def resize(target: Target, original: Function) -> Function:
    """Replace ``UntypedStorage.resize_``, with which FSDP frees and refills a storage without a new version."""

    def attempt(self: torch.UntypedStorage, *size: int) -> Any:
        if self._cdata in cache.storages:
            cache.drop_storage(self._cdata, resized=True)
        return original, self, *size

    return replacement_of(target, original, Fallbacks(target.name), attempt)
