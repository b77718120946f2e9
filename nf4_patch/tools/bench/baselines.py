"""What is measured next to us: the saved originals of what is installed, whether the patch is on or not."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...patching import placement

logger = logging.getLogger("nf4_patch")

OURS = "nf4_patch"
BITSANDBYTES = "bitsandbytes"
UNSLOTH_CTYPES = "Unsloth ctypes"
UNSLOTH_TRITON = "Unsloth Triton"
UNSLOTH_MODULE = "unsloth.kernels.utils"

Dequantize = Callable[..., Any]  # (packed, quant_state, out=None) -> weight


@dataclass(frozen=True)
class Baseline:
    name: str
    dequantize: Dequantize
    captures: bool = True  # it launches on the current stream, so that a CUDA graph holds it


def original(module: str, attribute: str) -> Any:
    """The function as its library made it: what the patch has saved, or what is there now."""
    entry = placement.installed.get(f"{module}.{attribute}")
    if entry is not None and entry.original is not None:
        return entry.original
    return getattr(importlib.import_module(module), attribute, None)


def baselines(with_unsloth: bool = True) -> dict[str, Baseline]:
    """By name, bitsandbytes first. Imports Unsloth where it is installed and wanted."""
    found = [Baseline(BITSANDBYTES, original("bitsandbytes.functional", "dequantize_4bit"))]
    if with_unsloth:
        found += from_unsloth(unsloth_baselines) or []
    return {baseline.name: baseline for baseline in found}


def from_unsloth(find: Callable[[], Any]) -> Any:
    """What ``find`` gives once Unsloth is imported; None where it is not installed, or fails, which is logged."""
    if importlib.util.find_spec("unsloth") is None:
        return None
    try:
        importlib.import_module("unsloth")
        return find()
    except Exception as error:  # Unsloth refuses machines and releases in many ways
        logger.warning("Unsloth is installed and cannot be measured: %s: %s", type(error).__name__, error)
        return None


def unsloth_baselines() -> list[Baseline]:
    utils = importlib.import_module(UNSLOTH_MODULE)
    fused = original(UNSLOTH_MODULE, "_fast_dequantize_bnb")
    if fused is None:  # <= 2026.9.12: three launches on the stream that was current at import
        theirs = original(UNSLOTH_MODULE, "fast_dequantize")
        return [Baseline(UNSLOTH_CTYPES, theirs, captures=not hasattr(utils, "CUDA_STREAMS"))]
    if not getattr(utils, "_USE_NF4_KERNELS", False):
        return [Baseline(UNSLOTH_CTYPES, fused)]
    return [Baseline(UNSLOTH_CTYPES, utils._fast_dequantize_ctypes), Baseline(UNSLOTH_TRITON, fused)]
