"""Roughly how much GPU time a run's hits saved, from a table that ``nf4-patch bench`` measured: an estimate."""

from __future__ import annotations

import itertools
import math
import sys

from ..patching.status import Status

# GPU time of one dequantization to a 16-bit type in us: elements, bitsandbytes 0.50.2, nf4_patch. By GPU.
# docs/performance.md: torch 2.11.0+cu130, triton 3.6.0, graph replays past the L2, bits compared first; Unsloth's ctypes path is as
# bitsandbytes within 1 %.
MEASURED: dict[str, tuple[tuple[int, float, float], ...]] = {
    "NVIDIA H200": (
        (512 * 2048, 7.52, 2.14),
        (1024 * 4096, 11.19, 4.03),
        (1024 * 8192, 15.87, 6.91),
        (4096 * 4096, 25.06, 12.62),
        (4096 * 14336, 71.61, 38.87),
        (28672 * 8192, 266.0, 146.3),
    ),
}
# The targets whose originals make the three launches that were measured.
THREE_LAUNCHES = (
    "bitsandbytes.functional.dequantize_4bit",
    "bitsandbytes.backends.cuda.ops._dequant_linear_fallback",
    "unsloth.kernels.utils.fast_dequantize",
)


def saved_a_call(gpu: str, elements: int) -> float:
    """us of GPU time that one call saves, by linear interpolation; past the table's ends in proportion or as its first.

    Raises:
        KeyError: ``gpu`` was not measured.
    """
    rows = [(n, theirs - ours) for n, theirs, ours in MEASURED[gpu]]
    if elements <= rows[0][0]:
        return rows[0][1]
    for (n, saved), (next_n, next_saved) in itertools.pairwise(rows):
        if elements <= next_n:
            return saved + (next_saved - saved) * (elements - n) / (next_n - n)
    return rows[-1][1] * elements / rows[-1][0]


def seconds_saved(status: Status, gpu: str | None = None) -> float | None:
    """Seconds of GPU time that the hits of ``status`` saved; None where the table says nothing about them.

    It says nothing about another GPU, an fp32 result, Unsloth's own fused kernel or the fused product.
    """
    gpu = name_of_gpu() if gpu is None else gpu
    hit = [target for target in status.targets if target.hits]
    if gpu not in MEASURED or not hit or any(target.name not in THREE_LAUNCHES for target in hit):
        return None
    total = 0.0
    for description, hits in status.shapes.items():
        shape, dtype = description.split()
        if hits and dtype not in ("float16", "bfloat16"):
            return None
        total += hits * saved_a_call(gpu, math.prod(int(side) for side in shape.split("x")))
    return total / 1e6


def name_of_gpu() -> str:
    """The first GPU's name; "" without one, or where torch was never imported."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else ""
