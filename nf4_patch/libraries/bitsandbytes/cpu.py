"""Dequantize the weights that bitsandbytes' own CPU code dequantizes wrongly (docs/notes/dequantize-4bit-rows.md).

On CPUs with AVX-512, bitsandbytes 0.49 and 0.50 begin a new quantization block at each row, so scales are wrong unless
the row length is a multiple of the blocksize.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...nf4.weight import PackedWeight
from ...patching import guards
from ...patching.context import is_compiling
from ...patching.counters import counters, warn_once
from ...patching.dequantizer import is_called_by
from ...patching.direct import by_formula
from ...patching.quant_state import weight_of
from ...patching.reasons import Reason
from ...version import release_of
from . import AUTOGRAD


def why_wrong() -> str:
    return (
        f"bitsandbytes {release_of('bitsandbytes')} dequantizes a weight wrongly on this CPU if its rows are no multiple of the "
        "blocksize (see docs/notes/dequantize-4bit-rows.md)"
    )


@functools.cache
def misreads_rows() -> bool:
    """Test with a small weight whether bitsandbytes' code for this CPU begins a quantization block at each row."""

    def try_it() -> bool:
        packed, absmax = torch.zeros(80, 1, dtype=torch.uint8, device="cpu"), torch.arange(1.0, 4.0, device="cpu")
        dense = torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, 64, "nf4", (2, 80), torch.float32)
        return not torch.equal(dense.flatten(), -absmax.repeat_interleave(64)[:160])  # the code of nibble 0 is -1

    if not hasattr(torch.ops.bitsandbytes, "dequantize_4bit"):  # bitsandbytes before 0.46 has no such code for the CPU
        return False
    with ThreadPoolExecutor(1) as pool:  # modes and transforms of this thread do not apply in a new thread
        return pool.submit(try_it).result()


def corrected(target: str, packed: Any, state: Any, out: Tensor | None) -> Tensor | None:
    """Return the dense weight if bitsandbytes would dequantize it wrongly, else None, so that the original runs.

    The forward of bitsandbytes 0.50's layers uses the wrong weight, in an op that is not replaced. The backward of these
    layers gets None too, so that the gradient matches the forward.
    """
    if is_compiling() or not isinstance(packed, Tensor):
        return None
    with torch._C.DisableTorchFunction():  # hide these checks from the user's modes
        if not is_wrong(packed, state, out) or (
            hasattr(torch.ops.bitsandbytes, "gemm_4bit") and is_called_by(AUTOGRAD)
        ):
            return None
        warn_once(
            f"nf4_patch: {why_wrong()}, so PyTorch operators dequantize it. Layers on this CPU still multiply wrongly"
        )
        weight: PackedWeight = weight_of(packed, state)
        with torch.no_grad():
            dense = by_formula(weight, out)
    counters.of(target, tuple(weight.shape), str(weight.dtype), "on the CPU").hits += 1
    return dense


def is_wrong(packed: Tensor, state: Any, out: Tensor | None) -> bool:
    if packed.device.type != "cpu":
        return False
    weight = weight_of(packed, state)
    if type(weight) is Reason or guards.why_not(weight, out=out, ignore=(Reason.NOT_CUDA,)) is not None:
        return False
    *rows, row = weight.shape
    return row % weight.blocksize != 0 and math.prod(rows) > 1 and misreads_rows()
