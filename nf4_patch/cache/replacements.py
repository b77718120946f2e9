"""The replacement of a library function, which tells the cache about resized storages."""

from __future__ import annotations

from typing import Any

import torch

from ..patching.replacement import Fallbacks, Function, replacement_of
from ..patching.target import Target
from .store import cache


def resize(target: Target, original: Function) -> Function:
    """Replace ``UntypedStorage.resize_``, so that the cache first drops the weights decoded from the storage.

    FSDP frees and refills storages with ``resize_``, which does not raise a version counter.
    """

    def attempt(self: torch.UntypedStorage, *size: int) -> Any:
        if self._cdata in cache.storages:
            cache.drop_storage(self._cdata, resized=True)
        return original, self, *size

    return replacement_of(target, original, Fallbacks(target.name), attempt)
