"""What a run's hits saved, measured on its own GPU: our dequantization beside the saved original."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nf4_patch

from ..patching.placement import installed
from ..patching.status import Status
from .report import plural

SHAPES, ROUNDS, SECONDS = 3, 20, 0.5  # no further shape is begun after so many seconds
QUEUE_CYCLES = 20_000_000  # about 10 ms in which the host fills the queue, so that its own time is not measured
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}  # bytes an element
DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"  # also for bitsandbytes' forward, which does a matmul besides


@dataclass(frozen=True)
class Saving:
    """Medians of one dequantization in microseconds of GPU time."""

    shape: str
    hits: int
    ours: float
    original: float

    def __str__(self) -> str:
        saved = self.hits * (self.original - self.ours) / 1e6
        times = f"{self.shape}: {self.ours:.1f} us, the original {self.original:.1f} us on this GPU"
        return f"{times} (nested NF4, blocksize 64); with {self.hits:,} hits {saved:.2g} s of GPU time saved"


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


def most_hit(status: Status) -> list[tuple[str, int]]:
    """The shapes to measure with their hits; none where a hit was a fused matmul, which is more than a dequantization."""
    hit = {shape: hits for shape, hits in status.shapes.items() if hits}
    if any(shape.endswith("fused matmul") for shape in hit):
        return []
    return sorted(hit.items(), key=lambda each: -each[1])[:SHAPES]


def measure(status: Status) -> list[Saving]:
    """In under a second; empty where there is nothing to measure, no GPU or too little memory on it."""
    if not (shapes := most_hit(status)):
        return []
    most = max(status.targets, key=lambda target: target.hits).name
    entry = installed.get(DEQUANTIZE if most.startswith("bitsandbytes") else most)
    if entry is None or entry.original is None:
        return []
    found, started = [], time.perf_counter()
    with contextlib.suppress(RuntimeError, ValueError, ImportError):  # the work is done: nothing raises any more
        for shape, hits in shapes:
            if time.perf_counter() - started < SECONDS and (times := compare(shape, entry.original)):
                found.append(Saving(shape, hits, *times))
    return found


def compare(shape: str, original: Callable[..., Any]) -> tuple[float, float] | None:
    """Ours and the original, median microseconds; None without a GPU, where memory is short or the bits differ."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    if not torch.cuda.is_available():
        return None
    sides, dtype = shape.split()
    size, device = torch.Size(map(int, sides.split("x"))), torch.cuda.current_device()
    flush_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if 16 * size.numel() + flush_bytes > free:  # the weight and two results in fp32, the packed weight and its scales
        return None
    weight = torch.randn(size, dtype=getattr(torch, dtype), device=device)
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    if not torch.equal(nf4_patch.dequantize_nf4(packed, state), original(packed, state)):
        return None
    flush = torch.ones(flush_bytes, dtype=torch.uint8, device=device)
    events: tuple[list[Any], list[Any]] = ([], [])
    torch.cuda._sleep(QUEUE_CYCLES)
    for _ in range(ROUNDS):
        for function, pairs in zip((nf4_patch.dequantize_nf4, original), events, strict=True):
            pairs.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))
            flush.amax()  # or the weight would be found in the L2 cache
            pairs[-1][0].record()
            function(packed, state)
            pairs[-1][1].record()
    torch.cuda.synchronize()
    ours, theirs = (sorted(begin.elapsed_time(end) for begin, end in pairs)[ROUNDS // 2] for pairs in events)
    return 1e3 * ours, 1e3 * theirs
