"""Measure on this GPU whether the fused matmul is faster than the functions that it replaces, for one size.

A measurement multiplies random tensors. It takes about 30 ms, plus the compilation of the configs.
"""

from __future__ import annotations

import functools
import importlib
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..nf4 import runtime
from ..nf4.codes import code_of
from ..nf4.dequantize.launch import Launch
from ..nf4.weight import PackedWeight
from ..patching import placement
from ..patching.target import function_at
from ..patching.targets import MODULES, TARGETS
from . import launch
from .tuning import SmallMConfig

logger = logging.getLogger("nf4_patch")

Call = Callable[[], Any]
ROUNDS = 9
MARGIN = 0.03  # a config wins only if it is faster by more than this fraction
# The allowed error of the fused matmul, divided by the error of dequantize + matmul, both against fp64. The two errors
# differ a little, because the fused matmul adds in a different order.
SLACK = 1.01
# The GPU sleeps for this many cycles (about 3 ms) while the host enqueues a whole round.
HEAD_START = 5_000_000
DEQUANTIZE = "dequantize + matmul"


class Measurement(NamedTuple):
    """The config that won a measurement, if any, and all times."""

    config: SmallMConfig | None  # None if the fused matmul is not faster
    us: Mapping[str, float]  # median GPU time in us, by the name of the timed function


# The library functions with which the fused matmul is compared, by name.
RIVALS = {target.name: target for target in TARGETS if target.timed}


def originals_for(m: int) -> dict[str, Callable[..., Any]]:
    """Return the replaced library functions that can multiply ``m`` rows, by name."""
    entries = {name: placement.installed.get(name) for name, rival in RIVALS.items() if m <= rival.rows}
    return {name: entry.original for name, entry in entries.items() if entry is not None and entry.original is not None}


def measure(
    device: int, first: int, last: int, n: int, k: int, configs: Iterable[SmallMConfig],
    originals: Mapping[str, Callable[..., Any]],
) -> Measurement | None:  # fmt: skip
    """Check each config's results. Then time the correct configs, the originals, and dequantize + matmul, for a weight [n, k].

    The result applies to every row count from ``first`` to ``last``, because more rows never take less time. Configs are
    timed with ``last`` rows, where they are slowest. The other functions are also timed with ``first`` rows, where they
    are fastest. ``winner`` says which config is faster than all of them.

    Return None if the GPU has too little free memory, the host was too slow to time anything, or no config is right.

    Raises:
        KernelUnavailable: the dequantization kernel cannot be compiled.
    """
    with runtime.on_device(device), torch.no_grad():
        torch.cuda.synchronize()  # wait for kernels in other streams, which would distort the times
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
            except runtime.KernelUnavailable:
                # The config needs too many registers for this GPU, or an instruction that the GPU lacks.
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
                call = functools.partial(function_at(RIVALS[name].timed), original, x[:m], weight, state)
                # A rival that returns None instead of a product leaves the call to its caller, which dequantizes.
                if m <= RIVALS[name].rows and call() is not None:
                    theirs[f"{name}, {m} rows"] = call
        times = gpu_times({**ours, **theirs}, 4 * cache_size)
    if not ours or not all(times.values()):
        return None
    us = {name: statistics.median(values) for name, values in times.items()}
    return Measurement(by_name.get(winner(times, ours)), us)


def winner(times: Mapping[str, list[float]], ours: Iterable[str]) -> str:
    """Return the name of the config in ``ours`` with the smallest median time.

    Return "" unless each single time of the other functions exceeds this median by more than 3 % (MARGIN).
    """
    medians = {name: statistics.median(times[name]) for name in ours}
    best = min(medians, key=lambda name: medians[name], default="")
    others = [time for name, values in times.items() if name not in medians for time in values]
    return best if best and medians[best] * (1 + MARGIN) < min(others) else ""


def random_operands(device: int, m: int, n: int, k: int) -> tuple[PackedWeight, torch.Tensor]:
    """Return a random NF4 weight [n, k] with double quantization, and a random x [m, k], in bf16, or in fp16 before sm_80.

    The random numbers come from a new generator, because PyTorch's default generator belongs to the user's program.
    """
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
    QuantState: Any = importlib.import_module(MODULES["4-bit functions"]).QuantState
    second = QuantState(weight.absmax2, code=weight.code2, blocksize=weight.blocksize2, dtype=torch.float32)
    code = code_of(weight.quant_type, weight.packed.device)
    first = weight.absmax, torch.Size(weight.shape), code, weight.blocksize, weight.quant_type, weight.dtype
    return QuantState(*first, offset=weight.offset, state2=second)


def wrong(product: Callable[..., torch.Tensor], x: torch.Tensor, dense: torch.Tensor, truth: torch.Tensor) -> str:
    """Return what is wrong with the results of ``product``, a compiled config of (x, out), or "".

    The product with one-hot rows must equal columns of ``dense`` [n, k]. The product with ``x`` may differ from
    ``truth``, x @ dense.T in fp64, by at most 1 % (SLACK) more than dequantize + matmul does.
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
    """Time each call on the GPU after a read of ``flushed`` bytes, which empties the L2 cache. Return times in us, by name.

    A round gives one time per call. It is dropped if the GPU reached the first call before the host had enqueued all
    calls, because the GPU might have waited for the host.
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
