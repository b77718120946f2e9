"""The replacement for a function of ``torch.utils.swap_tensors``, which refuses tensors with weak references."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...nf4.identity import OwnRef
from ...patching import dequantizer
from ...patching.replacement import Fallbacks, Function, replacement_of
from ...patching.target import Target


def getweakrefs(target: Target, original: Function) -> Function:
    """Replace ``weakref.getweakrefs``, so that it returns none of nf4_patch's weak references to a tensor.

    Cache and prefetcher first drop their references. ``getweakrefs`` is replaced instead of its caller
    ``swap_tensors``, because other modules might have imported ``swap_tensors`` already.
    """

    def others(object: Tensor) -> list[Any]:
        return [each for each in original(object) if type(each) is not OwnRef]

    def attempt(object: Any, /) -> Any:
        if not isinstance(object, Tensor):
            return original, object
        dequantizer.reader.forget(object)
        dequantizer.prefetch.forget(object)
        return others, object

    return replacement_of(target, original, Fallbacks(target.name), attempt)
