"""How a time is taken: GPU time by graph replay past the L2, host time by the call, and on which machine.

The variants of a row are measured alternately, so that clocks and neighbours move all of them alike. The noise of a variant
is it against itself: its odd rounds against its even ones.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import nf4_patch

from ...matmul import calibrated
from ...patching.config import Config
from ..report import answer, provenance_data

Call = Callable[[], Any]
Inside = Callable[[str], AbstractContextManager[Any]]  # what the variant of this name runs inside of, entered untimed
Clock = Callable[[Any], float]
L2_ROTATIONS = 8  # buffers of this many times the L2 between two uses of the same weight


@dataclass(frozen=True)
class Times:
    """What one variant took, in the order of measurement, in the unit of its comparison."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def noise(self) -> float:
        """abs(odd rounds / even rounds - 1), by medians; 0 for a single value."""
        odd, even = self.values[1::2], self.values[0::2]
        return abs(statistics.median(odd) / statistics.median(even) - 1) if odd else 0.0


Taken = dict[str, Times]  # by variant


@dataclass(frozen=True)
class Machine:
    """What every number depends on."""

    gpu: str
    capability: str
    driver: str
    clocks: str
    releases: dict[str, str]
    calibration: str = ""  # what is in force, or why it is not
    date: str = ""
    commit: str | None = None  # of the package's checkout, "-dirty" where it was changed; None: there is none

    def __str__(self) -> str:
        releases = ", ".join(f"{name} {release}" for name, release in self.releases.items())
        lines = [f"{self.gpu} (sm_{self.capability}), driver {self.driver}, {self.clocks}", releases, self.calibration]
        return "\n".join(filter(None, lines))


SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def machine() -> Machine:
    """The current CUDA device, its clocks at this moment and the installed releases."""
    device = torch.cuda.current_device()
    # by its UUID: nvidia-smi counts GPUs in another order than CUDA and ignores CUDA_VISIBLE_DEVICES
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    fields = answer(*query).split(",")
    if len(fields) == len(SMI):
        driver, sm, sm_max, memory, power, temperature = (field.strip() for field in fields)
        clocks = f"SM clock {sm} of {sm_max}, memory clock {memory}, power limit {power}, {temperature} C"
    else:
        driver, clocks = "unknown", "clocks unknown (nvidia-smi did not answer)"
    major, minor = torch.cuda.get_device_capability(device)
    calibrated.use(Config.read())
    name = torch.cuda.get_device_name(device)
    known = provenance_data()
    installed = {"python": platform.python_version(), **known["releases"], "nf4-patch": nf4_patch.__version__}
    known["releases"] = installed | {"torch": torch.__version__}  # with the CUDA that it was built for
    return Machine(name, f"{major}{minor}", driver, clocks, calibration=calibrated.in_force(device).status, **known)


def rotation(traffic: int) -> int:
    """How many weights of ``traffic`` bytes a call to go round so that none is found in the L2 again."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info()
    wanted = -(-L2_ROTATIONS * properties.L2_cache_size // traffic)
    return max(1, min(max(wanted, 4), 160, int(free * 0.4 / traffic)))


def over(weights: Sequence[Sequence[Any]], functions: Mapping[str, Callable[..., Any]]) -> dict[str, list[Call]]:
    """The calls of each function, one a weight, whose parts are its arguments."""
    return {name: [partial(function, *weight) for weight in weights] for name, function in functions.items()}


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls in order; two of them run first, outside it, so that nothing compiles inside."""
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
    """What the clock says of each variant in ``rounds`` rounds, after those that warm up; the order turns every round."""
    values: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-warmups, rounds):
        for name in reversed(list(variants)) if round_ % 2 else variants:
            with inside(name):
                value = clock(variants[name])
            if round_ >= 0:
                values[name].append(value)
    return {name: Times(tuple(found)) for name, found in values.items()}


def gpu_times(variants: Mapping[str, Sequence[Call]], rounds: int = 20, inside: Inside = nullcontext) -> Taken:
    """Microseconds per call of each variant on the GPU: replays of a graph of its calls, alternating.

    Args:
        variants: for each name the calls of one replay, over enough distinct buffers to overflow the L2.
        inside: what a variant is captured inside of.
    """
    graphs = {}
    for name, calls in variants.items():
        with inside(name):
            graphs[name] = capture(calls), len(calls)
    return alternating(graphs, replay_us, rounds)


def replay_us(captured: tuple[torch.cuda.CUDAGraph, int]) -> float:
    """Microseconds of a graph by the number of its calls."""
    graph, calls = captured
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()  # or this one would pay for what the one before left dirty in the L2: 3 % at 42 MB (H200)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def synchronize() -> None:
    """Nothing where there is no GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_ms(call: Call) -> float:
    """Milliseconds of wall time, the device synchronized before and after."""
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def kernels(call: Call) -> list[tuple[str, float]]:
    """(name, milliseconds) of each kernel and copy that a call launches, by PyTorch's profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # .events() would build a tree: 0.3 s a step
    on_gpu = (e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation())
    return [(event.name(), event.duration_ns() / 1e6) for event in on_gpu]
