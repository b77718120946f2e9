"""Turn the patch on or off inside a ``with`` block, and find original functions, for tools and benchmarks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import nf4_patch

from ..patching import hooks, placement
from ..patching.switch import switch

logger = logging.getLogger("nf4_patch")


@contextlib.contextmanager
def patch(on: bool, **options: Any) -> Iterator[None]:
    """Turn the patch on or off for a block. Off means unpatched, even if NF4_PATCH=1 patched bitsandbytes."""
    import bitsandbytes.functional  # noqa: F401

    if on:
        with nf4_patch.enabled(**options):
            yield
        return
    before = switch.config
    try:
        nf4_patch.disable()
        yield
    finally:
        hooks.put_in_force(before)


def original(module: str, attribute: str) -> Any:
    """Return the saved original, or the current function."""
    entry = placement.installed.get(f"{module}.{attribute}")
    if entry is not None and entry.original is not None:
        return entry.original
    return getattr(importlib.import_module(module), attribute, None)


def dequantize_4bit() -> Callable[..., Any]:
    """Return bitsandbytes' original, (packed, quant_state, out=None) -> weight."""
    return original("bitsandbytes.functional", "dequantize_4bit")


def from_unsloth(find: Callable[[], Any]) -> Any:
    """Import Unsloth and return ``find()``, or None if this fails."""
    if importlib.util.find_spec("unsloth") is None:
        return None
    try:
        importlib.import_module("unsloth")
        return find()
    except Exception as error:  # Unsloth raises many kinds of errors for machines and releases that it does not support
        logger.warning("nf4_patch: Unsloth is installed but cannot be measured: %s: %s", type(error).__name__, error)
        return None
