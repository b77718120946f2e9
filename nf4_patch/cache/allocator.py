"""Compute how many bytes PyTorch's CUDA allocator takes for a tensor."""

from __future__ import annotations

import functools
from typing import Any

import torch

MIB = 2**20
# The allocator never splits a block larger than ``max_split_size``. At most this many of its bytes stay unused.
UNSPLIT = 20 * MIB


@functools.cache
def settings() -> dict[str, Any]:
    """Return PYTORCH_CUDA_ALLOC_CONF's settings, or {} if the allocator is not PyTorch's native one."""
    if torch.cuda.memory.get_allocator_backend() != "native":
        return {}
    return dict(torch.cuda.memory._snapshot().get("allocator_settings", {}))


def allocated(nbytes: int, known: dict[str, Any] | None = None) -> int:
    """Return the most bytes that the allocator takes for ``nbytes``, including rounding and a larger block's unused remainder.

    ``known`` are the allocator's settings: ``roundup_power2_divisions``, by size in MiB, and ``max_split_size`` in bytes.
    """
    if known is None:
        known = settings() if torch.cuda.is_initialized() else {}
    rounded = -(-nbytes // 512) * 512
    table = {int(size): count for size, count in known.get("roundup_power2_divisions", {}).items()}
    if table:
        power = 1 << max(nbytes.bit_length() - 1, 0)  # the largest power of two up to nbytes
        divisions = table[max((size for size in table if size * MIB <= power), default=min(table))]
        if divisions > 1 and nbytes > 512 * divisions:
            rounded = max(rounded, -(-nbytes * divisions // power) * power // divisions)
    if rounded <= MIB:
        return rounded
    return rounded + (UNSPLIT if 0 < known.get("max_split_size", -1) <= rounded else MIB)
