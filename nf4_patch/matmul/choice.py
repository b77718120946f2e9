"""Choose the config of a matmul: from the shipped table, or by a measurement at the first use of a size on this GPU.

A measurement takes about 30 ms, plus the compilation of the candidates. It multiplies random tensors in a thread of its own, so it
changes neither the call that caused it nor the state of that call's thread. The result is saved in Triton's cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..nf4 import runtime
from ..nf4.codes import code_of
from ..nf4.dequantize.compilation import MINIMUM_CAPABILITY
from ..nf4.dequantize.launch import Launch
from ..nf4.weight import PackedWeight
from ..patching import placement
from ..patching.context import backward_in_progress, modes_active
from ..version import __version__, release_of
from . import launch
from .tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS, SmallMConfig

logger = logging.getLogger("nf4_patch")

Call = Callable[[], Any]
LAST_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # the last number of rows of each range; a range shares one measurement
ROUNDS = 9
MARGIN = 0.03  # the fused matmul has to be faster by this fraction
SLACK = 1.01  # tolerance of errors against fp64 for the order of additions
HEAD_START = 5_000_000  # GPU cycles, about 3 ms, in which the host enqueues a whole round
DEQUANTIZE = "dequantize + matmul"
FILE = "nf4_patch_matmul.json"


class Measurement(NamedTuple):
    """The result of a measurement: the config that won, and the times that decided."""

    config: SmallMConfig | None  # None if the fused matmul is not faster
    us: Mapping[str, float]  # median GPU time in us, by what was timed


_configs: dict[tuple[int, int, int, int], SmallMConfig | None] = {}  # by device, m, n, k
measurements: dict[tuple[int, int, int, int], Measurement] = {}  # by device, last rows of the range, n, k
_choosing = threading.Lock()


def config_for(device: int, m: int, n: int, k: int, may_measure: bool = True) -> SmallMConfig | None:
    """Return the config for x [m, k] and a weight [n, k] on this GPU, or None if the fused matmul is not faster.

    The first answer stands until the process ends, so the recompute of a checkpoint gets the answer of its forward.

    Args:
        may_measure: False in a training step. A size that was never measured then gets None on a GPU without a shipped table.
    """
    if m > LAST_ROWS[-1]:
        return None
    size = device, m, n, k
    if size not in _configs:
        with _choosing:
            if size not in _configs:
                try:
                    _configs[size] = choose(device, m, n, k, may_measure)
                except Exception:
                    _configs[size] = None  # a second try would fail again, at every call
                    raise
    return _configs[size]


def choose(device: int, m: int, n: int, k: int, may_measure: bool) -> SmallMConfig | None:
    """Return the config from the shipped table, from this process, from disk, or from a new measurement, in this order."""
    capability, processors = runtime.capability_of(device), runtime.multiprocessors(device)
    if has_table(capability) or capability < MINIMUM_CAPABILITY or k % launch.STEP:
        return launch.config_for(capability, m, n, k, processors)
    first, last = next((low + 1, high) for low, high in zip((0, *LAST_ROWS), LAST_ROWS, strict=False) if m <= high)
    key = device, last, n, k
    if key not in measurements:
        configs, originals = candidates(last, n, k, processors), originals_for(first)
        saved = SavedMeasurement(device, last, n, k, originals)
        found = saved.load(configs)
        if found is None and may_measure and can_measure():
            with ThreadPoolExecutor(1) as pool:  # a new thread has no autocast, no modes and no private memory pool
                found = pool.submit(measure, device, first, last, n, k, configs, originals).result()
            if found is not None:
                saved.write(found)
                logger.info("nf4_patch: %s: %s", size_in_words(*key), outcome(found))
        if found is None:
            return None
        measurements[key] = found
    return measurements[key].config


def has_table(capability: tuple[int, int]) -> bool:
    """Return whether the shipped table was measured on GPUs of this capability."""
    return any(row.capability == capability for row in SMALL_M_ROWS)


def can_measure() -> bool:
    """Return whether this thread is in no capture, no trace, no dispatch mode and no backward."""
    tracing = torch.compiler.is_compiling() or runtime.is_capturing()
    return torch.cuda.is_available() and not (tracing or modes_active() or backward_in_progress() != -1)


def candidates(m: int, n: int, k: int, processors: int) -> list[SmallMConfig]:
    """Return the configs to measure: the choice of the shipped table, as on an H100, and the config meant for a T4."""
    tables = ((SMALL_M_ROWS, (9, 0)), (SMALL_M_CANDIDATES, (7, 5)))
    found = (launch.first_config(rows, capability, m, n, k, processors) for rows, capability in tables)
    return list(dict.fromkeys(config for config in found if config is not None))


class Rival(NamedTuple):
    """A library's function that the fused matmul has to beat."""

    rows: int  # the most rows that the function multiplies
    call: Callable[..., Any]  # with the original function, x [m, k], the PackedWeight and its QuantState


def rows_of_tokens(original: Callable[..., Any], x: torch.Tensor, weight: PackedWeight, state: Any) -> Any:
    """Call one of Unsloth's functions, which take x as a batch of single tokens, [m, 1, k]."""
    return original(x.unsqueeze(1), weight.packed, state, None)


RIVALS: Mapping[str, Rival] = {
    "bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl": Rival(
        64,
        lambda original, x, weight, state: original(
            x, weight.packed, weight.shape, weight.absmax2, weight.blocksize, weight.quant_type,
            absmax_8bit=weight.absmax, absmax_code=weight.code2, absmax_offset=weight.offset,
        ),
    ),
    "bitsandbytes.functional.gemv_4bit": Rival(
        1, lambda original, x, weight, state: original(x.unsqueeze(1), weight.packed, state=state)
    ),
    "unsloth.kernels.utils.fast_gemv": Rival(1, rows_of_tokens),
    "unsloth.kernels.utils._fast_gemv_bnb": Rival(1, rows_of_tokens),
    "unsloth.kernels.utils._gemv_rows": Rival(4, rows_of_tokens),
}  # fmt: skip


def originals_for(m: int) -> dict[str, Callable[..., Any]]:
    """Return, by name, the libraries' own functions for ``m`` rows that the fused matmul replaces in this process."""
    entries = {name: placement.installed.get(name) for name, rival in RIVALS.items() if m <= rival.rows}
    return {name: entry.original for name, entry in entries.items() if entry is not None and entry.original is not None}


def measure(
    device: int, first: int, last: int, n: int, k: int, configs: Iterable[SmallMConfig],
    originals: Mapping[str, Callable[..., Any]],
) -> Measurement | None:  # fmt: skip
    """Check the configs for x [last, k] and a weight [n, k], and time them against the originals.

    A config wins if its median time for the last rows is below every time of the originals, for the first and for the last rows
    of the range. More rows never take less time, so the config also wins for the rows between them.

    Returns:
        None if the GPU has too little free memory, or the host was too slow to time anything.
    """
    with runtime.on_device(device), torch.no_grad():
        torch.cuda.synchronize()  # kernels that still run in other streams would be timed too
        cache_size = torch.cuda.get_device_properties(device).L2_cache_size
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free < 8 * n * k + 8 * cache_size:
            return None
        weight, x = random_operands(device, last, n, k)
        dequantization = Launch(weight)
        dense, state = dequantization.run(), quant_state(weight)
        truth = torch.cat([x.double() @ rows.double().t() for rows in dense.split(256)], 1)
        ours: dict[str, Call] = {}
        by_name = {}
        for config in configs:
            try:
                product = launch.resolve(x, weight, None, config)
            except runtime.KernelUnavailable:  # too many registers for this GPU, or an instruction that it lacks
                continue
            if why := wrong(product, x, dense, truth):
                logger.warning("nf4_patch: %s is not used for %d x %dx%d on this GPU: %s", config, last, n, k, why)
                continue
            name = f"fused matmul {'-'.join(f'{value:d}' for value in config)}"
            ours[name], by_name[name] = functools.partial(product, x), config
        theirs: dict[str, Call] = {}
        for m in dict.fromkeys((first, last)):
            theirs[f"{DEQUANTIZE}, {m} rows"] = lambda x=x[:m]: F.linear(x, dequantization.run())  # type: ignore[misc]
            for name, original in originals.items():
                call = functools.partial(RIVALS[name].call, original, x[:m], weight, state)
                # Unsloth's _gemv_rows returns None to make its caller dequantize
                if m <= RIVALS[name].rows and call() is not None:
                    theirs[f"{name}, {m} rows"] = call
        times = gpu_times({**ours, **theirs}, 4 * cache_size)
    if not all(times.values()):
        return None
    us = {name: statistics.median(values) for name, values in times.items()}
    return Measurement(by_name.get(winner(times, ours)), us)


def winner(times: Mapping[str, list[float]], ours: Iterable[str]) -> str:
    """Return the name in ``ours`` with the smallest median time, or "" if it is not clearly faster than all other names.

    It is clearly faster if its median is below every single time of the others, by more than ``MARGIN``.
    """
    medians = {name: statistics.median(times[name]) for name in ours}
    best = min(medians, key=lambda name: medians[name], default="")
    others = [time for name, values in times.items() if name not in medians for time in values]
    return best if best and medians[best] * (1 + MARGIN) < min(others) else ""


def random_operands(device: int, m: int, n: int, k: int) -> tuple[PackedWeight, torch.Tensor]:
    """Return a nested NF4 weight [n, k] and x [m, k], in bf16, or fp16 before sm_80. The default random state stays untouched."""
    where = torch.device("cuda", device)
    dtype = torch.bfloat16 if runtime.capability_of(device) >= (8, 0) else torch.float16
    generator = torch.Generator(where).manual_seed(0)
    blocks = -(-n * k // 64)
    packed, absmax = (
        torch.randint(256, shape, dtype=torch.uint8, device=where, generator=generator)
        for shape in ((n * k // 2, 1), (blocks,))
    )
    code2 = torch.linspace(-1, 1, 256, device=where, dtype=torch.float32)
    absmax2 = torch.full((-(-blocks // 256),), 0.04, device=where, dtype=torch.float32)
    offset = torch.full((), 0.05, device=where, dtype=torch.float32)
    weight = PackedWeight(packed, absmax, absmax2, code2, offset, 64, 256, (n, k), dtype, "nf4")
    return weight, torch.randn(m, k, dtype=dtype, device=where, generator=generator)


def quant_state(weight: PackedWeight) -> Any:
    """Return bitsandbytes' QuantState of a nested weight."""
    from bitsandbytes.functional import QuantState

    second = QuantState(weight.absmax2, code=weight.code2, blocksize=weight.blocksize2, dtype=torch.float32)
    code = code_of(weight.quant_type, weight.packed.device)
    first = weight.absmax, torch.Size(weight.shape), code, weight.blocksize, weight.quant_type, weight.dtype
    return QuantState(*first, offset=weight.offset, state2=second)


def wrong(product: Callable[..., torch.Tensor], x: torch.Tensor, dense: torch.Tensor, truth: torch.Tensor) -> str:
    """Check a compiled config. Return the failure, or "" if its results are right.

    One-hot rows have to return columns of the dequantized weight. For ``x``, the error against fp64 must not exceed the error
    of a matmul with the dequantized weight.

    Args:
        dense: the dequantized weight [n, k].
        truth: x @ dense.T in fp64, [m, n].
    """
    m, k = x.shape
    columns = torch.arange(m, device=x.device) * 7919 % k
    out = torch.full(truth.shape, float("nan"), dtype=x.dtype, device=x.device)
    if not torch.equal(product(F.one_hot(columns, k).to(x.dtype), out), dense[:, columns].t()):
        return "one-hot rows do not return the dequantized weight"
    results = product(x, out.fill_(float("nan"))), F.linear(x, dense)
    ours, theirs = (float((result.double() - truth).norm()) for result in results)
    return "" if ours <= SLACK * theirs else f"error {ours:.3e} against fp64, dequantize + matmul {theirs:.3e}"


def gpu_times(calls: Mapping[str, Call], flushed: int) -> dict[str, list[float]]:
    """Return the GPU times of each call in us, with a cold L2 cache, one per round.

    A round in which the host did not keep ahead of the GPU is dropped, because its times contain gaps.

    Args:
        flushed: bytes to read before each call, to overwrite the L2 cache.
    """
    other = torch.zeros(flushed // 4, dtype=torch.float32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-1, ROUNDS):  # the first round warms up
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        events = {}
        for name in reversed(list(calls)) if round_ % 2 else list(calls):
            other.sum()
            begin, end = events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            begin.record()
            calls[name]()
            end.record()
        late = next(iter(events.values()))[0].query()
        torch.cuda.current_stream().synchronize()
        if round_ >= 0 and not late:
            for name, (begin, end) in events.items():
                times[name].append(begin.elapsed_time(end) * 1e3)
    return times


class SavedMeasurement:
    """The file of one measurement in Triton's cache folder. The folder's name depends on the GPU, the releases and the size."""

    def __init__(self, device: int, m: int, n: int, k: int, originals: Iterable[str]):
        libraries = sorted({name.partition(".")[0] for name in originals})
        releases = {
            "nf4_patch": __version__,
            "torch": torch.__version__,
            **{name: release_of(name) for name in libraries},
        }
        gpu = runtime.name_of(device), runtime.capability_of(device), runtime.multiprocessors(device)
        triton = runtime.triton.__version__ if runtime.triton else ""
        key = (*gpu, runtime.driver_version(), triton, sorted(releases.items()), sorted(originals), m, n, k)
        self.key = hashlib.sha256(repr(key).encode()).hexdigest()

    def load(self, allowed: Iterable[SmallMConfig]) -> Measurement | None:
        """Return the saved measurement, or None if there is none, the file is damaged, or its config is not ``allowed``."""
        try:
            path = self.folder().get_file(FILE)
            if path is None:
                return None
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            config = None if saved["config"] is None else SmallMConfig(*saved["config"])
            us = {str(name): float(value) for name, value in saved["us"].items()}
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return Measurement(config, us) if config is None or config in allowed else None

    def write(self, found: Measurement) -> None:
        """Save a measurement atomically. Without a writable folder, the next process measures again."""
        try:
            self.folder().put(json.dumps(found._asdict()), FILE, binary=False)
        except (OSError, RuntimeError) as error:
            logger.info("nf4_patch: the measurement was not saved: %s", error)

    def folder(self) -> Any:
        """Return Triton's cache manager for this key.

        Raises:
            OSError, RuntimeError: the folder cannot be made.
        """
        from triton.runtime.cache import get_cache_manager

        return get_cache_manager(self.key)


def size_in_words(device: int, last: int, n: int, k: int) -> str:
    """Return a measured size as text. ``last`` is the last number of rows of its range."""
    return f"GPU {device}, up to {last} rows x {n}x{k}"


def outcome(found: Measurement) -> str:
    """Return what runs, and the times that decided, as text."""
    times = ", ".join(f"{name} {us:.1f} us" for name, us in found.us.items())
    return f"{'the fused matmul' if found.config else 'the original'} runs ({times})"


def report() -> dict[str, str]:
    """Return the outcome of each size that was measured or read from disk in this process, by its size as text."""
    return {size_in_words(*key): outcome(found) for key, found in list(measurements.items())}
