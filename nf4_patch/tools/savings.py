"""What a run's report advises: the budget of the cache that would have saved dequantizations."""

from __future__ import annotations

import math

from ..patching.status import Status
from .report import plural

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}  # bytes per element


def of_the_cache(status: Status) -> list[str]:
    """What the cache saved, or which budget would have saved what: in proportion to it, and more with checkpointing."""
    if status.cache.mode != "off":
        return [str(status.cache)]
    if not status.weights:
        return []
    from ..patching.cache.allocator import allocated  # imports torch, which the run has

    weights = sum(status.weights.values())
    reads = sum(status.shapes[shape] for shape in status.weights)
    size = 0
    for shape, count in status.weights.items():
        sides, dtype = shape.split()  # "4096x4096 bfloat16"
        size += count * allocated(math.prod(map(int, sides.split("x"))) * DTYPES[dtype])
    saved = 1 - weights / max(reads, 1)
    if saved <= 0:
        return []
    half = f'cache="{size / 2 / 2**30:.2f}GiB" at least {saved / 2:.0%}'
    return [
        f"cache: {plural(weights, 'weight')} would take {size / 2**30:.2f} GiB dequantized; "
        f"enable(cache=...) of that size would have saved {saved:.0%} of the dequantizations, {half}"
    ]
