"""A QLoRA step with the patch on and off, alternating on the same model: a row by length, setting of the cache, and clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.record import DENSE, GPU_TIME, OURS, UNPATCHED, Check, Row
from nf4_patch.tools.bench.step import LENGTHS, Size, Step, optimizer_of
from nf4_patch.tools.bench.timing import Call, Inside, Taken, alternating, kernels, wall_ms
from nf4_patch.tools.report import Progress

METHOD = f"A QLoRA step, the patch on ({OURS}) and off alternating: wall time, and GPU time (the sum of its kernels and copies)."
Settings = dict[str, str | int]  # of the cache, by what they are called
OFF: Settings = {"": "off"}


def kernel_times(variants: Mapping[str, Call], inside: Inside, rounds: int) -> Taken:
    """Milliseconds of the kernels and copies that each launches, summed. Nothing where the profiler sees none (no CUPTI)."""

    def gpu_busy_ms(call: Call) -> float:
        return sum(ms for _, ms in kernels(call))

    kernels(torch.cuda.synchronize)  # starts the profiler
    taken = alternating(variants, gpu_busy_ms, rounds, inside, warmups=0)
    return {name: times for name, times in taken.items() if all(times.values)}


def every_length(subject: str, model: Any, tell: Progress, settings: Settings) -> Iterator[Row]:
    for i, size in enumerate(LENGTHS):
        tell("{}: {}x{} tokens".format(subject, *size), i, len(LENGTHS))
        yield from side_by_side(subject, model, size, settings)


def side_by_side(
    subject: str, model: Any, size: Size, settings: Settings, wall: int = 20, kernels: int = 2,
    dense: Callable[[Step], Step] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A row a setting of the cache, each next to the step without the patch: wall time, then GPU time.

    Args:
        settings: "": the cache is off and the row has no further name.
        wall, kernels: how many rounds of each clock; wall 0: GPU time only.
        dense: makes of the step without the patch one on 16-bit weights, whose GPU time is taken too.
    """
    optimizer = optimizer_of(model)
    steps = {name: Step(model, optimizer, size, True, cache) for name, cache in settings.items()}
    steps[UNPATCHED] = Step(model, optimizer, size, False)
    for step in steps.values():
        step.observe()
    losses = {loss for step in steps.values() for loss in step.losses}
    said = " / ".join(f"{loss:.6f}" for loss in sorted(losses))
    checks = {UNPATCHED: Check(len(losses) == 1, f"losses with the patch and without: {said}")}
    sizes = dict(zip(("batch", "tokens"), size, strict=True))

    def patched(name: str) -> contextlib.AbstractContextManager[None]:
        return steps[name].patched()

    clocks = {"": alternating(steps, wall_ms, wall, patched, warmups=3)} if wall else {}
    if dense:
        steps[DENSE] = dense(steps[UNPATCHED])
    clocks[GPU_TIME] = kernel_times(steps, patched, kernels)
    for clock, times in clocks.items():
        others = {name: times[name] for name in (UNPATCHED, DENSE) if name in times}
        for name in settings if times else ():
            step = steps[name]
            notes = {"kernel calls a step": str(step.calls), "loss": said}
            notes["peak memory"] = f"{gib(step.peak)} (unpatched {gib(steps[UNPATCHED].peak)})"
            if step.taken:
                notes["cache"] = gib(step.taken)
            words = ", ".join(filter(None, ("{} {}x{}".format(subject, *size), name, clock)))
            yield Row(words, "ms", {OURS: times[name], **others}, checks, sizes=sizes, notes=notes)


def gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"
