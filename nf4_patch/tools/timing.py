"""GPU time by graph replay past the L2, for ``nf4-patch calibrate`` and the benchmarks.

The variants of a row are measured alternately, so that clocks and neighbours move all of them alike. The noise of a variant
is it against itself: its odd rounds against its even ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

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
