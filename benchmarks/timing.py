"""Description of the machine, wall-clock time, GPU time from CUDA graphs, and GPU time of each kernel from the profiler.

A CUDA graph uses so many weights that they overflow the L2 cache. Variants that are compared, such as two kernels, are
timed alternately, so that changes of the clock rate or the load affect all variants alike. The noise of a variant is the
relative difference between the medians of its odd and its even rounds.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import nf4_patch
from nf4_patch.tools.report import answer, provenance_data
from nf4_patch.tools.step import kernels as kernels
from nf4_patch.tools.step import processor
from nf4_patch.tools.step import synchronize as synchronize

Call = Callable[[], Any]
Inside = Callable[[str], AbstractContextManager[Any]]  # returns the context for a variant's name; entering is not timed
Clock = Callable[[Any], float]
L2_ROTATIONS = 8  # between two uses of a weight, so many times the L2 cache's size is read or written


@dataclass(frozen=True)
class Machine:
    """The machine and the releases with which a benchmark ran."""

    gpu: str
    capability: str
    driver: str
    clocks: str
    releases: dict[str, str]
    date: str = ""
    commit: str | None = None  # of the package's checkout, with "-dirty" if it has changes, None without a checkout
    host: str = ""  # name of the host, its processor and number of cores

    def __str__(self) -> str:
        releases = ", ".join(f"{name} {release}" for name, release in self.releases.items())
        return f"{self.gpu} (sm_{self.capability}), driver {self.driver}, {self.clocks}\n{self.host}\n{releases}"


SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def host() -> str:
    """Return the host's name, its processor and the number of cores that this process may use."""
    return f"{platform.node()}, {processor()}, {len(os.sched_getaffinity(0))} cores"


def machine() -> Machine:
    """Describe the current CUDA device, its current clocks and the installed releases."""
    device = torch.cuda.current_device()
    # by UUID, because nvidia-smi orders GPUs differently from CUDA and ignores CUDA_VISIBLE_DEVICES
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    fields = answer(*query).split(",")
    if len(fields) == len(SMI):
        driver, sm, sm_max, memory, power, temperature = (field.strip() for field in fields)
        clocks = f"SM clock {sm} of {sm_max}, memory clock {memory}, power limit {power}, {temperature} C"
    else:
        driver, clocks = "unknown", "clocks unknown (nvidia-smi did not answer)"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    known = provenance_data()
    installed = {"python": platform.python_version(), **known["releases"], "nf4-patch": nf4_patch.__version__}
    known["releases"] = installed | {"torch": torch.__version__}  # with the CUDA that it was built for
    return Machine(name, f"{major}{minor}", driver, clocks, host=host(), **known)


def wall_ms(call: Call) -> float:
    """Return the wall-clock milliseconds of a call, with the device synchronized before and after."""
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


@dataclass(frozen=True)
class Times:
    """Times of one variant, in the order of measurement and in the unit of the clock."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def noise(self) -> float:
        """Return abs(median of odd rounds / median of even rounds - 1), or 0 for a single value."""
        odd, even = self.values[1::2], self.values[0::2]
        return abs(statistics.median(odd) / statistics.median(even) - 1) if odd else 0.0


Taken = dict[str, Times]  # times by variant


def rotation(traffic: int) -> int:
    """Return how many weights must alternate, so that no weight is still in the L2 cache at its next use.

    ``traffic`` is the number of bytes that a call reads and writes.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info()
    wanted = -(-L2_ROTATIONS * properties.L2_cache_size // traffic)
    return max(1, min(max(wanted, 4), 160, int(free * 0.4 / traffic)))


def over(weights: Sequence[Sequence[Any]], functions: Mapping[str, Callable[..., Any]]) -> dict[str, list[Call]]:
    """Return for each function the calls to time: one call per weight, with the weight's parts as arguments."""
    return {name: [partial(function, *weight) for weight in weights] for name, function in functions.items()}


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture the calls in a CUDA graph, in their order. Two calls run before the capture, to compile the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def alternating(
    variants: Mapping[str, Any], clock: Clock, rounds: int, inside: Inside = nullcontext, warmups: int = 1
) -> Taken:
    """Time every variant with ``clock`` in each of ``rounds`` rounds. The order of the variants reverses every round.

    ``inside`` gives the context in which a variant runs. ``warmups`` further rounds run first, and are not timed.
    """
    values: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-warmups, rounds):
        for name in reversed(list(variants)) if round_ % 2 else variants:
            with inside(name):
                value = clock(variants[name])
            if round_ >= 0:
                values[name].append(value)
    return {name: Times(tuple(found)) for name, found in values.items()}


def gpu_times(variants: Mapping[str, Sequence[Call]], rounds: int = 20, inside: Inside = nullcontext) -> Taken:
    """Return the GPU time of each variant in microseconds per call, from alternating replays of CUDA graphs.

    Args:
        variants: the calls that each variant's graph captures. Their distinct buffers must overflow the L2 cache.
        inside: gives the context in which a variant is captured.
    """
    graphs = {}
    for name, calls in variants.items():
        with inside(name):
            graphs[name] = capture(calls), len(calls)
    return alternating(graphs, replay_us, rounds)


def replay_us(captured: tuple[torch.cuda.CUDAGraph, int]) -> float:
    """Replay a graph and return its GPU time in microseconds per call. ``captured`` is (graph, number of calls)."""
    graph, calls = captured
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The first replay is not timed. It writes back the dirty L2 lines of the previous variant, which would otherwise
    # cost 3 % of the time at 42 MB (H200).
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls
