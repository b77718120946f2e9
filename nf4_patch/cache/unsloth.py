"""Unsloth's compiled layers, which read weights that were dequantized before."""

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
    """Whether Unsloth's functions call its ``fast_dequantize``, and that calls ours, with no wrapper in between."""
    utils, fast_lora = (vars(sys.modules[f"unsloth.kernels.{name}"]) for name in ("utils", "fast_lora"))
    functions = utils["fast_dequantize"], fast_lora["fast_dequantize"]
    is_public = all(getattr(function, "__globals__", None) is utils for function in functions)
    return is_public and is_ours(utils["_fast_dequantize_bnb"])


def compiled_layers(target: Target, original: Function) -> Function:
    """For ``_wrap``, which makes one compiled region of the ``forward`` of a class of layers."""
    layers = Layers(target.name, only_unsloth_reads)
    entries: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by class: its own forward, and ours

    def enter(cls: Any) -> None:
        entries[cls] = cls.forward, layers.entered(cls.forward)
        cls.forward = entries[cls][1]

    def wrap(cls, *args, **kwargs) -> None:
        original(cls, *args, **kwargs)
        enter(cls)

    def follow(config) -> None:
        """The classes of models that were loaded before the cache was switched on; and all are as they were, once it is off."""
        if not gate.on:
            for cls, (forward, entry) in list(entries.items()):
                if cls.forward is entry:
                    cls.forward = forward
            entries.clear()
            return
        if torch.__version__ < (2, 11):  # type: ignore[operator]
            warn_once("nf4_patch: Unsloth's compiled layers do not read cached weights under PyTorch before 2.11")
        waiting: list[Any] = [torch.nn.Module]
        while waiting:
            cls = waiting.pop()
            waiting += cls.__subclasses__()
            forward = vars(cls).get("forward")
            if getattr(forward, "_unsloth_block_compiled", False) and cls not in entries:
                enter(cls)

    gate = switch.gates["cache"]
    switch.follow(follow)
    return replacement_of(target, original, layers.dequantizer.fallbacks, instead(wrap))
