"""The patch on or off inside a block, and the originals that it replaces: for every tool and benchmark."""

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
UNSLOTH_MODULE = "unsloth.kernels.utils"


@contextlib.contextmanager
def patch(on: bool, **options: Any) -> Iterator[None]:
    """The patch on, with these options of ``nf4_patch.enable``, or off; afterwards as it was before.

    Off, bitsandbytes is as it comes, also where NF4_PATCH=1 patches it on its import: nothing is compared with itself.
    """
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
    """The function as its library made it: what the patch has saved, or what is there now."""
    entry = placement.installed.get(f"{module}.{attribute}")
    if entry is not None and entry.original is not None:
        return entry.original
    return getattr(importlib.import_module(module), attribute, None)


def dequantize_4bit() -> Callable[..., Any]:
    """bitsandbytes' own: (packed, quant_state, out=None) -> weight."""
    return original("bitsandbytes.functional", "dequantize_4bit")


def from_unsloth(find: Callable[[], Any]) -> Any:
    """What ``find`` gives once Unsloth is imported; None where it is not installed, or fails, which is logged."""
    if importlib.util.find_spec("unsloth") is None:
        return None
    try:
        importlib.import_module("unsloth")
        return find()
    except Exception as error:  # Unsloth refuses machines and releases in many ways
        logger.warning("nf4_patch: Unsloth is installed and cannot be measured: %s: %s", type(error).__name__, error)
        return None
