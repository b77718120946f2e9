"""Choose the config of the fused matmul for a size: from the shipped table, or by a measurement at the size's first use."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..nf4 import runtime
from ..nf4.dequantize.compilation import MINIMUM_CAPABILITY
from ..patching.context import backward_in_progress, modes_active
from . import launch
from .measurement import Measurement, measure, originals_for
from .option import MatmulStatus
from .tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS, SmallMConfig

logger = logging.getLogger("nf4_patch")

# The largest row count of each range that one measurement serves. The ranges are 1, 2, 3 to 4, 5 to 8 and so on.
LAST_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
LARGEST_M = LAST_ROWS[-1]

_configs: dict[tuple[int, int, int, int], SmallMConfig | None] = {}  # the chosen configs, by device, m, n and k
measurements: dict[tuple[int, int, int, int], Measurement] = {}  # keys: device, largest row count of the range, n, k
_choosing = threading.Lock()


class Thread(threading.local):
    measures = False  # whether a measurement runs in this thread


_thread = Thread()


def config_for(device: int, m: int, n: int, k: int, may_measure: bool = True) -> SmallMConfig | None:
    """Return the config for x [m, k] and a weight [n, k], or None if the fused matmul is not faster.

    The answer never changes within a process, so that a recompute agrees with its forward. Without ``may_measure``, the
    answer is None if there is neither a shipped table nor an earlier measurement.
    """
    if m > LARGEST_M or device < 0:  # PyTorch's index of the CPU is -1
        return None
    size = device, m, n, k
    if size not in _configs:
        # A function that is being measured might call another function that the option replaces. Return None, so that
        # the original of this other function runs.
        if _thread.measures:
            return None
        with _choosing:
            if size not in _configs:
                try:
                    _configs[size] = choose(device, m, n, k, may_measure)
                except Exception:
                    _configs[size] = None  # do not try again, because another try would fail too
                    raise
    return _configs[size]


def choose(device: int, m: int, n: int, k: int, may_measure: bool) -> SmallMConfig | None:
    """Return the config from the shipped table or, on a GPU without one, from a measurement for the range of row counts.

    Return None if there is no measurement and none can be made now.
    """
    capability, processors = runtime.capability_of(device), runtime.multiprocessors(device)
    if has_table(capability):
        return launch.config_for(capability, m, n, k, processors)
    if capability < MINIMUM_CAPABILITY or k % launch.STEP or runtime.triton is None or torch.version.hip is not None:
        return None
    first, last = next((low + 1, high) for low, high in zip((0, *LAST_ROWS), LAST_ROWS, strict=False) if m <= high)
    key = device, last, n, k
    if key not in measurements:
        if not (may_measure and can_measure()):
            return None
        configs = candidates(last, n, k, processors)
        found = measured_apart(device, first, last, n, k, configs, originals_for(first))
        if found is None:
            return None
        measurements[key] = found
        logger.info("nf4_patch: %s", status_of(key, found))
    return measurements[key].config


def measured_apart(*arguments: Any) -> Measurement | None:
    """Call ``measure`` in a new thread, where autocast, modes and private memory pools of this thread do not apply.

    Return None if the kernel cannot be compiled or the GPU has too little memory.
    """
    with ThreadPoolExecutor(1, initializer=setattr, initargs=(_thread, "measures", True)) as pool:
        try:
            return pool.submit(measure, *arguments).result()
        except (runtime.KernelUnavailable, torch.cuda.OutOfMemoryError):  # the original matmul might still succeed
            return None


def has_table(capability: tuple[int, int]) -> bool:
    return any(row.capability == capability for row in SMALL_M_ROWS)


def can_measure() -> bool:
    """Return whether no capture, trace, backward or dispatch mode forbids a measurement now."""
    tracing = torch.compiler.is_compiling() or runtime.is_capturing()
    return not (tracing or modes_active() or backward_in_progress() != -1)


def candidates(m: int, n: int, k: int, processors: int) -> list[SmallMConfig]:
    """Return the configs to measure on a GPU without a table: those for an H100 and those for a T4."""
    tables = ((SMALL_M_ROWS, (9, 0)), (SMALL_M_CANDIDATES, (7, 5)))
    found = (launch.first_config(rows, capability, m, n, k, processors) for rows, capability in tables)
    return list(dict.fromkeys(config for config in found if config is not None))


def status_of(key: tuple[int, int, int, int], found: Measurement) -> MatmulStatus:
    return MatmulStatus(*key, fused=found.config is not None, us=dict(found.us))


def report() -> tuple[MatmulStatus, ...]:
    return tuple(status_of(key, found) for key, found in list(measurements.items()))
