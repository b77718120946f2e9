"""The baselines: original functions of the installed libraries, whether the patch is on or off."""

from __future__ import annotations

import importlib

from benchmarks.products import Functions
from benchmarks.record import BITSANDBYTES
from nf4_patch.libraries.unsloth import MODULE as UNSLOTH_MODULE
from nf4_patch.tools.patch import dequantize_4bit, from_unsloth, original

UNSLOTH_CTYPES = "Unsloth ctypes"
UNSLOTH_TRITON = "Unsloth Triton"


def baselines(in_graph: bool = False) -> Functions:
    """Return dequantizations by name, with bitsandbytes' first. If Unsloth is installed, import Unsloth and include its functions.

    Args:
        in_graph: whether to return only functions that a CUDA graph can capture.
    """
    return {BITSANDBYTES: dequantize_4bit(), **(from_unsloth(lambda: unsloths(in_graph)) or {})}


def unsloths(in_graph: bool) -> Functions:
    utils = importlib.import_module(UNSLOTH_MODULE)
    fused = original(UNSLOTH_MODULE, "_fast_dequantize_bnb")
    if fused is None:  # up to 2026.9.12; with CUDA_STREAMS, it launches on the stream that was current at import
        outside = in_graph and hasattr(utils, "CUDA_STREAMS")
        return {} if outside else {UNSLOTH_CTYPES: original(UNSLOTH_MODULE, "fast_dequantize")}
    if not getattr(utils, "_USE_NF4_KERNELS", False):
        return {UNSLOTH_CTYPES: fused}
    return {UNSLOTH_CTYPES: utils._fast_dequantize_ctypes, UNSLOTH_TRITON: fused}
