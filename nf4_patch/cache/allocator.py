"""What PyTorch's CUDA allocator takes for a tensor, under the settings in force (PYTORCH_CUDA_ALLOC_CONF)."""

from __future__ import annotations

import functools
from typing import Any

import torch

MIB = 2**20
NOT_SPLIT = 20 * MIB  # a block from ``max_split_size`` on may be this much larger than what it is used for


def settings() -> dict[str, Any]:
    """Those of the allocator, once it is in use; {} before, and for an allocator that is not PyTorch's own."""
    return _settings() if torch.cuda.is_initialized() else {}


@functools.cache
def _settings() -> dict[str, Any]:
    if torch.cuda.memory.get_allocator_backend() != "native":
        return {}
    return dict(torch.cuda.memory._snapshot().get("allocator_settings", {}))


def allocated(nbytes: int, known: dict[str, Any] | None = None) -> int:
    """Bytes that the allocator takes at most: the size that it rounds to, and what it does not split off a larger block.

    Args:
        known: the settings, by default those in force; of these ``roundup_power2_divisions`` (of a
            power of two, by its size in MiB) and ``max_split_size`` (bytes; larger blocks are not split) change the result.
    """
    known = settings() if known is None else known
    rounded = -(-nbytes // 512) * 512
    table = {int(size): count for size, count in known.get("roundup_power2_divisions", {}).items()}
    if table:
        power = 1 << max(nbytes.bit_length() - 1, 0)  # the largest power of two up to nbytes
        divisions = table[max((size for size in table if size * MIB <= power), default=min(table))]
        if divisions > 1 and nbytes > 512 * divisions:
            rounded = max(rounded, -(-nbytes * divisions // power) * power // divisions)
    if rounded <= MIB:
        return rounded
    return rounded + (NOT_SPLIT if 0 < known.get("max_split_size", -1) <= rounded else MIB)
