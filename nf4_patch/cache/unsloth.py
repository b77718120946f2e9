"""Let Unsloth's compiled layers read their weights from the cache."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from ..patching.counters import warn_once
from ..patching.placement import is_ours
from ..patching.replacement import Function, instead, replacement_of
from ..patching.switch import switch
from ..patching.target import Target
from .pinned import Layers


def only_unsloth_reads() -> bool:
    """Return whether no other library gets the weights that Unsloth's layers dequantize.

    A wrapper that another library put around Unsloth's dequantization would get them, and could write into them.
    """
    utils, fast_lora = (vars(sys.modules[f"unsloth.kernels.{name}"]) for name in ("utils", "fast_lora"))
    functions = utils["fast_dequantize"], fast_lora["fast_dequantize"]
    is_public = all(getattr(function, "__globals__", None) is utils for function in functions)
    return is_public and is_ours(utils["_fast_dequantize_bnb"])


def compiled_layers(target: Target, original: Function) -> Function:
    """Replace Unsloth's ``_wrap``, which compiles the whole ``forward`` of a layer class.

    The replacement also wraps the compiled ``forward``, so that layers of this class read their weights from the cache.
    """
    layers = Layers(target.name, only_unsloth_reads)
    wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # (original, replacement) by class

    def enter(cls: Any) -> None:
        wrapped[cls] = cls.forward, layers.entered(cls.forward)
        cls.forward = wrapped[cls][1]

    def wrap(cls, *args, **kwargs) -> None:
        original(cls, *args, **kwargs)
        enter(cls)

    def follow(config) -> None:
        """Wrap classes that were compiled before the cache was enabled. Restore all of them when it is disabled."""
        if not gate.on:
            for cls, (forward, entry) in list(wrapped.items()):
                if cls.forward is entry:
                    cls.forward = forward
            wrapped.clear()
            return
        if torch.__version__ < (2, 11):  # type: ignore[operator]
            warn_once("nf4_patch: Unsloth's compiled layers read cached weights only with PyTorch 2.11 or newer")
        waiting: list[Any] = [torch.nn.Module]
        while waiting:
            cls = waiting.pop()
            waiting += cls.__subclasses__()
            forward = vars(cls).get("forward")
            if getattr(forward, "_unsloth_block_compiled", False) and cls not in wrapped:
                enter(cls)

    gate = switch.gates["cache"]
    switch.follow(follow)
    return replacement_of(target, original, layers.dequantizer.fallbacks, instead(wrap))
